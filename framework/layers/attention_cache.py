"""Attention of one new token to a key/value cache: plain XLA, as one row of queries leaves a kernel nothing to block.

A cache holds C slots. Sequences are padded on the left, so that all rows write the same slot: row b's tokens are in
slots [first[b], slot), and the new one is yet to be written to `slot`. It is read only: a loop over layers that wrote
it would copy it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
) -> jax.Array:
    """[B, 1, N, H] in the query's dtype: what `dot_product_attention` gives for the last position.

    Args:
        query_B1NH: the new token's queries; head n uses key/value head n // (N / K).
        key_B1KH: its keys, which it attends to besides.
        value_B1KH: its values.
        cache: "key" and "value", [B, C, K, H] each.
        first_B: int32[B], the slot of each row's first token.
        slot: int32 scalar, the slot that the new token will have.
        scale: multiplies the logits, before the cap.
        window: attend to the last `window` tokens, the new one among them; None means all.
        softcap: logits become softcap * tanh(logits / softcap).
    """
    B, _, N, H = query_B1NH.shape
    K = key_B1KH.shape[2]
    wide = jnp.promote_types(query_B1NH.dtype, jnp.float32)
    q_BKGH = query_B1NH.reshape(B, K, N // K, H)

    def logits(keys_BCKH: jax.Array) -> jax.Array:
        x_BKGC = jnp.einsum("bkgh,bckh->bkgc", q_BKGH, keys_BCKH, preferred_element_type=wide) * scale
        return x_BKGC if softcap is None else softcap * jnp.tanh(x_BKGC / softcap)

    slots_C = jnp.arange(cache["key"].shape[1])
    seen_BC = (slots_C >= first_B[:, None]) & (slots_C < slot)
    if window is not None:
        seen_BC &= slots_C > slot - window
    old_BKGC = jnp.where(seen_BC[:, None, None], logits(cache["key"]), -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([old_BKGC, logits(key_B1KH)], axis=-1), axis=-1).astype(value_B1KH.dtype)
    out_BKGH = jnp.einsum("bkgc,bckh->bkgh", weights[..., :-1], cache["value"], preferred_element_type=wide)
    new_BKGH = weights[..., -1:].astype(wide) * value_B1KH.reshape(B, K, 1, H).astype(wide)
    return (out_BKGH + new_BKGH).astype(query_B1NH.dtype).reshape(B, 1, N, H)
