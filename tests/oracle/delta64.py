"""The reference's Gated DeltaNet (arXiv 2412.06464), token by token, in plain JAX.

The layer is that of Qwen3-Next. The state of a head is a matrix [V, H], which the tokens of a document change one after
the other. There are no chunks.

Axis letters: B sequences, S positions (T of earlier tokens), N heads of values, H channels of a key, V of a value, E
channels of a convolution, W its taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracle.experiments import LinearAttention

Parameters = dict[str, jax.Array]
Linear = Callable[[str, jax.Array], jax.Array]  # (name of a linear layer, its input) -> its output
UNIT_EPS = 1e-6  # under the root of the lengths of queries and keys


def delta_net(
    one: LinearAttention, params: Parameters, home: str, linear: Linear, x_BSD: jax.Array, visible_BST: jax.Array
) -> jax.Array:
    """Return the layer's result [B, S, D].

    The names of the parameters start with `home`. A token sees another token if attention would: `visible_BST`.
    """
    batch, length, _ = x_BSD.shape

    def heads(name: str, count: int) -> jax.Array:
        convolved_BSE = silu(convolve(linear(name, x_BSD), params[f"{home}/{name}_conv"], visible_BST))
        return convolved_BSE.reshape(batch, length, count, -1)

    group_N = np.arange(one.heads) // (one.heads // one.key_heads)
    queries_BSNH = _unit(heads("query", one.key_heads))[:, :, group_N] / math.sqrt(one.key_dim)
    keys_BSNH = _unit(heads("key", one.key_heads))[:, :, group_N]
    values_BSNV = heads("value", one.heads)
    betas_BSN = 1.0 / (1.0 + jnp.exp(-linear("beta", x_BSD)))
    steps_BSN = jnp.logaddexp(0.0, linear("decay", x_BSD) + params[f"{home}/decay_bias"])
    decays_BSN = jnp.exp(-jnp.exp(params[f"{home}/log_rate"]) * steps_BSN)
    y_BSNV = _run(queries_BSNH, keys_BSNH, values_BSNV, decays_BSN, betas_BSN, visible_BST)
    y_BSNV = y_BSNV / jnp.sqrt(jnp.mean(y_BSNV**2, axis=-1, keepdims=True) + one.norm_eps)
    y_BSNV = y_BSNV * params[f"{home}/norm/scale"]
    return linear("output", y_BSNV.reshape(batch, length, -1) * silu(linear("gate", x_BSD)))


def _run(
    queries_BSNH: jax.Array,
    keys_BSNH: jax.Array,
    values_BSNV: jax.Array,
    decays_BSN: jax.Array,
    betas_BSN: jax.Array,
    visible_BST: jax.Array,
) -> jax.Array:
    """Return the states' answers to the queries, [B, S, N, V].

    Equation 10 is S_t = S_(t-1) a_t (I - b_t k_t k_t^T) + b_t v_t k_t^T, and the answer S_t q_t. A token that does not
    see the token before it starts with a state of zeros.
    """
    batch, _, count, channels = keys_BSNH.shape
    # Whether each token sees the one before it; the first token has none.
    continues_BS = jnp.pad(jnp.diagonal(visible_BST, -1, 1, 2), ((0, 0), (1, 0)))

    def run(state_BNVH: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query_BNH, key_BNH, value_BNV, decay_BN, beta_BN, continues_B = token
        beta_BN11 = beta_BN[..., None, None]
        projector_BNHH = key_BNH[..., :, None] * key_BNH[..., None, :]
        kept_BNHH = decay_BN[..., None, None] * (jnp.eye(channels) - beta_BN11 * projector_BNHH)
        state_BNVH = jnp.where(continues_B[:, None, None, None], state_BNVH, 0.0) @ kept_BNHH
        state_BNVH = state_BNVH + beta_BN11 * value_BNV[..., :, None] * key_BNH[..., None, :]
        return state_BNVH, (state_BNVH @ query_BNH[..., None])[..., 0]

    tokens = (queries_BSNH, keys_BSNH, values_BSNV, decays_BSN, betas_BSN, continues_BS)
    state_BNVH = jnp.zeros((batch, count, values_BSNV.shape[-1], channels), keys_BSNH.dtype)
    _, answers_SBNV = jax.lax.scan(run, state_BNVH, [jnp.moveaxis(array, 1, 0) for array in tokens])
    return jnp.moveaxis(answers_SBNV, 0, 1)


def convolve(x_BSE: jax.Array, taps_WE: jax.Array, visible_BST: jax.Array) -> jax.Array:
    """Return sum_d taps[W - 1 - d] x[t - d] of each channel, over the visible tokens of the last W."""
    width, length = len(taps_WE), x_BSE.shape[1]
    distance_ST = np.arange(length)[:, None] - np.arange(length)[None, :]
    is_near_ST = (distance_ST >= 0) & (distance_ST < width)
    taps_STE = jnp.where(is_near_ST[..., None], taps_WE[np.where(is_near_ST, width - 1 - distance_ST, 0)], 0.0)
    return jnp.einsum("bst,ste,bte->bse", visible_BST.astype(x_BSE.dtype), taps_STE, x_BSE)


def silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))


def _unit(x: jax.Array) -> jax.Array:
    """Return x with a length of 1 along its last axis."""
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + UNIT_EPS)
