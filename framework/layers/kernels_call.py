"""The description of an attention call, and code that the kernels share: masks, sinks, and the sharding over a mesh.

Axis letters: B sequences, S queries, T keys (at the same positions), N query heads, K key/value heads, G = N / K
query heads per key/value head (head n uses key/value head n // G), H channels per head of queries and keys, V
channels per head of values; V equals H except in latent attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from plimsoll.framework.config import PositiveInt, component
from plimsoll.framework.layers.base import BATCH_AXES
from plimsoll.framework.layout import PyTree, get_current_mesh

# An array, or only its shape and dtype.
ArrayLike = jax.Array | jax.ShapeDtypeStruct
HEADS_AXIS = "model"
LENGTH_AXIS = "seq"

# How devices along `seq` see each other's keys, see `ring_attention`.
ContextParallel = Literal["auto", "ring", "gather"]

# The number of lanes of a TPU vector register; blocks of queries and keys are multiples of it.
SPLASH_LANES = 128

# Remat policies refer to the result of attention by this name. Splash uses it for its row sums too; without them, the
# backward pass would run the forward kernel again.
SAVED_NAME = "attention"


@component
@dataclass(frozen=True)
class SplashBlocks:
    """Block sizes of the splash kernel, which runs on TPU.

    Args:
        block_q, block_kv: upper bounds of a block's queries and keys, in both passes; a block has the largest
            multiple of 128 within the bound that divides the number of positions. 512 fits into VMEM also with 256
            channels.
        fused_backward: use one kernel for the gradients of queries, keys and values instead of two. It computes the
            logits once instead of twice, and stores a copy of the queries' gradient per block of keys: 256 MiB more
            at S = 8192, N = 8, H = 128, on v5e.
    """

    block_q: PositiveInt = 512
    block_kv: PositiveInt = 512
    fused_backward: bool = False

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if size % SPLASH_LANES:
                raise ValueError(f"{name}: expected a multiple of {SPLASH_LANES}, given {size}")


@dataclass(frozen=True)
class AttentionCall:
    """An attention call without its arrays: global sizes B, S, N, H, K, V, and options of `dot_product_attention`."""

    batch: int
    length: int
    heads: int
    head_dim: int
    kv_heads: int
    dtype: np.dtype
    has_segments: bool
    window: int | None
    softcap: float | None
    mesh: Mesh | None
    platform: str  # cpu, tpu, gpu
    scale: float
    value_dim: int
    splash: SplashBlocks = SplashBlocks()
    has_sinks: bool = False
    context_parallel: ContextParallel = "auto"

    def shards(self, *axes: str) -> int:
        """Return the product of the sizes of these mesh axes."""
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def why_not_sharded(self) -> str | None:
        """Return why the mesh axes do not divide the arrays into equal shards, or None if they do."""
        # Checking the key/value heads is enough: they divide the query heads.
        splits = [
            ("sequences in a batch", self.batch, BATCH_AXES),
            ("positions", self.length, (LENGTH_AXIS,)),
            ("key/value heads", self.kv_heads, (HEADS_AXIS,)),
        ]
        for what, size, axes in splits:
            shards = self.shards(*axes)
            if size % shards:
                split_axes = [axis for axis in axes if self.shards(axis) > 1]
                return f"mesh {' x '.join(split_axes)} = {shards} does not divide the {size} {what}"
        return None


def _check_arrays(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, segments: ArrayLike | None, sinks: ArrayLike | None
) -> None:
    """Raise ValueError if the shapes or dtypes do not match."""
    shapes = f"{q.shape}, {k.shape}, {v.shape}"
    # The number of axes is checked first: the expected shape of keys reads all four axes of both.
    has_four_axes = len(q.shape) == len(k.shape) == 4
    fits = has_four_axes and k.shape == (*q.shape[:2], k.shape[2], q.shape[3]) and v.shape[:3] == k.shape[:3]
    if not fits or q.shape[2] % k.shape[2]:
        expected = "query [B, S, N, H], key [B, S, K, H], value [B, S, K, V], N a multiple of K"
        raise ValueError(f"expected {expected}; given {shapes}")
    dtypes = {jnp.dtype(x.dtype) for x in (q, k, v)}
    if len(dtypes) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"expected query, key and value of one floating dtype, given {sorted(map(str, dtypes))}")
    if segments is not None:
        are_integers = jnp.issubdtype(segments.dtype, jnp.integer)
        if segments.shape != q.shape[:2] or not are_integers:
            raise ValueError(f"segments: expected integers {q.shape[:2]}, given {segments.dtype} {segments.shape}")
    if sinks is not None:
        is_floating = jnp.issubdtype(sinks.dtype, jnp.floating)
        if sinks.shape != q.shape[2:3] or not is_floating:
            raise ValueError(f"sinks: expected floats {q.shape[2:3]}, given {sinks.dtype} {sinks.shape}")


def describe_call(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    segments: ArrayLike | None,
    window: int | None,
    softcap: float | None,
    mesh: Mesh | None,
    scale: float | None = None,
    splash: SplashBlocks = SplashBlocks(),
    sinks: ArrayLike | None = None,
    context_parallel: ContextParallel = "auto",
) -> AttentionCall:
    """Check q [B, S, N, H], k [B, S, K, H], v [B, S, K, V], segments [B, S] and sinks [N], and describe them.

    Args:
        q, k, v, segments, sinks: arrays or ShapeDtypeStructs; segments and sinks may be None.
        window, softcap, mesh, scale, splash, context_parallel: see `dot_product_attention`.

    Raises:
        ValueError: the shapes or dtypes do not match.
    """
    _check_arrays(q, k, v, segments, sinks)
    # The mesh determines the platform, not the default device: a plan compiles for devices that are not present.
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform in ("cuda", "rocm"):
        platform = "gpu"
    batch, length, heads, head_dim = q.shape
    return AttentionCall(
        batch=batch,
        length=length,
        heads=heads,
        head_dim=head_dim,
        kv_heads=k.shape[2],
        dtype=jnp.dtype(q.dtype),
        has_segments=segments is not None,
        window=window,
        softcap=softcap,
        mesh=mesh,
        platform=platform,
        scale=head_dim**-0.5 if scale is None else scale,
        value_dim=v.shape[3],
        splash=splash,
        has_sinks=sinks is not None,
        context_parallel=context_parallel,
    )


class Ids(NamedTuple):
    """int32 segments of queries, [B, S], and of keys, [B, T]: a query sees keys with its own id."""

    queries: Array
    keys: Array


@dataclass(frozen=True)
class BlockMask:
    """Which of T keys S queries see, by position.

    Args:
        offset: query i sees keys j <= i + offset; None means all keys.
        window: query i sees only keys j > i + offset - window; None means no limit.
    """

    offset: int | None = None
    window: int | None = None

    def seen_share(self, num_queries: int, num_keys: int) -> float:
        """Return the fraction of S T pairs of a query and a key in which the query sees the key, without documents."""
        if self.offset is None:
            return 1.0
        window = num_keys if self.window is None else self.window
        # The first queries see all earlier keys, the others as many as the window has.
        num_first = min(max(window - self.offset, 0), num_queries)
        seen_by_first = num_first * (self.offset + 1) + num_first * (num_first - 1) / 2
        seen_by_others = (num_queries - num_first) * window
        return (seen_by_first + seen_by_others) / (num_queries * num_keys)


class BlockKernel(Protocol):
    """Computes a softmax over some of a row's keys, so that the softmax over all of them can be put together.

    Implementations are hashable. B, S, T, N and K are those of one device and block.
    """

    def block_size(self, length: int) -> int:
        """Return the size of blocks of keys; the number of keys must be a multiple of it."""
        ...

    def forward(
        self, q_BNSH: Array, k_BKTH: Array, v_BKTV: Array, ids: Ids | None, mask: BlockMask
    ) -> tuple[Array, Array]:
        """Return (the softmax times values, [B, N, S, V]; the logarithms of the softmax's sums, float32 [B, N, S]).

        The latter is far below any other logarithm, but finite, for queries that see no key.
        """
        ...

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
        """Return the gradients of q, k and v from these keys, where the softmax is the one over all keys.

        Args:
            q_BNSH, k_BKTH, v_BKTV, ids, mask: as in `forward`.
            out_BNSV: the result over all keys.
            log_sums_BNS: the logarithms of its sums.
            grad_BNSV: the gradient of the result.
        """
        ...


def separate_padding(segments_BS: Array | None) -> Array | None:
    """Give every padding position (segment 0) its own segment, so that it attends only to itself."""
    if segments_BS is None:
        return None
    # Then no row of the mask is empty, and no softmax divides by zero. The ids are negative, because documents have
    # positive ones.
    is_padding = segments_BS == 0
    ids_S = -1 - jnp.arange(segments_BS.shape[1], dtype=segments_BS.dtype)
    return jnp.where(is_padding, ids_S, segments_BS)


def make_mask_BST(
    window: int | None, rows_S: Array, columns_T: Array, row_ids_BS: Array | None, column_ids_BT: Array | None
) -> Array:
    """Return bool [B or 1, S, T]: whether the query at position rows[s] may attend to the key at columns[t].

    Args:
        window: see `dot_product_attention`.
        rows_S, columns_T: positions in the sequence, in any order.
        row_ids_BS, column_ids_BT: `separate_padding(segments)` at those positions, or None.
    """
    rows_S1 = rows_S[:, None]
    columns_1T = columns_T[None, :]
    mask = (columns_1T <= rows_S1)[None]
    if window is not None:
        mask &= (columns_1T > rows_S1 - window)[None]
    if row_ids_BS is not None and column_ids_BT is not None:
        mask &= row_ids_BS[:, :, None] == column_ids_BT[:, None, :]
    return mask


def softmax_with_sinks(logits: Array, sinks: Array) -> Array:
    """Compute exp(logits) / (exp(sinks) + sum(exp(logits))) over the last axis, in the dtype of the logits.

    As in gpt-oss (arXiv 2508.10925, section 2.1): each head learns the extra logit of the denominator, which has no
    value; the weight that it takes attends to nothing.

    Args:
        logits: [..., T], floating point; -inf for masked positions.
        sinks: [..., 1], finite; its axes broadcast with those of the logits.

    Returns:
        [..., T]: weights that add up to less than 1.
    """
    sinks = sinks.astype(logits.dtype)
    # The result does not depend on the subtracted maximum, so no gradient flows through it.
    largest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks)
    largest = jax.lax.stop_gradient(largest)
    powers = jnp.exp(logits - largest)
    total = jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sinks - largest)
    return powers / total


def on_each_device(
    call: AttentionCall,
    local: Callable[..., Array],
    q_BSNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BS: Array | None,
    extra: PyTree = None,
    extra_spec: PyTree = None,
) -> Array:
    """Run a kernel that the compiler cannot partition: each device has its sequences, heads and queries, and all keys.

    Args:
        call: the call, with global sizes.
        local: the kernel, called as `local(q, k, v, row_ids, column_ids, extra)`; the ids are
            `separate_padding(segments)`, or None.
        q_BSNH, k_BSKH, v_BSKH, segments_BS: the global arrays.
        extra: a pytree that is passed to `local`.
        extra_spec: the PartitionSpecs of `extra`.
    """
    ids_BS = separate_padding(segments_BS)
    arrays = (q_BSNH, k_BSKH, v_BSKH, ids_BS, ids_BS, extra)
    if call.mesh is None or call.mesh.size == 1:
        return local(*arrays)
    queries = PartitionSpec(BATCH_AXES, LENGTH_AXIS, HEADS_AXIS, None)
    # Queries at later positions may attend to any key, so keys are all-gathered over seq.
    keys = PartitionSpec(BATCH_AXES, None, HEADS_AXIS, None)
    row_ids = PartitionSpec(*queries[:2])
    column_ids = PartitionSpec(*keys[:2])
    specs = (queries, keys, keys, row_ids, column_ids, extra_spec)
    # Kernels do not declare over which mesh axes their outputs vary.
    mapped = jax.shard_map(local, mesh=get_current_mesh(call.mesh), in_specs=specs, out_specs=queries, check_vma=False)
    return mapped(*arrays)
