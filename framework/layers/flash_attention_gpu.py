"""Flash attention for GPUs in Pallas for Triton, over some of a row's keys.

Follows Dao 2023 (arXiv 2307.08691). A program of the forward kernel has a block of queries and loops over their keys.
In the backward pass, one kernel has blocks of keys and loops over queries, for the gradients of keys and values;
another has blocks of queries and loops over keys, for those of queries. Both compute the logits again. Blocks that the
causal mask or the window hides are neither loaded nor computed.

Sizes of arrays in Triton are powers of two, so channels are in parts: 128 and 64 of 192. If they are no multiple of 16,
zeros are appended.

Axis letters: as in `kernels_call`. Inside a kernel, S and T are the queries and keys of one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from plimsoll.framework.layers.flash_kernels import NUM_PRODUCTS, KernelPass, name_kernel
from plimsoll.framework.layers.kernels_call import BlockMask, Ids
from plimsoll.framework.layers.pallas_gpu import call_kernel

# The channels of a block of rows, [rows, channels of the part] each.
_Parts = tuple[Array, ...]

_LOG2_E = math.log2(math.e)
# The maximum of no logits. Unlike -inf, it can be subtracted from itself.
_NEVER = -1e30
# The smallest size of an operand of a product in Triton.
_MIN_SIZE = 16


@dataclass(frozen=True)
class FlashBlocks:
    """Sizes of a kernel.

    Args:
        queries: number of queries in a block.
        keys: number of keys in a block.
        num_warps: number of warps of a program.
        num_stages: number of blocks of the loop that are in shared memory at the same time.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class FlashOptions:
    """Options of the kernels.

    Args:
        scale: factor on the logits.
        softcap: cap of the logits, or None.
        mask: which keys a query sees, by position.
        shared_bytes: bytes of shared memory that a program may use.
        blocks: sizes of all kernels, or None to choose them.
        interpret: run the kernels as JAX operations, on any platform.
    """

    scale: float
    softcap: float | None
    mask: BlockMask
    shared_bytes: int
    blocks: FlashBlocks | None = None
    interpret: bool = False


def attend(options: FlashOptions, q_BNSH: Array, k_BKTH: Array, v_BKTV: Array, ids: Ids | None) -> tuple[Array, Array]:
    """See `BlockKernel.forward`; the result has the dtype of the inputs."""
    value_dim = v_BKTV.shape[3]
    q_BNSH, k_BKTH, v_BKTV = map(_pad_channels, (q_BNSH, k_BKTH, v_BKTV))
    kernel = _Kernel.describe("forward", options, q_BNSH, k_BKTH, v_BKTV)
    B, N, S, _ = q_BNSH.shape
    V = v_BKTV.shape[3]
    out_shapes = (jax.ShapeDtypeStruct((B, N, S, V), q_BNSH.dtype), jax.ShapeDtypeStruct((B, N, S), jnp.float32))
    run = kernel.build(
        _attend_block,
        grid=(pl.cdiv(S, kernel.blocks.queries), N, B),
        in_specs=kernel.specs_by_query_head(ids),
        out_specs=(kernel.query_head(V), kernel.query_head()),
        out_shape=out_shapes,
    )
    out_BNSV, log_sums_BNS = run(q_BNSH, k_BKTH, v_BKTV, *_split_ids(ids))
    return out_BNSV[..., :value_dim], log_sums_BNS


