"""Attention in plain XLA operations: runs everywhere, partitions over any mesh, and is the reference for the kernels.

Follows Vaswani et al. 2017 (arXiv 1706.03762); the logit cap is Gemma 2's (arXiv 2408.00118).

Queries are processed in a few blocks of rows, each only against the keys that it may attend to. With a causal mask,
that avoids nearly half of the work. Compared to the straightforward einsum, mask, softmax, einsum, forward and
backward in f32 on two CPU cores: 0.9x the time at [B12, S64, N4, H32], 0.5x at [8, 256, 6, 64], 0.4x at [1, 512, 12,
64].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from plimsoll.framework.layers.kernels_call import (
    LENGTH_AXIS,
    SAVED_NAME,
    AttentionCall,
    make_mask_BST,
    separate_padding,
    softmax_with_sinks,
)


def why_not(call: AttentionCall) -> None:
    """Return None: XLA supports every call."""


def attend(
    call: AttentionCall,
    q_BSNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BS: Array | None,
    sinks_N: Array | None = None,
) -> Array:
    """Return softmax(scale * q k^T) v as [B, S, N, V]; logits and softmax in f32 (f64 for f64 inputs)."""
    if call.shards(LENGTH_AXIS) > 1:
        # Below, the G queries of a key head are rows of one matrix, which is not possible with positions on several
        # devices.
        N = q_BSNH.shape[2]
        k_BSKH = jnp.repeat(k_BSKH, N // k_BSKH.shape[2], axis=2)
        v_BSKH = jnp.repeat(v_BSKH, N // v_BSKH.shape[2], axis=2)
    q_BNSH = q_BSNH.swapaxes(1, 2)
    k_BKSH = k_BSKH.swapaxes(1, 2)
    v_BKSH = v_BSKH.swapaxes(1, 2)
    ids_BS = separate_padding(segments_BS)

    # 64 or 128 rows, but more if there would be over eight blocks: each block is compiled separately.
    rows = max(64, min(128, call.length // 4), -(-call.length // 8))
    if call.shards(LENGTH_AXIS) > 1:
        # Splitting a dimension that is sharded over devices would send every block through all of them.
        rows = call.length
    blocks = []
    for first in range(0, call.length, rows):
        last = min(first + rows, call.length)
        block = _attend_rows(call, q_BNSH, k_BKSH, v_BKSH, ids_BS, sinks_N, first, last)
        blocks.append(block)
    out_BNSH = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=2)
    return checkpoint_name(out_BNSH.swapaxes(1, 2), SAVED_NAME)


def _attend_rows(
    call: AttentionCall,
    q_BNSH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    ids_BS: Array | None,
    sinks_N: Array | None,
    first: int,
    last: int,
) -> Array:
    """Return rows [first, last) of the result, [B, N, last - first, V], from the keys that any of them may see."""
    B, N, _, H = q_BNSH.shape
    K = k_BKSH.shape[1]
    G = N // K
    wide = jnp.promote_types(q_BNSH.dtype, jnp.float32)
    # Finite, so that even a row without any key would not give NaN.
    never = -0.7 * float(jnp.finfo(wide).max)
    start = 0 if call.window is None else max(0, first - call.window + 1)
    k_BKTH = k_BKSH[:, :, start:last]
    v_BKTV = v_BKSH[:, :, start:last]
    # R = G * (last - first) rows share a key head. The arrays always have four axes: with a fifth one of size G, even
    # of size 1, XLA's CPU code takes up to twice the time.
    q_BKRH = q_BNSH[:, :, first:last].reshape(B, K, -1, H)
    logits = jnp.einsum("bkrh,bkth->bkrt", q_BKRH, k_BKTH, preferred_element_type=wide)
    logits = logits * call.scale
    if call.softcap is not None:
        logits = call.softcap * jnp.tanh(logits / call.softcap)
    rows_R = jnp.tile(jnp.arange(first, last), G)
    columns_T = jnp.arange(start, last)
    row_ids_BR = None
    column_ids_BT = None
    if ids_BS is not None:
        row_ids_BR = jnp.tile(ids_BS[:, first:last], G)
        column_ids_BT = ids_BS[:, start:last]
    mask_BRT = make_mask_BST(call.window, rows_R, columns_T, row_ids_BR, column_ids_BT)
    # All heads share the mask.
    masked_logits = jnp.where(mask_BRT[:, None], logits, never)
    if sinks_N is None:
        weights = jax.nn.softmax(masked_logits, axis=-1)
    else:
        # The rows of a key head are those of its first query head, then those of the next.
        sinks_KR = jnp.repeat(sinks_N.reshape(K, G), last - first, axis=1)
        weights = softmax_with_sinks(masked_logits, sinks_KR[:, :, None])
    weights = weights.astype(v_BKTV.dtype)
    block_BKRV = jnp.einsum("bkrt,bktv->bkrv", weights, v_BKTV)
    return block_BKRV.reshape(B, N, last - first, call.value_dim)
