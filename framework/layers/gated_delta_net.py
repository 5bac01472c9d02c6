"""Gated DeltaNet: linear attention by the gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

A state per head is read and corrected instead of attending to all earlier tokens, and a gated norm completes the layer.

Axis letters: as in linear_attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Config, PositiveFloat, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layers.custom_gradients import save_inputs
from plimsoll.framework.layers.gated_delta_rule import CHUNK
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.linear_attention import LinearAttention
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layout import Nested, ParameterSpec

# Under the root of the norm of queries and keys.
_UNIT_EPS = 1e-6


@component
class GatedDeltaNet(LinearAttention):
    """Linear attention of x_BSD by the gated delta rule.

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_heads: N, the number of heads of values.
        num_key_heads: K, the number of heads of queries and keys; divides N. None means K = N.
        key_dim: H, channels of a query or key.
        value_dim: V, channels of a value.
        conv_width: W, the number of tokens that the convolution sees, the current one included.
        linear: config of the projections (bias, init); their sizes are filled in.
        norm_eps: added under the root of the norm of the heads' outputs.
        output_init_scale: factor on the initial output weight; set by the stack.
        chunk: tokens of a chunk of the recurrence; changes time and memory, not the result.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_heads: PositiveInt,
        num_key_heads: PositiveInt | None = None,
        key_dim: PositiveInt = 128,
        value_dim: PositiveInt = 128,
        conv_width: PositiveInt = 4,
        linear: Config = config_for(Linear),
        norm_eps: PositiveFloat = 1e-6,
        output_init_scale: float = 1.0,
        chunk: PositiveInt = CHUNK,
    ):
        super().__init__(
            dim=dim,
            num_heads=num_heads,
            num_key_heads=num_key_heads or num_heads,
            key_heads_field="num_key_heads",
            key_dim=key_dim,
            value_dim=value_dim,
            conv_width=conv_width,
            conv_bias=False,
            linear=linear,
            output_init_scale=output_init_scale,
            chunk=chunk,
        )
        # One number per head and token: too few for matrix optimizers and for shards over fsdp.
        rate_options = {"mesh_axes": (None, "model"), **self._rate_options}
        self.beta: Linear = linear.instantiate(**rate_options)
        self.decay: Linear = linear.instantiate(**rate_options)
        self.norm = RMSNorm(dim=value_dim, eps=norm_eps)

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of the convolutions [W, E], and of log_rate and decay_bias [N].

        The decay of a token is exp(-exp(log_rate) * softplus(decay + decay_bias)).
        """

        def initialize_rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))

        specs = super().param_specs()
        specs["log_rate"] = ParameterSpec(
            (self.num_heads,), "float32", ("model",), initializer=initialize_rates, roles=("heads",)
        )
        specs["decay_bias"] = ParameterSpec(
            (self.num_heads,), "float32", ("model",), initializer=jax.nn.initializers.ones, roles=("heads",)
        )
        return specs

    def children(self) -> dict[str, Layer]:
        """Return the projections query, key, value, gate, output, beta and decay, and the norm."""
        return {**super().children(), "beta": self.beta, "decay": self.decay, "norm": self.norm}

    def _compute_rates(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """See `LinearAttention._compute_rates`."""
        wide = jnp.promote_types(ctx.compute_dtype, jnp.float32)
        beta_BSN = self.beta(weights["beta"], x_BSD, ctx).astype(wide)
        decay_BSN = self.decay(weights["decay"], x_BSD, ctx).astype(wide)
        rate_N = jnp.exp(weights["log_rate"].astype(wide))
        log_decay_BSN = -rate_N * jax.nn.softplus(decay_BSN + weights["decay_bias"].astype(wide))
        return jax.nn.sigmoid(beta_BSN), log_decay_BSN

    def _get_rule_options(self) -> dict[str, Any]:
        """See `LinearAttention._get_rule_options`."""
        return {"query_scale": self.key_dim**-0.5, "unit_eps": _UNIT_EPS}

    def _complete(
        self, weights: Nested, y_BSNV: jax.Array, value_BSNV: jax.Array, gate_BSE: jax.Array, ctx: Context
    ) -> jax.Array:
        """See `LinearAttention._complete`: each head has a norm, and each channel a gate."""
        y_BSNV = self.norm(weights["norm"], y_BSNV, ctx)
        return save_inputs(_apply_gate)(y_BSNV.reshape(gate_BSE.shape), gate_BSE)

    def flops_per_token(self, seq_len: int) -> float:
        """Add the products of the correction to those of all linear attention."""
        N, H, V, C = self.num_heads, self.key_dim, self.value_dim, min(self.chunk, seq_len)
        # Keys with keys, [C, H]; the triangular system for V + H columns; the values that keys read from the state.
        correction = 2.0 * self.num_key_heads * H * C + N * C * (V + H) + 2.0 * N * H * V
        return super().flops_per_token(seq_len) + correction


def _apply_gate(y_BSE: jax.Array, gate_BSE: jax.Array) -> jax.Array:
    """Return y * silu(gate), computed in float32 or wider, in y's dtype."""
    wide = jnp.promote_types(y_BSE.dtype, jnp.float32)
    return (y_BSE.astype(wide) * jax.nn.silu(gate_BSE.astype(wide))).astype(y_BSE.dtype)
