"""Attention of rows whose positions are sharded over `seq`, without gathering their keys.

**Ring** (Liu et al. 2023, arXiv 2310.01889): queries stay on their device; keys and values travel around the devices
of the axis. A device holds two shards of them: the one that it computes with, and the next one, which is arriving. Each
step gives a softmax over the keys of one shard and the logarithm of its sum, from which the softmax over all keys
follows. In the backward pass, the gradients of keys and values travel along with them.

With contiguous shards, the first device would only see its own keys, and all devices would wait for the last one. So
the row is cut into twice as many chunks as there are devices, and device d computes those with index d and 2R - 1 - d,
as in zigzag ring attention (Zhu 2024, github.com/zhuzilin/ring-flash-attention) and in Llama 3 (arXiv 2407.21783,
section 3.3.2). Then, after the first step, every device computes two chunks of queries against one chunk of keys per
step, without a causal mask:

    device d has queries d and 2R - 1 - d; keys arrive from device s
    s < d    both chunks of queries see chunk s and not chunk 2R - 1 - s
    s > d    queries d see neither chunk; queries 2R - 1 - d see both

Only queries, keys and values inside attention are in this order. It costs one exchange of them before, and of the
result after.

**Window**: if a query sees few keys, the work is equal anyway. Each device receives the last keys of the previous
shards at once, and there is no ring.

Axis letters: R devices along `seq`, L = S / R positions on each, C = L / 2 positions of a chunk; others as in
`kernels_call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from plimsoll.framework.layers.base import BATCH_AXES
from plimsoll.framework.layers.kernels_call import (
    HEADS_AXIS,
    LENGTH_AXIS,
    SAVED_NAME,
    AttentionCall,
    BlockKernel,
    BlockMask,
    Ids,
    separate_padding,
)
from plimsoll.framework.layers.state_passing import receive_previous
from plimsoll.framework.layout import get_current_mesh

T = TypeVar("T")

# With shorter chunks, exchanging queries and results takes about as long as computing them (v5p, Llama 3 8B).
MIN_CHUNK = 1024
# An id that no query has: ids of documents are positive, and those of padding negative.
_NO_SEGMENT = 0


def uses_ring(call: AttentionCall, multiple: int) -> bool:
    """Return whether the keys of this call travel instead of being gathered.

    Args:
        call: the call.
        multiple: the number of positions of a kernel's block is a multiple of this.

    Raises:
        ValueError: the call requests a ring, but its positions cannot be cut into equal chunks.
    """
    shards = call.shards(LENGTH_AXIS)
    if shards == 1 or call.context_parallel == "gather":
        return False
    reason = call.why_not_sharded()
    num_chunks = shards if _has_window(call) else 2 * shards
    if reason is None and call.length % (num_chunks * multiple):
        reason = f"it takes a multiple of {num_chunks * multiple} positions on {shards} devices, not {call.length}"
    if call.context_parallel == "ring":
        if reason:
            raise ValueError(f"context_parallel='ring' does not support this call: {reason}")
        return True
    return reason is None and (_has_window(call) or call.length // num_chunks >= MIN_CHUNK)


def attend(
    call: AttentionCall,
    kernel: BlockKernel,
    q_BSNH: Array,
    k_BSKH: Array,
    v_BSKV: Array,
    segments_BS: Array | None,
    sinks_N: Array | None,
) -> Array:
    """Return softmax(scale * q k^T) v as [B, S, N, V] in the query's dtype, summed in float32.

    Args:
        call: the call, with global sizes.
        kernel: computes softmaxes over some of the keys.
        q_BSNH, k_BSKH, v_BSKV, segments_BS, sinks_N: see `attention_kernels.dot_product_attention`.
    """
    assert call.mesh is not None, "a ring has several devices"
    heads = PartitionSpec(BATCH_AXES, LENGTH_AXIS, HEADS_AXIS, None)
    ids_spec = PartitionSpec(BATCH_AXES, LENGTH_AXIS)
    mapped = jax.shard_map(
        partial(attend_on_device, call, kernel),
        mesh=get_current_mesh(call.mesh),
        in_specs=(heads, heads, heads, ids_spec, PartitionSpec(HEADS_AXIS)),
        out_specs=heads,
        # Kernels do not declare over which mesh axes their outputs vary.
        check_vma=False,
    )
    return mapped(q_BSNH, k_BSKH, v_BSKV, separate_padding(segments_BS), sinks_N)


def attend_on_device(
    call: AttentionCall,
    kernel: BlockKernel,
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKV: Array,
    ids_BL: Array | None,
    sinks_N: Array | None,
) -> Array:
    """Return one device's share of the result, [B, L, N, V], inside `shard_map`.

    Args:
        call: the call, with global sizes.
        kernel: computes softmaxes over some of the keys.
        q_BLNH, k_BLKH, v_BLKV, sinks_N: the device's shards.
        ids_BL: its shard of `separate_padding(segments)`, or None.
    """
    attend_shard = _attend_window if _has_window(call) else _attend_ring
    return attend_shard(call, kernel, q_BLNH, k_BLKH, v_BLKV, ids_BL, sinks_N)


def _has_window(call: AttentionCall) -> bool:
    """Return whether a window hides some keys of a row."""
    return call.window is not None and call.window < call.length


# --- softmax over parts of the keys -----------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _PartialSoftmax:
    """The softmax over some keys.

    Attributes:
        out_BNSV: float32, the softmax over these keys times their values.
        log_sums_BNS: float32, the logarithms of the softmax's sums.
    """

    out_BNSV: Array
    log_sums_BNS: Array

    def merge(self, other: _PartialSoftmax) -> _PartialSoftmax:
        """Return the softmax over the keys of both."""
        log_sums = jnp.logaddexp(self.log_sums_BNS, other.log_sums_BNS)
        share = jnp.exp(self.log_sums_BNS - log_sums)
        other_share = jnp.exp(other.log_sums_BNS - log_sums)
        out = self.out_BNSV * share[..., None] + other.out_BNSV * other_share[..., None]
        return _PartialSoftmax(out, log_sums)

    def add_sinks(self, sinks_N: Array | None) -> _PartialSoftmax:
        """Return the softmax with one more logit per head, which has no value."""
        if sinks_N is None:
            return self
        sinks_NS = sinks_N.astype(self.log_sums_BNS.dtype)[:, None]
        log_sums = jnp.logaddexp(self.log_sums_BNS, sinks_NS)
        out = self.out_BNSV * jnp.exp(self.log_sums_BNS - log_sums)[..., None]
        return _PartialSoftmax(out, log_sums)


def _differentiate_sinks(sinks_N: Array | None, out_BNSV: Array, log_sums_BNS: Array, grad_BNSV: Array) -> Array | None:
    """Return the gradient of the sinks; a sink takes its share of the sum from all values."""
    if sinks_N is None:
        return None
    wide = log_sums_BNS.dtype
    share_BNS = jnp.exp(sinks_N.astype(wide)[:, None] - log_sums_BNS)
    products_BNS = jnp.sum(out_BNSV.astype(wide) * grad_BNSV.astype(wide), axis=-1)
    terms_XNS = (share_BNS * products_BNS).reshape(-1, *share_BNS.shape[-2:])
    return -jnp.sum(terms_XNS, axis=(0, 2)).astype(sinks_N.dtype)


def _run(
    kernel: BlockKernel, q_BNSH: Array, k_BKTH: Array, v_BKTV: Array, ids: Ids | None, mask: BlockMask
) -> _PartialSoftmax:
    out_BNSV, log_sums_BNS = kernel.forward(q_BNSH, k_BKTH, v_BKTV, ids, mask)
    return _PartialSoftmax(out_BNSV.astype(log_sums_BNS.dtype), log_sums_BNS)


# --- window -----------------------------------------------------------------------------------------------------------


def _attend_window(
    call: AttentionCall,
    kernel: BlockKernel,
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKV: Array,
    ids_BL: Array | None,
    sinks_N: Array | None,
) -> Array:
    """Return one device's result; its keys are those of its own positions and of the window before them."""
    assert call.window is not None
    length = q_BLNH.shape[1]
    block = kernel.block_size(length)
    num_previous = min(-(-(call.window - 1) // block) * block, call.length - length)
    if ids_BL is None:
        # The first devices have no previous keys, and must not see those that they receive.
        ids_BL = jnp.ones(q_BLNH.shape[:2], jnp.int32)
    k_BTKH, v_BTKV, key_ids_BT = (_prepend_previous(x, num_previous, call) for x in (k_BLKH, v_BLKV, ids_BL))
    first_position = jax.lax.axis_index(LENGTH_AXIS) * length - num_previous
    exists_T = first_position + jnp.arange(num_previous + length) >= 0
    ids = Ids(ids_BL, jnp.where(exists_T, key_ids_BT, _NO_SEGMENT))
    mask = BlockMask(offset=num_previous, window=call.window)
    q_BNLH, k_BKTH, v_BKTV = (x.swapaxes(1, 2) for x in (q_BLNH, k_BTKH, v_BTKV))
    out_BNLV: Array = attend_keys(kernel, mask, q_BNLH, k_BKTH, v_BKTV, ids, sinks_N)
    return out_BNLV.swapaxes(1, 2)


def _prepend_previous(x_BL: Array, count: int, call: AttentionCall) -> Array:
    """Return x preceded by the `count` positions before it, [B, count + L, ...]; those before the row are zeros."""
    return jnp.concatenate([receive_previous(x_BL, count, call.shards(LENGTH_AXIS)), x_BL], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_keys(
    kernel: BlockKernel,
    mask: BlockMask,
    q_BNSH: Array,
    k_BKTH: Array,
    v_BKTV: Array,
    ids: Ids | None,
    sinks_N: Array | None,
) -> Array:
    """Return the softmax over all keys that the queries see, [B, N, S, V]."""
    return _attend_keys_forward(kernel, mask, q_BNSH, k_BKTH, v_BKTV, ids, sinks_N)[0]


def _attend_keys_forward(kernel: BlockKernel, mask: BlockMask, q, k, v, ids, sinks):
    out, log_sums = _finish(_run(kernel, q, k, v, ids, mask), sinks, q)
    return out, (q, k, v, ids, sinks, out, log_sums)


def _attend_keys_backward(kernel: BlockKernel, mask: BlockMask, residuals, grad):
    q, k, v, ids, sinks, out, log_sums = residuals
    grads = kernel.backward(q, k, v, ids, mask, out, log_sums, grad)
    dq, dk, dv = (grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, None, _differentiate_sinks(sinks, out, log_sums, grad)


attend_keys.defvjp(_attend_keys_forward, _attend_keys_backward)


def _finish(total: _PartialSoftmax, sinks_N: Array | None, q: Array) -> tuple[Array, Array]:
    """Return the result in the query's dtype and the logarithms of its sums, named for remat policies."""
    total = total.add_sinks(sinks_N)
    out = checkpoint_name(total.out_BNSV.astype(q.dtype), SAVED_NAME)
    return out, checkpoint_name(total.log_sums_BNS, SAVED_NAME)


# --- ring -------------------------------------------------------------------------------------------------------------


def _attend_ring(
    call: AttentionCall,
    kernel: BlockKernel,
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKV: Array,
    ids_BL: Array | None,
    sinks_N: Array | None,
) -> Array:
    """Return one device's result, for contiguous positions."""
    order = _Zigzag(call.shards(LENGTH_AXIS))
    q, k, v = (order.exchange(x).swapaxes(2, 3) for x in (q_BLNH, k_BLKH, v_BLKV))
    ids = None if ids_BL is None else order.exchange(ids_BL)
    out: Array = _ring(kernel, order.shards, q, _Keys(k, v, ids), sinks_N)
    return order.exchange_back(out.swapaxes(2, 3))


@dataclass(frozen=True)
class _Zigzag:
    """The order in which device d of R has chunks d and 2R - 1 - d of a row, instead of 2d and 2d + 1.

    Args:
        shards: R.
    """

    shards: int

    def exchange(self, x_BL: Array) -> Array:
        """Return a device's two chunks in this order, [2, B, C, ...], given its contiguous positions [B, L, ...]."""
        even_BC, odd_BC = jnp.split(x_BL, 2, axis=1)
        even_BC = jax.lax.ppermute(even_BC, LENGTH_AXIS, self._routes(0))
        odd_BC = jax.lax.ppermute(odd_BC, LENGTH_AXIS, self._routes(1))
        # Chunks d and 2R - 1 - d have different parities.
        is_even = jax.lax.axis_index(LENGTH_AXIS) % 2 == 0
        low_BC = jnp.where(is_even, even_BC, odd_BC)
        high_BC = jnp.where(is_even, odd_BC, even_BC)
        return jnp.stack([low_BC, high_BC])

    def exchange_back(self, x_2BC: Array) -> Array:
        """Return contiguous positions [B, L, ...], given [2, B, C, ...]."""
        low_BC, high_BC = x_2BC
        is_even = jax.lax.axis_index(LENGTH_AXIS) % 2 == 0
        even_BC = jnp.where(is_even, low_BC, high_BC)
        odd_BC = jnp.where(is_even, high_BC, low_BC)
        even_BC = jax.lax.ppermute(even_BC, LENGTH_AXIS, [route[::-1] for route in self._routes(0)])
        odd_BC = jax.lax.ppermute(odd_BC, LENGTH_AXIS, [route[::-1] for route in self._routes(1)])
        return jnp.concatenate([even_BC, odd_BC], axis=1)

    def _routes(self, parity: int) -> list[tuple[int, int]]:
        """Return (its contiguous device, its device in this order) for each chunk with this parity."""
        chunks = range(parity, 2 * self.shards, 2)
        return [(chunk // 2, min(chunk, 2 * self.shards - 1 - chunk)) for chunk in chunks]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Keys:
    """The keys [2, B, K, C, H] and values [2, B, K, C, V] of two chunks, and their ids, int32 [2, B, C] or None."""

    k: Array
    v: Array
    ids: Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Queries:
    """The inputs of the backward pass for two chunks of queries.

    Attributes:
        q: [2, B, N, C, H].
        ids: int32 [2, B, C], or None.
        out: the result, [2, B, N, C, V].
        log_sums: the logarithms of its sums, float32 [2, B, N, C].
        grad: the gradient of the result.
    """

    q: Array
    ids: Array | None
    out: Array
    log_sums: Array
    grad: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Gradients:
    """Sums of the gradients of q, k and v, float32, in their shapes."""

    q: Array
    k: Array
    v: Array


@dataclass(frozen=True)
class _Pair:
    """A chunk of queries and a chunk of keys that these queries see: 0 is a device's low chunk, 1 its high one."""

    query_chunk: int | Array
    key_chunk: int | Array


# The low chunk of any device comes before the high chunk of any device.
_HIGH_AND_LOW = _Pair(1, 0)
_ALL_KEYS = BlockMask()
_CAUSAL = BlockMask(offset=0)


def _other_pair(step: Array) -> _Pair:
    """Return the pair that sees each other in a step, besides high queries and low keys."""
    comes_from_earlier_device = step <= jax.lax.axis_index(LENGTH_AXIS)
    chunk = jnp.where(comes_from_earlier_device, 0, 1)
    return _Pair(chunk, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(kernel: BlockKernel, shards: int, q: Array, keys: _Keys, sinks_N: Array | None) -> Array:
    """Return the result of a device's two chunks, [2, B, N, C, V], in the query's dtype.

    Args:
        kernel: computes one pair of chunks.
        shards: R.
        q: [2, B, N, C, H].
        keys: keys and values at the same positions.
        sinks_N: see `attend`.
    """
    return _ring_forward(kernel, shards, q, keys, sinks_N)[0]


def _ring_forward(kernel: BlockKernel, shards: int, q: Array, own_keys: _Keys, sinks_N: Array | None):
    def run(q: Array, query_ids: Array | None, keys: _Keys, mask: BlockMask) -> _PartialSoftmax:
        return _run(kernel, q, keys.k, keys.v, _make_ids(query_ids, keys.ids), mask)

    def add_pair(total: _PartialSoftmax, keys: _Keys, pair: _Pair) -> _PartialSoftmax:
        query_chunk, query_ids = _take((q, own_keys.ids), pair.query_chunk)
        part = run(query_chunk, query_ids, _take(keys, pair.key_chunk), _ALL_KEYS)
        return _put(total, pair.query_chunk, _take(total, pair.query_chunk).merge(part))

    def step(carry: tuple[_Keys, _PartialSoftmax], index: Array):
        keys, total = carry
        # The next keys arrive while these are in use.
        arriving = _send_to_next(keys, shards)
        total = add_pair(total, keys, _HIGH_AND_LOW)
        total = add_pair(total, keys, _other_pair(index))
        return (arriving, total), None

    arriving = _send_to_next(own_keys, shards)
    flat_q, flat_keys = _flatten_chunks((q, own_keys))
    total = _split_chunks(run(flat_q, flat_keys.ids, flat_keys, _CAUSAL))
    total = add_pair(total, own_keys, _HIGH_AND_LOW)
    (_, total), _ = jax.lax.scan(step, (arriving, total), jnp.arange(1, shards))
    out, log_sums = _finish(total, sinks_N, q)
    return out, (q, own_keys, sinks_N, out, log_sums)


def _ring_backward(kernel: BlockKernel, shards: int, residuals: tuple[Array, _Keys, Array | None, Array, Array], grad):
    q, own_keys, sinks_N, out, log_sums = residuals
    queries = _Queries(q, own_keys.ids, out, log_sums, grad)

    def run(queries: _Queries, keys: _Keys, mask: BlockMask) -> _Gradients:
        ids = _make_ids(queries.ids, keys.ids)
        grads = kernel.backward(queries.q, keys.k, keys.v, ids, mask, queries.out, queries.log_sums, queries.grad)
        dq, dk, dv = (grad.astype(log_sums.dtype) for grad in grads)
        return _Gradients(dq, dk, dv)

    def add_pair(total: _Gradients, keys: _Keys, pair: _Pair) -> _Gradients:
        part = run(_take(queries, pair.query_chunk), _take(keys, pair.key_chunk), _ALL_KEYS)
        return _Gradients(
            _put(total.q, pair.query_chunk, _take(total.q, pair.query_chunk) + part.q),
            _put(total.k, pair.key_chunk, _take(total.k, pair.key_chunk) + part.k),
            _put(total.v, pair.key_chunk, _take(total.v, pair.key_chunk) + part.v),
        )

    def step(carry: tuple[_Keys, _Gradients], index: Array):
        keys, total = carry
        arriving = _send_to_next(keys, shards)
        # The gradients of these keys by the previous devices arrive while this device computes its own.
        dk, dv = _send_to_next((total.k, total.v), shards)
        total = add_pair(_Gradients(total.q, dk, dv), keys, _HIGH_AND_LOW)
        total = add_pair(total, keys, _other_pair(index))
        return (arriving, total), None

    arriving = _send_to_next(own_keys, shards)
    total = _split_chunks(run(*_flatten_chunks((queries, own_keys)), _CAUSAL))
    total = add_pair(total, own_keys, _HIGH_AND_LOW)
    (_, total), _ = jax.lax.scan(step, (arriving, total), jnp.arange(1, shards))
    # These are the gradients of the next device's keys: the ring is closed.
    dk, dv = _send_to_next((total.k, total.v), shards)
    key_grads = _Keys(dk.astype(own_keys.k.dtype), dv.astype(own_keys.v.dtype), None)
    return total.q.astype(q.dtype), key_grads, _differentiate_sinks(sinks_N, out, log_sums, grad)


_ring.defvjp(_ring_forward, _ring_backward)


def _send_to_next(tree: T, shards: int) -> T:
    """Send arrays to the next device of the ring, and return those of the previous one."""
    routes = [(source, (source + 1) % shards) for source in range(shards)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, LENGTH_AXIS, routes), tree)


def _take(tree: T, chunk: int | Array) -> T:
    """Return one chunk of arrays [2, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False), tree)


def _put(tree: T, chunk: int | Array, values: T) -> T:
    """Return arrays [2, ...] with one chunk replaced."""
    return jax.tree.map(lambda x, value: jax.lax.dynamic_update_index_in_dim(x, value, chunk, 0), tree, values)


def _flatten_chunks(tree: T) -> T:
    """Return arrays [2, B, ...] as [2 B, ...]: two chunks as one batch."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _split_chunks(tree: T) -> T:
    """Return the inverse of `_flatten_chunks`."""
    return jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), tree)


def _make_ids(query_ids: Array | None, key_ids: Array | None) -> Ids | None:
    return None if query_ids is None or key_ids is None else Ids(query_ids, key_ids)
