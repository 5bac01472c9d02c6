"""Attention of new tokens to a key/value cache, in plain XLA: with few query rows, a kernel has nothing to tile.

A cache holds C slots. Sequences are padded on the left, so that all rows write the same slots: row b's tokens are in
slots [first[b], slot), and the S new tokens will be written to [slot, slot + S). This module only reads the cache: a
loop over layers that wrote to it would copy it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.kernels_call import softmax_with_sinks

# Names of the arrays of a cache that have an axis of slots, [B, C, K, H]. The others are states of linear attention,
# which each token replaces.
SLOTTED = ("key", "value", "latent")


def attend_with_cache(
    query_BSNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    cache: dict[str, jax.Array],
    *,
    first_B: jax.Array,
    slot: jax.Array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Compute `dot_product_attention` for the last S positions: [B, S, N, V] in the query's dtype.

    Args:
        query_BSNH: queries of the new tokens; head n uses key/value head n // (N / K).
        key_BSKH: keys of the new tokens; a new token attends to the keys up to its own.
        value_BSKH: values of the new tokens.
        cache: "key" [B, C, K, H] and "value" [B, C, K, V]; V equals H except in latent attention.
        first_B: int32[B], the slot of each row's first token.
        slot: int32 scalar, the slot that the first new token will be written to.
        scale: factor on the logits, applied before the cap.
        window: attend only to the last `window` tokens, including the new one; None means all.
        softcap: cap the logits: softcap * tanh(logits / softcap).
        sinks_N: see `dot_product_attention`.
    """
    B, S, N, H = query_BSNH.shape
    K = key_BSKH.shape[2]
    G = N // K
    wide = jnp.promote_types(query_BSNH.dtype, jnp.float32)
    # R = S * G rows share a key/value head, so keys and values are not repeated. The rows of one token are adjacent.
    q_BKRH = query_BSNH.reshape(B, S, K, G, H).swapaxes(1, 2).reshape(B, K, S * G, H)
    # The index of each row's token among the new tokens.
    steps_R = jnp.repeat(jnp.arange(S), G)
    # Slots before `first` are padding; slots from `slot` on are empty.
    slots_C = jnp.arange(cache["key"].shape[1])
    visible_BC = (slots_C >= first_B[:, None]) & (slots_C < slot)
    if window is None:
        visible_BRC = visible_BC[:, None]
    else:
        visible_RC = slots_C > (slot + steps_R[:, None]) - window
        visible_BRC = visible_BC[:, None] & visible_RC
    # -inf cannot turn a row into NaN here: a new token always sees itself.
    cache_logits_BKRC = _logits(q_BKRH, cache["key"], scale, softcap)
    cache_logits_BKRC = jnp.where(visible_BRC[:, None], cache_logits_BKRC, -jnp.inf)
    new_logits_BKRS = _logits(q_BKRH, key_BSKH, scale, softcap)
    if S > 1:
        distance_RS = steps_R[:, None] - jnp.arange(S)
        visible_RS = distance_RS >= 0
        if window is not None:
            visible_RS &= distance_RS < window
        new_logits_BKRS = jnp.where(visible_RS, new_logits_BKRS, -jnp.inf)
    all_logits = jnp.concatenate([cache_logits_BKRC, new_logits_BKRS], axis=-1)
    if sinks_N is None:
        weights = jax.nn.softmax(all_logits, axis=-1)
    else:
        sinks_KR = jnp.tile(sinks_N.reshape(K, G), S)
        weights = softmax_with_sinks(all_logits, sinks_KR[:, :, None])
    weights = weights.astype(value_BSKH.dtype)
    # The new tokens are added separately: concatenating their values to the cache would copy the cache.
    cache_weights, new_weights = jnp.split(weights, [cache["value"].shape[1]], axis=-1)
    cache_BKRV = jnp.einsum("bkrc,bckv->bkrv", cache_weights, cache["value"], preferred_element_type=wide)
    new_BKRV = jnp.einsum("bkrs,bskv->bkrv", new_weights, value_BSKH, preferred_element_type=wide)
    out_BKRV = (cache_BKRV + new_BKRV).astype(query_BSNH.dtype)
    return out_BKRV.reshape(B, K, S, G, -1).swapaxes(1, 2).reshape(B, S, N, -1)


def _logits(q_BKRH: jax.Array, keys_BCKH: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Return the logits [B, K, R, C] in float32 or wider, scaled and capped."""
    wide = jnp.promote_types(q_BKRH.dtype, jnp.float32)
    logits_BKRC = jnp.einsum("bkrh,bckh->bkrc", q_BKRH, keys_BCKH, preferred_element_type=wide)
    logits_BKRC = logits_BKRC * scale
    if softcap is None:
        return logits_BKRC
    return softcap * jnp.tanh(logits_BKRC / softcap)