def differentiate(
    options: FlashOptions,
    q_BNSH: Array,
    k_BKTH: Array,
    v_BKTV: Array,
    ids: Ids | None,
    out_BNSV: Array,
    log_sums_BNS: Array,
    grad_BNSV: Array,
) -> tuple[Array, Array, Array]:
    """See `BlockKernel.backward`.

    The gradients have the dtype of the inputs. In 16 bits, the kernels write half the bytes of float32; a ring, which
    adds up the gradients of its steps in float32, rounds each of them once.
    """
    # The sum over all keys of a weight times its gradient (arXiv 2205.14135, appendix B.2).
    sums_BNS = jnp.sum(out_BNSV.astype(jnp.float32) * grad_BNSV.astype(jnp.float32), axis=-1)
    dims = [x.shape[3] for x in (q_BNSH, k_BKTH, v_BKTV)]
    q_BNSH, k_BKTH, v_BKTV, grad_BNSV = map(_pad_channels, (q_BNSH, k_BKTH, v_BKTV, grad_BNSV.astype(q_BNSH.dtype)))
    B, N, S, H = q_BNSH.shape
    _, K, T, V = v_BKTV.shape
    arrays = (q_BNSH, k_BKTH, v_BKTV, *_split_ids(ids), grad_BNSV, log_sums_BNS, sums_BNS)

    kernel = _Kernel.describe("backward_queries", options, q_BNSH, k_BKTH, v_BKTV)
    by_query = (kernel.query_head(V), kernel.query_head(), kernel.query_head())
    run = kernel.build(
        _differentiate_queries,
        grid=(pl.cdiv(S, kernel.blocks.queries), N, B),
        in_specs=(*kernel.specs_by_query_head(ids), *by_query),
        out_specs=kernel.query_head(H),
        out_shape=jax.ShapeDtypeStruct(q_BNSH.shape, q_BNSH.dtype),
    )
    dq_BNSH = run(*arrays)

    kernel = _Kernel.describe("backward_keys", options, q_BNSH, k_BKTH, v_BKTV)
    by_query = (kernel.query_group(V), kernel.query_group(), kernel.query_group())
    run = kernel.build(
        _differentiate_keys,
        grid=(pl.cdiv(T, kernel.blocks.keys), K, B),
        in_specs=(*kernel.specs_by_key_head(ids), *by_query),
        out_specs=(kernel.key_head(H), kernel.key_head(V)),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BKTH, v_BKTV)),
    )
    dk_BKTH, dv_BKTV = run(*arrays)
    dq_BNSH, dk_BKTH, dv_BKTV = (x[..., :size] for x, size in zip((dq_BNSH, dk_BKTH, dv_BKTV), dims, strict=True))
    return dq_BNSH, dk_BKTH, dv_BKTV


def _pad_channels(x: Array) -> Array:
    """Append zeros to the last axis until its size is a multiple of 16."""
    missing = -x.shape[-1] % _MIN_SIZE
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _split_ids(ids: Ids | None) -> tuple[Array | None, Array | None]:
    return (None, None) if ids is None else (ids.queries, ids.keys)


