"""What is asked of an attention kernel, and what kernels share: the mask, and how they are placed on a mesh.

Axis letters: B sequences, S queries, T keys (of the same positions), N query heads, K key/value heads, G = N / K query
heads to a key/value head (head n uses key/value head n // G), H channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from framework.config import PositiveInt, component
from framework.layers.base import BATCH_AXES

HEADS_AXIS = "model"
LENGTH_AXIS = "seq"

SPLASH_LANES = 128  # of a TPU vector register; blocks of queries and keys are multiples of it

# Under this name remat policies find what attention gives. Splash also names its row sums so, without which the
# backward would run the forward kernel again.
SAVED_NAME = "attention"


@component
@dataclass(frozen=True)
class SplashBlocks:
    """How the splash kernel, which runs on TPU, cuts its work.

    Args:
        block_q, block_kv: upper bounds of a block's queries and keys, in both passes; the largest multiple of 128 that
            divides the positions is taken. 512 is what fits VMEM with 256 channels, too.
        fused_backward: one kernel for the gradients of queries, keys and values instead of two. It computes logits once
            instead of twice, and keeps a copy of the queries' gradient per block of keys: 256 MiB more at S = 8192,
            N = 8, H = 128, on v5e.
    """

    block_q: PositiveInt = 512
    block_kv: PositiveInt = 512
    fused_backward: bool = False

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            if getattr(self, name) % SPLASH_LANES:
                raise ValueError(f"{name}: expected a multiple of {SPLASH_LANES}, given {getattr(self, name)}")


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention without its arrays: global sizes B, S, N, H, K, and what `dot_product_attention` is told."""

    batch: int
    length: int
    heads: int
    head_dim: int
    kv_heads: int
    dtype: Any
    has_segments: bool
    window: int | None
    softcap: float | None
    mesh: Mesh | None
    platform: str  # cpu, tpu, gpu
    given_scale: float | None = None
    splash: SplashBlocks = SplashBlocks()

    @property
    def scale(self) -> float:
        """What logits are multiplied by, before the cap."""
        return self.head_dim**-0.5 if self.given_scale is None else self.given_scale

    def shards(self, *axes: str) -> int:
        """The product of the sizes of these mesh axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    def why_not_placed(self) -> str | None:
        """Why the arrays cannot be cut into equal parts along the mesh axes, or None if they can."""
        cuts = [("sequences in a batch", self.batch, BATCH_AXES), ("positions", self.length, (LENGTH_AXIS,))]
        for what, size, axes in [*cuts, ("key/value heads", self.kv_heads, (HEADS_AXIS,))]:
            if size % self.shards(*axes):
                return f"mesh {' x '.join(axes)} = {self.shards(*axes)} does not divide the {size} {what}"
        return None


def describe_call(
    q: Any,
    k: Any,
    v: Any,
    segments: Any,
    window: int | None,
    softcap: float | None,
    mesh: Mesh | None,
    scale: float | None = None,
    splash: SplashBlocks = SplashBlocks(),
) -> AttentionCall:
    """Checks q [B, S, N, H], k and v [B, S, K, H], segments [B, S], arrays or ShapeDtypeStructs; keeps what is static.

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    given = f"{q.shape}, {k.shape}, {v.shape}"
    fits = len(q.shape) == len(k.shape) == 4 and k.shape == v.shape == (*q.shape[:2], k.shape[2], q.shape[3])
    if not fits or q.shape[2] % k.shape[2]:
        raise ValueError(f"expected query [B, S, N, H], key and value [B, S, K, H], N a multiple of K; given {given}")
    dtypes = {jnp.dtype(x.dtype) for x in (q, k, v)}
    if len(dtypes) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"expected query, key and value of one floating dtype, given {sorted(map(str, dtypes))}")
    if segments is not None and (segments.shape != q.shape[:2] or not jnp.issubdtype(segments.dtype, jnp.integer)):
        raise ValueError(f"segments: expected integers {q.shape[:2]}, given {segments.dtype} {segments.shape}")
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    sizes, has_segments = (*q.shape, k.shape[2]), segments is not None
    return AttentionCall(*sizes, dtypes.pop(), has_segments, window, softcap, mesh, platform, scale, splash)  # pyright: ignore


def separate_padding(segments_BS: Array | None) -> Array | None:
    """Gives every padding position (segment 0) a segment of its own, so that it attends to itself alone: no row of the
    mask is empty, so no softmax divides by zero."""
    if segments_BS is None:
        return None
    return jnp.where(segments_BS == 0, -1 - jnp.arange(segments_BS.shape[1], dtype=segments_BS.dtype), segments_BS)


def allowed_BST(
    window: int | None, rows_S: Array, columns_T: Array, row_ids_BS: Array | None, column_ids_BT: Array | None
) -> Array:
    """bool [B or 1, S, T]: may the query at position rows[s] attend to the key at columns[t]?

    Args:
        rows_S, columns_T: positions in the sequence, in any order.
        row_ids_BS, column_ids_BT: `separate_padding(segments)` at those positions, or None.
    """
    rows_S1, columns_1T = rows_S[:, None], columns_T[None, :]
    mask = (columns_1T <= rows_S1)[None]
    if window is not None:
        mask &= (columns_1T > rows_S1 - window)[None]
    if row_ids_BS is not None and column_ids_BT is not None:
        mask &= row_ids_BS[:, :, None] == column_ids_BT[:, None, :]
    return mask


def on_each_device(
    call: AttentionCall,
    local: Callable[..., Array],
    q_BSNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BS: Array | None,
    extra: Any = None,
    extra_spec: Any = None,
) -> Array:
    """Runs a kernel that the compiler cannot partition on each device's sequences, heads and queries, and all keys, as
    `local(q, k, v, row_ids, column_ids, extra)`; ids are `separate_padding(segments)`, or None."""
    ids_BS = separate_padding(segments_BS)
    arrays = (q_BSNH, k_BSKH, v_BSKH, ids_BS, ids_BS, extra)
    if call.mesh is None or call.mesh.size == 1:
        return local(*arrays)
    queries, keys = (PartitionSpec(BATCH_AXES, length, HEADS_AXIS, None) for length in (LENGTH_AXIS, None))
    specs = (queries, keys, keys, PartitionSpec(*queries[:2]), PartitionSpec(*keys[:2]), extra_spec)
    # Kernels do not say over which mesh axes their outputs vary.
    return jax.shard_map(local, mesh=call.mesh, in_specs=specs, out_specs=queries, check_vma=False)(*arrays)
