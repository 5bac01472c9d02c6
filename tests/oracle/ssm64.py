"""The reference's Mamba-2 (arXiv 2405.21060) as a matrix that mixes all tokens, in plain JAX. There are no states.

Axis letters: B sequences, S positions (T of earlier tokens), N heads, G groups of heads, H states of a channel, V
channels of a head, E channels of all heads, C of a group.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracle.delta64 import convolve, silu
from tests.oracle.experiments import StateSpace

Parameters = dict[str, jax.Array]
Linear = Callable[[str, jax.Array], jax.Array]  # (name of a linear layer, its input) -> its output


def state_space(
    one: StateSpace, params: Parameters, home: str, linear: Linear, x_BSD: jax.Array, visible_BST: jax.Array
) -> jax.Array:
    """Return the layer's result [B, S, D].

    Equation 2 of the paper: token t reads from token s the product of the decays after s, times C_t B_s dt_s x_s. The
    names of the parameters start with `home`. A token sees another token if attention would: `visible_BST`.
    """
    batch, length, _ = x_BSD.shape

    def parts(name: str, count: int) -> jax.Array:
        convolved_BSE = convolve(linear(name, x_BSD), params[f"{home}/{name}_conv"], visible_BST)
        if one.conv_bias:
            convolved_BSE = convolved_BSE + params[f"{home}/{name}_conv_bias"]
        return silu(convolved_BSE).reshape(batch, length, count, -1)

    group_N = np.arange(one.heads) // (one.heads // one.groups)
    reads_BSNH = parts("query", one.groups)[:, :, group_N]
    writes_BSNH = parts("key", one.groups)[:, :, group_N]
    inputs_BSNV = parts("value", one.heads)
    steps_BSN = jnp.logaddexp(0.0, linear("step", x_BSD) + params[f"{home}/step_bias"])
    steps_BSN = jnp.maximum(steps_BSN, one.min_step)
    if one.max_step is not None:
        steps_BSN = jnp.minimum(steps_BSN, one.max_step)
    total_BSN = jnp.cumsum(-jnp.exp(params[f"{home}/log_rate"]) * steps_BSN, axis=1)
    # A token that is not seen would have an exponent above 0.
    exponent_BSTN = jnp.where(visible_BST[..., None], total_BSN[:, :, None] - total_BSN[:, None], -jnp.inf)
    mixed_BSTN = jnp.exp(exponent_BSTN) * jnp.einsum("bsnh,btnh->bstn", reads_BSNH, writes_BSNH)
    y_BSNV = jnp.einsum("bstn,btn,btnv->bsnv", mixed_BSTN, steps_BSN, inputs_BSNV)
    y_BSNV = y_BSNV + params[f"{home}/skip"][:, None] * inputs_BSNV
    y_BSGC = (y_BSNV.reshape(batch, length, -1) * silu(linear("gate", x_BSD))).reshape(batch, length, one.groups, -1)
    y_BSGC = y_BSGC / jnp.sqrt(jnp.mean(y_BSGC**2, axis=-1, keepdims=True) + one.norm_eps)
    return linear("output", y_BSGC.reshape(batch, length, -1) * params[f"{home}/norm/scale"])