# {kernel: ((most bytes of a key and its value, sizes), ...)}. For 64 and 128 channels in 16 bits, most are the defaults
# of PyTorch's FlexAttention for H100 (torch/_inductor, version 2.8). The others are the largest that the compilers for
# H100 and B200 keep in registers, but for a few numbers with all masks and a cap. None was timed here.
_BLOCKS: dict[KernelPass, tuple[tuple[int, FlashBlocks], ...]] = {
    "forward": (
        (256, FlashBlocks(128, 128, 8, 3)),
        (512, FlashBlocks(128, 64, 8, 3)),
        (640, FlashBlocks(128, 64, 8, 2)),
        (1024, FlashBlocks(64, 32, 4, 3)),
        (2048, FlashBlocks(32, 32, 4, 2)),
    ),
    "backward_queries": (
        (256, FlashBlocks(64, 64, 4, 3)),
        (512, FlashBlocks(128, 64, 8, 3)),
        (640, FlashBlocks(128, 64, 8, 2)),
        (1024, FlashBlocks(64, 64, 8, 2)),
        (2048, FlashBlocks(32, 32, 8, 2)),
    ),
    "backward_keys": (
        (256, FlashBlocks(64, 64, 4, 3)),
        (512, FlashBlocks(64, 128, 8, 3)),
        (640, FlashBlocks(32, 128, 8, 2)),
        (1024, FlashBlocks(32, 64, 8, 2)),
        (2048, FlashBlocks(32, 32, 8, 2)),
    ),
}
# The same for 99 KiB of shared memory.
_SMALL_BLOCKS: dict[KernelPass, tuple[tuple[int, FlashBlocks], ...]] = {
    "forward": (
        (256, FlashBlocks(128, 64, 4, 2)),
        (512, FlashBlocks(128, 64, 8, 2)),
        (640, FlashBlocks(128, 32, 8, 2)),
        (1024, FlashBlocks(64, 32, 8, 2)),
        (2048, FlashBlocks(32, 16, 4, 2)),
    ),
    "backward_queries": (
        (256, FlashBlocks(64, 64, 4, 2)),
        (512, FlashBlocks(64, 64, 4, 2)),
        (640, FlashBlocks(64, 32, 8, 2)),
        (1024, FlashBlocks(32, 32, 8, 2)),
        (2048, FlashBlocks(16, 16, 4, 2)),
    ),
    "backward_keys": (
        (256, FlashBlocks(64, 64, 4, 2)),
        (512, FlashBlocks(32, 64, 8, 2)),
        (640, FlashBlocks(32, 32, 8, 2)),
        (1024, FlashBlocks(32, 32, 8, 2)),
        (2048, FlashBlocks(16, 16, 4, 2)),
    ),
}
# The shared memory of a program on Hopper, and on GPUs for data centers from then on.
_LARGE_SHARED_BYTES = 227 * 2**10


def choose_blocks(kernel_pass: KernelPass, row_bytes: int, shared_bytes: int) -> FlashBlocks:
    """Return the sizes of a kernel.

    Args:
        kernel_pass: the kernel.
        row_bytes: bytes of a key and a value of one head, at most 2048.
        shared_bytes: bytes of shared memory that a program may use, at least 99 KiB.
    """
    table = _BLOCKS if shared_bytes >= _LARGE_SHARED_BYTES else _SMALL_BLOCKS
    return next(blocks for most, blocks in table[kernel_pass] if row_bytes <= most)


# --- descriptions of a kernel -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Range:
    """Consecutive rows of an array.

    Args:
        first: index of the first one.
        count: how many there are.
        end: those from this index on do not exist; None if all exist.
    """

    first: Array | int
    count: int
    end: int | None

    def indices(self) -> Array:
        """Return the indices, int32 [count]."""
        return self.first + jnp.arange(self.count, dtype=jnp.int32)

    def exist(self) -> Array | None:
        """Return which ones exist, bool [count], or None for all."""
        return None if self.end is None else self.indices() < self.end

    def slice(self) -> Any:
        """Return an index of a reference."""
        return pl.ds(self.first, self.count)


def _split_channels(size: int) -> list[tuple[int, int]]:
    """Return (first, number) of channels of each part: powers of two, if the size is a multiple of 16."""
    parts = []
    first = 0
    while first < size:
        count = 2 ** int(math.log2(size - first))
        parts.append((first, count))
        first += count
    return parts


