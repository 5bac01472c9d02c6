"""Mamba-2: a state-space layer (Dao and Gu 2024, arXiv 2405.21060), as in Granite 4.0-H.

Each head has a state S [H, V]. A token decays it and adds its input x, and reads an output:

    S_t = exp(-A dt_t) S_(t-1) + dt_t B_t x_t,        y_t = C_t S_t + D x_t

Section 7 of the paper calls this linear attention: C are the queries, B the keys, and x the values. Here they have
these names, so that remat policies, adapters and the names of activations apply to all kinds of attention.

| paper | B | C | x | z | dt | A | D | headdim | d_state | ngroups |
|---|---|---|---|---|---|---|---|---|---|---|
| here | key | query | value | gate | step | exp(log_rate) | skip | head_dim | state_dim | num_groups |

Axis letters: as in linear_attention; a head has V = head_dim channels, a group of heads shares H = state_dim channels
of B and C, and K = num_groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Config, NonNegativeFloat, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layers.gated_delta_rule import CHUNK
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.linear_attention import LinearAttention
from plimsoll.framework.layout import Nested, ParameterSpec

# The initial step sizes and rates are those of the authors' code (state-spaces/mamba, modules/mamba2.py).
_INITIAL_STEPS = (0.001, 0.1)
_INITIAL_RATES = (1.0, 16.0)


@component
class Mamba2(LinearAttention):
    """A state-space layer, applied to x_BSD.

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_heads: N, the number of heads.
        head_dim: V, channels of a head.
        state_dim: H, the number of states of each channel.
        num_groups: K, the number of groups of heads; each shares B and C, and is normalized separately. Divides N.
        conv_width: W, the number of tokens that the convolution sees, the current one included.
        conv_bias: whether the convolution has a bias.
        linear: config of the projections (bias, init); their sizes are filled in.
        min_step, max_step: bounds of the step size dt.
        norm_eps: added under the root of the norm of the gated outputs.
        output_init_scale: factor on the initial output weight; set by the stack.
        chunk: tokens of a chunk of the recurrence; changes time and memory, not the result.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_heads: PositiveInt,
        head_dim: PositiveInt = 64,
        state_dim: PositiveInt = 128,
        num_groups: PositiveInt = 1,
        conv_width: PositiveInt = 4,
        conv_bias: bool = True,
        linear: Config = config_for(Linear),
        min_step: NonNegativeFloat = 0.0,
        max_step: PositiveFloat | None = None,
        norm_eps: PositiveFloat = 1e-5,
        output_init_scale: float = 1.0,
        chunk: PositiveInt = CHUNK,
    ):
        super().__init__(
            dim=dim,
            num_heads=num_heads,
            num_key_heads=num_groups,
            key_heads_field="num_groups",
            key_dim=state_dim,
            value_dim=head_dim,
            conv_width=conv_width,
            conv_bias=conv_bias,
            linear=linear,
            output_init_scale=output_init_scale,
            chunk=chunk,
        )
        if max_step is not None and max_step < min_step:
            raise ValueError(f"max_step = {max_step}; expected at least min_step = {min_step}")
        self.min_step = min_step
        self.max_step = max_step
        self.step: Linear = linear.instantiate(mesh_axes=("fsdp", "model"), **self._rate_options)
        self.norm = GatedRMSNorm(dim=num_heads * head_dim, num_groups=num_groups, eps=norm_eps)

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of the convolutions [W, E] and their biases [E], and of log_rate, step_bias and skip [N].

        A token's step size is softplus(step + step_bias), and its decay exp(-exp(log_rate) * step size).
        """

        def initialize_rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            return jnp.log(jax.random.uniform(key, shape, dtype, *_INITIAL_RATES))

        def initialize_steps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            low, high = map(math.log, _INITIAL_STEPS)
            steps = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
            # The inverse of softplus.
            return steps + jnp.log(-jnp.expm1(-steps))

        initializers = {"log_rate": initialize_rates, "step_bias": initialize_steps, "skip": jax.nn.initializers.ones}
        specs = super().param_specs()
        for name, initializer in initializers.items():
            specs[name] = ParameterSpec(
                (self.num_heads,), "float32", ("model",), initializer=initializer, roles=("heads",)
            )
        return specs

    def children(self) -> dict[str, Layer]:
        """Return the projections query, key, value, gate, output and step, and the norm."""
        return {**super().children(), "step": self.step, "norm": self.norm}

    def _compute_rates(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `LinearAttention._compute_rates`: the rate is the step size."""
        wide = jnp.promote_types(ctx.compute_dtype, jnp.float32)
        step_BSN = self.step(weights["step"], x_BSD, ctx).astype(wide)
        step_BSN = jax.nn.softplus(step_BSN + weights["step_bias"].astype(wide))
        step_BSN = jnp.clip(step_BSN, self.min_step, self.max_step)
        return step_BSN, -jnp.exp(weights["log_rate"].astype(wide)) * step_BSN

    def _get_rule_options(self) -> dict[str, Any]:
        """See `LinearAttention._get_rule_options`."""
        return {"corrects": False}

    def _complete(
        self, weights: Nested, y_BSNV: jax.Array, value_BSNV: jax.Array, gate_BSE: jax.Array, ctx: Context
    ) -> jax.Array:
        """See `LinearAttention._complete`: adds D x, and applies the gate and the norm."""

        def compute(
            y_BSNV: jax.Array, value_BSNV: jax.Array, gate_BSE: jax.Array, skip_N: jax.Array, scale_E: jax.Array
        ) -> jax.Array:
            wide = jnp.promote_types(y_BSNV.dtype, jnp.float32)
            y_BSNV = y_BSNV.astype(wide) + skip_N.astype(wide)[:, None] * value_BSNV.astype(wide)
            y_BSE = self.norm.normalize(y_BSNV.reshape(gate_BSE.shape), gate_BSE, scale_E)
            return y_BSE.astype(gate_BSE.dtype)

        # One function: its intermediate results in float32 would take more memory than its inputs.
        return save_inputs(compute)(y_BSNV, value_BSNV, gate_BSE, weights["skip"], weights["norm"]["scale"])


class GatedRMSNorm(Layer):
    """RMSNorm of y * silu(gate) over each of several equal groups of channels, with a scale per channel.

    Args:
        dim: E, the number of channels.
        num_groups: the number of groups; divides E.
        eps: added under the root.
    """

    def __init__(self, *, dim: int, num_groups: int, eps: float):
        self.dim = dim
        self.num_groups = num_groups
        self.eps = eps

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the spec of scale [E], sharded like the heads."""
        ones = jax.nn.initializers.ones
        return {"scale": ParameterSpec((self.dim,), "float32", ("model",), initializer=ones, roles=("channel",))}

    def localize(self, sizes: Mapping[str, int]) -> None:
        """See `Layer.localize`: the model axis divides the groups, or the channels of a single group."""
        self.num_groups = max(self.num_groups // sizes["model"], 1)

    def normalize(self, y_BSE: jax.Array, gate_BSE: jax.Array, scale_E: jax.Array) -> jax.Array:
        """Return the norm of y * silu(gate), in y's dtype, which is float32 or wider."""
        gated_BSE = y_BSE * jax.nn.silu(gate_BSE.astype(y_BSE.dtype))
        groups = gated_BSE.reshape(*gated_BSE.shape[:-1], self.num_groups, -1)
        mean_square = jnp.mean(jnp.square(groups), axis=-1, keepdims=True)
        normed_BSE = (groups * jax.lax.rsqrt(mean_square + self.eps)).reshape(gated_BSE.shape)
        return normed_BSE * scale_E.astype(y_BSE.dtype)
