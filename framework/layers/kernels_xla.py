"""Attention in plain XLA operations: runs everywhere, partitions over any mesh, and is the reference for the kernels.

Follows Vaswani et al. 2017 (arXiv 1706.03762); the logit cap is Gemma 2's (arXiv 2408.00118).

Queries are processed in a few blocks of rows, each only against the keys that it may attend to. With a causal mask,
that avoids nearly half of the work. Compared to the straightforward einsum, mask, softmax, einsum, forward and
backward in f32 on two CPU cores: 0.9x the time at [B12, S64, N4, H32], 0.5x at [8, 256, 6, 64], 0.4x at [1, 512, 12,
64].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from plimsoll.framework.layers import ring_attention
from plimsoll.framework.layers.kernels_call import (
    LENGTH_AXIS,
    SAVED_NAME,
    AttentionCall,
    BlockMask,
    Ids,
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
    if ring_attention.uses_ring(call, multiple=1):
        return ring_attention.attend(call, XlaKernel(call), q_BSNH, k_BSKH, v_BSKH, segments_BS, sinks_N)
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
    masked_logits = jnp.where(mask_BRT[:, None], logits, _never(wide))
    if sinks_N is None:
        weights = jax.nn.softmax(masked_logits, axis=-1)
    else:
        # The rows of a key head are those of its first query head, then those of the next.
        sinks_KR = jnp.repeat(sinks_N.reshape(K, G), last - first, axis=1)
        weights = softmax_with_sinks(masked_logits, sinks_KR[:, :, None])
    weights = weights.astype(v_BKTV.dtype)
    block_BKRV = jnp.einsum("bkrt,bktv->bkrv", weights, v_BKTV)
    return block_BKRV.reshape(B, N, last - first, call.value_dim)


# Logits of all heads that exist at a time, if the keys of a row are on several devices.
_MAX_LOGITS = 2**24


@dataclass(frozen=True)
class XlaKernel:
    """Attention to some of a row's keys; see `BlockKernel`. Groups of R queries are processed one after the other.

    Args:
        call: the attention call, with global sizes.
    """

    call: AttentionCall

    def block_size(self, length: int) -> int:
        """Return 1: it takes any number of keys."""
        return 1

    def forward(
        self, q_BNSH: Array, k_BKTH: Array, v_BKTV: Array, ids: Ids | None, mask: BlockMask
    ) -> tuple[Array, Array]:
        """See `BlockKernel`."""

        def attend_group(group: _QueryGroup) -> tuple[Array, Array]:
            mask_BRT = self._make_mask(group, k_BKTH, ids, mask)
            logits_BKGRT = self._compute_logits(group.q_BKGRH, k_BKTH, mask_BRT)
            log_sums_BKGR = jax.nn.logsumexp(logits_BKGRT, axis=-1)
            weights_BKGRT = jnp.exp(logits_BKGRT - log_sums_BKGR[..., None])
            return _multiply("bkgrt,bktv->bkgrv", weights_BKGRT.astype(v_BKTV.dtype), v_BKTV), log_sums_BKGR

        groups = _QueryGroup.split(q_BNSH, k_BKTH, ids)
        out, log_sums = jax.lax.map(attend_group, groups)
        return _join_groups(out), _join_groups(log_sums)

    def backward(
        self,
        q_BNSH: Array,
        k_BKTH: Array,
        v_BKTV: Array,
        ids: Ids | None,
        mask: BlockMask,
        out_BNSV: Array,
        log_sums_BNS: Array,
        grad_BNSV: Array,
    ) -> tuple[Array, Array, Array]:
        """See `BlockKernel`."""
        wide = log_sums_BNS.dtype
        # As in flash attention (arXiv 2205.14135, appendix B.2): the sum over all keys of a weight times its gradient.
        sums_BNS = jnp.sum(out_BNSV.astype(wide) * grad_BNSV.astype(wide), axis=-1)

        def differentiate_group(grads: tuple[Array, Array], inputs: tuple[_QueryGroup, Array, Array, Array]):
            group, log_sums_BKGR, sums_BKGR, grad_BKGRV = inputs
            mask_BRT = self._make_mask(group, k_BKTH, ids, mask)
            logits_BKGRT, pull_back = jax.vjp(lambda q, k: self._compute_logits(q, k, mask_BRT), group.q_BKGRH, k_BKTH)
            weights_BKGRT = jnp.exp(logits_BKGRT - log_sums_BKGR[..., None])
            dv_BKTV = _multiply("bkgrt,bkgrv->bktv", weights_BKGRT.astype(grad_BKGRV.dtype), grad_BKGRV)
            weight_grads_BKGRT = _multiply("bkgrv,bktv->bkgrt", grad_BKGRV, v_BKTV)
            dq_BKGRH, dk_BKTH = pull_back(weights_BKGRT * (weight_grads_BKGRT - sums_BKGR[..., None]))
            return (grads[0] + dk_BKTH, grads[1] + dv_BKTV), dq_BKGRH

        groups = _QueryGroup.split(q_BNSH, k_BKTH, ids)
        num_groups = groups.positions_R.shape[0]
        log_sums, sums, grad = (
            _split_rows(x, num_groups, k_BKTH.shape[1]) for x in (log_sums_BNS, sums_BNS, grad_BNSV)
        )
        zeros = (jnp.zeros(k_BKTH.shape, wide), jnp.zeros(v_BKTV.shape, wide))
        (dk_BKTH, dv_BKTV), dq = jax.lax.scan(differentiate_group, zeros, (groups, log_sums, sums, grad))
        return _join_groups(dq), dk_BKTH, dv_BKTV

    def _compute_logits(self, q_BKGRH: Array, k_BKTH: Array, mask_BRT: Array) -> Array:
        logits_BKGRT = _multiply("bkgrh,bkth->bkgrt", q_BKGRH, k_BKTH) * self.call.scale
        if self.call.softcap is not None:
            logits_BKGRT = self.call.softcap * jnp.tanh(logits_BKGRT / self.call.softcap)
        return jnp.where(mask_BRT[:, None, None], logits_BKGRT, _never(logits_BKGRT.dtype))

    def _make_mask(self, group: _QueryGroup, k_BKTH: Array, ids: Ids | None, mask: BlockMask) -> Array:
        columns_T = jnp.arange(k_BKTH.shape[2])
        if mask.offset is None:
            # All keys are at earlier positions.
            columns_T = jnp.full_like(columns_T, -1)
        rows_R = group.positions_R + (mask.offset or 0)
        return make_mask_BST(mask.window, rows_R, columns_T, group.ids_BR, None if ids is None else ids.keys)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _QueryGroup:
    """R queries of each head, at these positions; ids are int32 or None."""

    q_BKGRH: Array
    positions_R: Array
    ids_BR: Array | None

    @staticmethod
    def split(q_BNSH: Array, k_BKTH: Array, ids: Ids | None) -> _QueryGroup:
        """Return all groups along a new first axis; the logits of each are at most `_MAX_LOGITS`, if possible."""
        B, N, S, _ = q_BNSH.shape
        num_groups = 1
        while B * N * (S // num_groups) * k_BKTH.shape[2] > _MAX_LOGITS and S % (2 * num_groups) == 0:
            num_groups *= 2
        ids_MBR = None
        if ids is not None:
            ids_MBR = ids.queries.reshape(B, num_groups, -1).swapaxes(0, 1)
        return _QueryGroup(
            _split_rows(q_BNSH, num_groups, k_BKTH.shape[1]), jnp.arange(S).reshape(num_groups, -1), ids_MBR
        )


def _split_rows(x_BNS: Array, num_groups: int, kv_heads: int) -> Array:
    """Return [M, B, K, G, R, ...], given [B, N, S, ...]."""
    B, N, S = x_BNS.shape[:3]
    x = x_BNS.reshape(B, kv_heads, N // kv_heads, num_groups, S // num_groups, *x_BNS.shape[3:])
    return jnp.moveaxis(x, 3, 0)


def _join_groups(x_MBKGR: Array) -> Array:
    """Return [B, N, S, ...], given [M, B, K, G, R, ...]."""
    M, B, K, G, R = x_MBKGR.shape[:5]
    return jnp.moveaxis(x_MBKGR, 0, 3).reshape(B, K * G, M * R, *x_MBKGR.shape[5:])


def _multiply(subscripts: str, x: Array, y: Array) -> Array:
    """Return an einsum of two arrays in float32 (float64 for float64 inputs)."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _never(dtype: DTypeLike) -> float:
    """Return the logit of a key that is not seen: finite, so that even a row without any key would not give NaN."""
    return -0.7 * float(jnp.finfo(dtype).max)