@dataclass(frozen=True)
class _Kernel:
    """A kernel, with sizes of its arrays on one device.

    Args:
        kernel_pass: which kernel.
        options: its options.
        group: number of query heads of a key head.
        num_queries, num_keys: S and T.
        key_dim, value_dim: H and V.
        blocks: its block sizes.
        num_pairs: number of pairs of a query and a key, of all heads.
    """

    kernel_pass: KernelPass
    options: FlashOptions
    group: int
    num_queries: int
    num_keys: int
    key_dim: int
    value_dim: int
    blocks: FlashBlocks
    num_pairs: int

    @staticmethod
    def describe(kernel_pass: KernelPass, options: FlashOptions, q: Array, k: Array, v: Array) -> _Kernel:
        """Return the description of a kernel for these arrays."""
        B, N, S, H = q.shape
        _, K, T, V = v.shape
        blocks = options.blocks
        if blocks is None:
            blocks = choose_blocks(kernel_pass, (H + V) * q.dtype.itemsize, options.shared_bytes)
        return _Kernel(kernel_pass, options, N // K, S, T, H, V, blocks, B * N * S * T)

    def build(self, body: Any, grid: tuple[int, ...], **specs: Any) -> Any:
        """Return a function of arrays that runs the kernel."""
        mask = self.options.mask
        key_products, value_products = NUM_PRODUCTS[self.kernel_pass]
        channels = key_products * self.key_dim + value_products * self.value_dim
        run = pl.pallas_call(
            partial(body, self),
            grid=grid,
            **specs,
            compiler_params=plgpu.CompilerParams(num_warps=self.blocks.num_warps, num_stages=self.blocks.num_stages),
            # Before a program is compiled, plans count all pairs.
            cost_estimate=pl.CostEstimate(
                flops=2 * channels * self.num_pairs, transcendentals=self.num_pairs, bytes_accessed=0
            ),
            interpret=self.options.interpret,
            name=name_kernel(self.kernel_pass, mask),
        )
        return run if self.options.interpret else partial(call_kernel, run)

    # Which part of an array a program of the grid (blocks, heads, sequences) has.

    def specs_by_query_head(self, ids: Ids | None) -> tuple[Any, ...]:
        """Return the specs of queries, keys, values and ids, if programs have a query head each."""
        group = self.group

        def key_head(channels: int) -> Any:
            return pl.BlockSpec((None, None, self.num_keys, channels), lambda i, n, b: (b, n // group, 0, 0))

        key_specs = (key_head(self.key_dim), key_head(self.value_dim))
        return (self.query_head(self.key_dim), *key_specs, *self._id_specs(ids))

    def specs_by_key_head(self, ids: Ids | None) -> tuple[Any, ...]:
        """Return the specs of queries, keys, values and ids, if programs have a key head each."""
        key_specs = (self.key_head(self.key_dim), self.key_head(self.value_dim))
        return (self.query_group(self.key_dim), *key_specs, *self._id_specs(ids))

    def query_head(self, *channels: int) -> Any:
        """Return the spec of [B, N, S, channels] if programs have a query head each."""
        zeros = (0,) * len(channels)
        return pl.BlockSpec((None, None, self.num_queries, *channels), lambda i, n, b: (b, n, 0, *zeros))

    def query_group(self, *channels: int) -> Any:
        """Return the spec of [B, N, S, channels] if programs have a key head each."""
        zeros = (0,) * len(channels)
        return pl.BlockSpec((None, self.group, self.num_queries, *channels), lambda i, k, b: (b, k, 0, *zeros))

    def key_head(self, channels: int) -> Any:
        """Return the spec of [B, K, T, channels] if programs have a key head each."""
        return pl.BlockSpec((None, None, self.num_keys, channels), lambda i, k, b: (b, k, 0, 0))

    def _id_specs(self, ids: Ids | None) -> tuple[Any, Any]:
        if ids is None:
            return None, None
        specs = (pl.BlockSpec((None, size), lambda i, n, b: (b, 0)) for size in (self.num_queries, self.num_keys))
        query_ids, key_ids = specs
        return query_ids, key_ids

    # Rows of a block, and the blocks that belong to it.

    def rows(self, query_block: Array) -> _Range:
        """Return the queries of a block."""
        size = self.blocks.queries
        return _Range(query_block * size, size, self.num_queries if self.num_queries % size else None)

    def columns(self, key_block: Array) -> _Range:
        """Return the keys of a block."""
        size = self.blocks.keys
        return _Range(key_block * size, size, self.num_keys if self.num_keys % size else None)

    def find_key_blocks(self, query_block: Array) -> tuple[Array | int, Array | int]:
        """Return (the first, the last + 1) of the blocks of keys that a block of queries may see."""
        offset, window = self.options.mask.offset, self.options.mask.window
        first, end = 0, self.num_keys
        if offset is not None:
            first_row = query_block * self.blocks.queries
            end = jnp.clip(first_row + self.blocks.queries + offset, 0, end)
            if window is not None:
                first = jnp.maximum(first_row + offset - window + 1, 0)
        return _find_blocks(first, end, self.blocks.keys)

    def find_query_blocks(self, key_block: Array) -> tuple[Array | int, Array | int]:
        """Return (the first, the last + 1) of the blocks of queries that may see a block of keys."""
        offset, window = self.options.mask.offset, self.options.mask.window
        first, end = 0, self.num_queries
        if offset is not None:
            first_column = key_block * self.blocks.keys
            first = jnp.maximum(first_column - offset, 0)
            if window is not None:
                end = jnp.clip(first_column + self.blocks.keys - 1 - offset + window, 0, end)
        return _find_blocks(first, end, self.blocks.queries)

    # Logits.

    def cap(self, products: Array) -> tuple[Array, Array | None]:
        """Return (logits in units of ln 2, their derivatives by the scaled products, None for 1)."""
        scale, softcap = self.options.scale, self.options.softcap
        if softcap is None:
            return products * (scale * _LOG2_E), None
        # tanh from the exponential, which GPUs have an instruction for. That for tanh has only 11 bits.
        tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(products * (2.0 * _LOG2_E * scale / softcap)))
        return tanh * (softcap * _LOG2_E), 1.0 - tanh * tanh

    def hide(
        self,
        logits: Array,
        rows: _Range,
        columns: _Range,
        query_ids_S: Array | None,
        key_ids_T: Array | None,
        query_axis: int,
    ) -> Array:
        """Return logits, [S, T] or [T, S], with -inf for keys that a query does not see or that do not exist."""
        offset, window = self.options.mask.offset, self.options.mask.window

        def along_queries(x_S: Array) -> Array:
            return jnp.expand_dims(x_S, 1 - query_axis)

        def along_keys(x_T: Array) -> Array:
            return jnp.expand_dims(x_T, query_axis)

        conditions = []
        exist_T = columns.exist()
        if exist_T is not None:
            conditions.append(along_keys(exist_T))
        if offset is not None:
            last_S = along_queries(rows.indices() + offset)
            columns_T = along_keys(columns.indices())
            conditions.append(columns_T <= last_S)
            if window is not None:
                conditions.append(columns_T > last_S - window)
        if query_ids_S is not None and key_ids_T is not None:
            conditions.append(along_queries(query_ids_S) == along_keys(key_ids_T))
        for condition in conditions:
            logits = jnp.where(condition, logits, -jnp.inf)
        return logits


def _find_blocks(first: Array | int, end: Array | int, size: int) -> tuple[Array | int, Array | int]:
    """Return (the first, the last + 1) of the blocks with any of the rows from `first` to `end` - 1."""
    return first // size, (end + size - 1) // size


# --- kernels ----------------------------------------------------------------------------------------------------------


def _attend_block(
    kernel: _Kernel,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    query_ids_ref: Any,
    key_ids_ref: Any,
    out_ref: Any,
    log_sums_ref: Any,
) -> None:
    """Compute the softmax of a block of queries."""
    query_block = _choose_query_block(kernel)
    rows = kernel.rows(query_block)
    q = _load_matrix(q_ref, rows)
    query_ids_S = _load_vector(query_ids_ref, rows)

    def add_keys(key_block: Array, carry: tuple[_Parts, Array, Array]) -> tuple[_Parts, Array, Array]:
        out, largest_S, sums_S = carry
        columns = kernel.columns(key_block)
        logits_ST, _ = kernel.cap(_multiply_channels(q, _load_matrix(k_ref, columns)))
        logits_ST = kernel.hide(logits_ST, rows, columns, query_ids_S, _load_vector(key_ids_ref, columns), 0)
        new_largest_S = jnp.maximum(largest_S, jnp.max(logits_ST, axis=1))
        weights_ST = jnp.exp2(logits_ST - new_largest_S[:, None])
        decay_S = jnp.exp2(largest_S - new_largest_S)
        sums_S = sums_S * decay_S + jnp.sum(weights_ST, axis=1)
        v = _load_matrix(v_ref, columns)
        out = tuple(x * decay_S[:, None] for x in out)
        return _add_product(out, weights_ST, v), new_largest_S, sums_S

    size = kernel.blocks.queries
    start = (_zeros(size, kernel.value_dim), jnp.full((size,), _NEVER, jnp.float32), jnp.zeros((size,), jnp.float32))
    out, largest_S, sums_S = jax.lax.fori_loop(*kernel.find_key_blocks(query_block), add_keys, start)
    # Queries without any key have a sum of 0.
    sums_S = jnp.where(sums_S == 0.0, 1.0, sums_S)
    _store_matrix(out_ref, rows, tuple(x / sums_S[:, None] for x in out))
    log_sums_S = (largest_S + jnp.log2(sums_S)) * (1.0 / _LOG2_E)
    plgpu.store(log_sums_ref.at[rows.slice()], log_sums_S, mask=rows.exist())


def _differentiate_queries(
    kernel: _Kernel,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    query_ids_ref: Any,
    key_ids_ref: Any,
    grad_ref: Any,
    log_sums_ref: Any,
    sums_ref: Any,
    dq_ref: Any,
) -> None:
    """Compute the gradient of a block of queries."""
    query_block = _choose_query_block(kernel)
    rows = kernel.rows(query_block)
    q = _load_matrix(q_ref, rows)
    grad = _load_matrix(grad_ref, rows)
    log_sums_S = _load_vector(log_sums_ref, rows) * _LOG2_E
    sums_S = _load_vector(sums_ref, rows)
    query_ids_S = _load_vector(query_ids_ref, rows)

    def add_keys(key_block: Array, dq: _Parts) -> _Parts:
        columns = kernel.columns(key_block)
        k = _load_matrix(k_ref, columns)
        logits_ST, derivatives_ST = kernel.cap(_multiply_channels(q, k))
        logits_ST = kernel.hide(logits_ST, rows, columns, query_ids_S, _load_vector(key_ids_ref, columns), 0)
        weights_ST = jnp.exp2(logits_ST - log_sums_S[:, None])
        weight_grads_ST = _multiply_channels(grad, _load_matrix(v_ref, columns))
        logit_grads_ST = weights_ST * (weight_grads_ST - sums_S[:, None])
        if derivatives_ST is not None:
            logit_grads_ST *= derivatives_ST
        return _add_product(dq, logit_grads_ST, k)

    start = _zeros(kernel.blocks.queries, kernel.key_dim)
    dq = jax.lax.fori_loop(*kernel.find_key_blocks(query_block), add_keys, start)
    _store_matrix(dq_ref, rows, tuple(x * kernel.options.scale for x in dq))


def _differentiate_keys(
    kernel: _Kernel,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    query_ids_ref: Any,
    key_ids_ref: Any,
    grad_ref: Any,
    log_sums_ref: Any,
    sums_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    """Compute the gradients of a block of keys and values, from all query heads that use them."""
    key_block = pl.program_id(0)
    columns = kernel.columns(key_block)
    k = _load_matrix(k_ref, columns)
    v = _load_matrix(v_ref, columns)
    key_ids_T = _load_vector(key_ids_ref, columns)
    first, end = kernel.find_query_blocks(key_block)

    def add_head(head: Array, carry: tuple[_Parts, _Parts]) -> tuple[_Parts, _Parts]:
        def add_queries(query_block: Array, carry: tuple[_Parts, _Parts]) -> tuple[_Parts, _Parts]:
            dk, dv = carry
            rows = kernel.rows(query_block)
            q = _load_matrix(q_ref, rows, head)
            # Keys are rows: then weights are the left operand of the products, which tensor cores read from registers.
            logits_TS, derivatives_TS = kernel.cap(_multiply_channels(k, q))
            logits_TS = kernel.hide(logits_TS, rows, columns, _load_vector(query_ids_ref, rows), key_ids_T, 1)
            # Queries that do not exist have gradients of 0 here.
            weights_TS = jnp.exp2(logits_TS - (_load_vector(log_sums_ref, rows, head) * _LOG2_E)[None, :])
            grad = _load_matrix(grad_ref, rows, head)
            dv = _add_product(dv, weights_TS, grad)
            logit_grads_TS = weights_TS * (_multiply_channels(v, grad) - _load_vector(sums_ref, rows, head)[None, :])
            if derivatives_TS is not None:
                logit_grads_TS *= derivatives_TS
            return _add_product(dk, logit_grads_TS, q), dv

        return jax.lax.fori_loop(first, end, add_queries, carry)

    size = kernel.blocks.keys
    start = (_zeros(size, kernel.key_dim), _zeros(size, kernel.value_dim))
    dk, dv = jax.lax.fori_loop(0, kernel.group, add_head, start)
    _store_matrix(dk_ref, columns, tuple(x * kernel.options.scale for x in dk))
    _store_matrix(dv_ref, columns, dv)


def _choose_query_block(kernel: _Kernel) -> Array:
    """Return the block of queries of this program. With a causal mask, those with the most keys start first."""
    block = pl.program_id(0)
    is_causal = kernel.options.mask.offset is not None and kernel.options.mask.window is None
    return pl.num_programs(0) - 1 - block if is_causal else block


def _load_vector(ref: Any, rows: _Range, *head: Array) -> Any:
    """Return some numbers of a vector (of one head), 0 for those that do not exist; None if there is no vector."""
    if ref is None:
        return None
    exist = rows.exist()
    return plgpu.load(ref.at[*head, rows.slice()], mask=exist, other=None if exist is None else 0)


def _load_matrix(ref: Any, rows: _Range, *head: Array) -> _Parts:
    """Return some rows of a matrix (of one head), 0 for those that do not exist."""
    mask, other = _mask_rows(rows)
    return tuple(
        plgpu.load(ref.at[*head, rows.slice(), pl.ds(first, count)], mask=mask, other=other)
        for first, count in _split_channels(ref.shape[-1])
    )


def _store_matrix(ref: Any, rows: _Range, parts: _Parts) -> None:
    """Store some rows of a matrix, in its dtype, without those that do not exist."""
    mask, _ = _mask_rows(rows)
    for (first, count), part in zip(_split_channels(ref.shape[-1]), parts, strict=True):
        plgpu.store(ref.at[rows.slice(), pl.ds(first, count)], part.astype(ref.dtype), mask=mask)


def _mask_rows(rows: _Range) -> tuple[Array | None, float | None]:
    """Return (a mask of the rows that exist, what to load instead of the others); None if all exist."""
    exist = rows.exist()
    return (None, None) if exist is None else (exist[:, None], 0.0)


def _zeros(num_rows: int, num_channels: int) -> _Parts:
    """Return float32 zeros, in parts."""
    return tuple(jnp.zeros((num_rows, count), jnp.float32) for _, count in _split_channels(num_channels))


def _multiply_channels(x: _Parts, y: _Parts) -> Array:
    """Return the products of the rows of x and the rows of y, float32 [rows of x, rows of y]."""
    over_channels = (((1,), (1,)), ((), ()))
    products = [
        jax.lax.dot_general(a, b, over_channels, preferred_element_type=jnp.float32) for a, b in zip(x, y, strict=True)
    ]
    return sum(products[1:], products[0])


def _add_product(total: _Parts, weights_XY: Array, rows_Y: _Parts) -> _Parts:
    """Return total + weights @ rows, with weights in the dtype of the rows, summed in float32."""
    return tuple(
        x + jax.lax.dot(weights_XY.astype(part.dtype), part, preferred_element_type=jnp.float32)
        for x, part in zip(total, rows_Y, strict=True)
    )
