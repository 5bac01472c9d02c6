"""Attention of one new token to a key/value cache: plain XLA, as one row of queries leaves a kernel nothing to block.

A cache holds C slots. Sequences are padded on the left, so that all rows write the same slot: row b's tokens are in
slots [first[b], slot), and the new token is yet to be written to `slot`. The cache is only read here: a loop over
layers that wrote it would copy it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from framework.layers.sinks import softmax_with_sinks


def cached_attention(
    query_B1NH: jax.Array,
    key_B1KH: jax.Array,
    value_B1KH: jax.Array,
    cache: dict[str, jax.Array],
    *,
    first_B: jax.Array,
    slot: jax.Array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """The result of `dot_product_attention` for the last position: [B, 1, N, V] in the query's dtype.

    Args:
        query_B1NH: the new token's queries; head n uses key/value head n // (N / K).
        key_B1KH: its keys, which it attends to besides.
        value_B1KH: its values.
        cache: "key" [B, C, K, H] and "value" [B, C, K, V], where V is H but in latent attention.
        first_B: int32[B], the slot of each row's first token.
        slot: int32 scalar, the slot that the new token will have.
        scale: multiplies the logits, before the cap.
        window: attend to the last `window` tokens, the new one among them; None means all.
        softcap: logits become softcap * tanh(logits / softcap).
        sinks_N: see `dot_product_attention`.
    """
    B, _, N, H = query_B1NH.shape
    K = key_B1KH.shape[2]
    G = N // K
    wide = jnp.promote_types(query_B1NH.dtype, jnp.float32)
    # The G queries of a key/value head stand together, so that keys and values are not repeated.
    q_BKGH = query_B1NH.reshape(B, K, G, H)
    slots_C = jnp.arange(cache["key"].shape[1])
    visible_BC = _visible(slots_C, first_B, slot, window)
    # -inf cannot make a row of NaN here: the new token always sees itself.
    visible_B11C = visible_BC[:, None, None]
    cache_logits_BKGC = _logits(q_BKGH, cache["key"], scale, softcap)
    cache_logits_BKGC = jnp.where(visible_B11C, cache_logits_BKGC, -jnp.inf)
    new_logits_BKG1 = _logits(q_BKGH, key_B1KH, scale, softcap)
    all_logits = jnp.concatenate([cache_logits_BKGC, new_logits_BKG1], axis=-1)
    if sinks_N is None:
        weights = jax.nn.softmax(all_logits, axis=-1)
    else:
        weights = softmax_with_sinks(all_logits, sinks_N.reshape(K, G, 1))
    weights = weights.astype(value_B1KH.dtype)
    out_BKGV = _mix(weights, cache["value"], value_B1KH, wide)
    return out_BKGV.astype(query_B1NH.dtype).reshape(B, 1, N, -1)


def _mix(
    weights: jax.Array,
    value_BCKH: jax.Array,
    new_value_B1KH: jax.Array,
    dtype: Any,
) -> jax.Array:
    """[B, K, G, V]: the sum of the values of C slots and of the new token, by weights [B, K, G, C + 1]."""
    B, _, K, H = new_value_B1KH.shape
    # The new token's part is added apart: joining its value to the cache would copy the cache.
    cache_BKGH = jnp.einsum("bkgc,bckh->bkgh", weights[..., :-1], value_BCKH, preferred_element_type=dtype)
    new_weight_BKG1 = weights[..., -1:].astype(dtype)
    new_value_BK1H = new_value_B1KH.reshape(B, K, 1, H).astype(dtype)
    return cache_BKGH + new_weight_BKG1 * new_value_BK1H


def _visible(
    slots_C: jax.Array,
    first_B: jax.Array,
    slot: jax.Array,
    window: int | None,
) -> jax.Array:
    """bool [B, C]: may the new token attend to this slot?"""
    # Slots before `first` are padding, those from `slot` on are empty.
    visible_BC = (slots_C >= first_B[:, None]) & (slots_C < slot)
    if window is not None:
        visible_BC &= slots_C > slot - window
    return visible_BC


def _logits(
    q_BKGH: jax.Array,
    keys_BCKH: jax.Array,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """[B, K, G, C] in float32 or wider, scaled and capped."""
    wide = jnp.promote_types(q_BKGH.dtype, jnp.float32)
    logits_BKGC = jnp.einsum(
        "bkgh,bckh->bkgc",
        q_BKGH,
        keys_BCKH,
        preferred_element_type=wide,
    )
    logits_BKGC = logits_BKGC * scale
    if softcap is None:
        return logits_BKGC
    return softcap * jnp.tanh(logits_BKGC / softcap)
