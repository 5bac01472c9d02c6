"""What is asked of an attention kernel: the static facts of one call, checked, and the mask that all kernels share.

May import: framework.layers.base, JAX.

Axis letters: B sequences, S queries, T keys (self-attention: S = T), N query heads, K key/value heads, G = N / K query
heads to a key/value head (head n uses key/value head n // G), H channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from framework.layers.base import BATCH_AXES

HEADS_AXIS = "model"
LENGTH_AXIS = "seq"

# What attention gives is what a backward pass most wants to keep: remat policies find it under this name. Splash also
# names its row sums so, without which the backward would run the forward kernel again.
SAVED_NAME = "attention"

_PLATFORMS = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


@dataclass(frozen=True)
class AttentionCall:
    """Everything about a call of attention except its arrays, so that a kernel can be chosen before there are any.

    Args:
        batch, length, key_length, heads, kv_heads, head_dim: B, S, T, N, K, H; global sizes.
        dtype: of query, key and value.
        has_segments: whether documents are masked from each other.
        window: position i attends to j in (i - window, i]; None means no limit.
        softcap: logits become softcap * tanh(logits / softcap); None means they stay.
        scale: what logits are multiplied by, before the cap.
        causal: position i attends to j <= i only.
        mesh: the devices the arrays are spread over, by axes data, fsdp, expert, seq, model; None means one device.
        platform: "cpu", "tpu" or "gpu".
    """

    batch: int
    length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    has_segments: bool
    window: int | None
    softcap: float | None
    scale: float
    causal: bool
    mesh: Mesh | None
    platform: str

    @property
    def looks_back_only(self) -> bool:
        """A window ends at the position itself, so it is causal whatever `causal` says."""
        return self.causal or self.window is not None

    @property
    def needs_mask(self) -> bool:
        """Whether some query may not attend to some key."""
        return self.looks_back_only or self.has_segments

    def shards(self, *axes: str) -> int:
        """The product of the sizes of these mesh axes; an axis that the mesh lacks counts 1."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    @property
    def is_distributed(self) -> bool:
        """Whether a kernel that the compiler cannot partition has to be placed on a mesh by hand."""
        return self.mesh is not None and self.mesh.size > 1

    def query_spec(self) -> PartitionSpec:
        """How [B, S, N, H] is spread when a kernel is placed by hand."""
        return PartitionSpec(self._present(*BATCH_AXES), self._present(LENGTH_AXIS), self._present(HEADS_AXIS), None)

    def key_spec(self) -> PartitionSpec:
        """How [B, T, K, H] is spread: as queries, but each device holds the keys of all positions."""
        return PartitionSpec(self._present(*BATCH_AXES), None, self._present(HEADS_AXIS), None)

    def _present(self, *axes: str) -> str | tuple[str, ...] | None:
        names = tuple(axis for axis in axes if self.mesh is not None and axis in self.mesh.shape)
        return names[0] if len(names) == 1 else names or None

    def why_not_placed(self) -> str | None:
        """Why the arrays cannot be cut into equal parts along the mesh axes, or None if they can."""
        for what, size, axes in (
            ("sequences in a batch", self.batch, BATCH_AXES),
            ("positions", self.length, (LENGTH_AXIS,)),
            ("key/value heads", self.kv_heads, (HEADS_AXIS,)),
        ):
            if size % self.shards(*axes):
                return f"mesh {' x '.join(axes)} = {self.shards(*axes)} does not divide the {size} {what}"
        return None


def describe_call(
    query_BSNH: Any,
    key_BTKH: Any,
    value_BTKH: Any,
    *,
    segments_BS: Any,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    causal: bool,
    mesh: Mesh | None,
    platform: str | None,
) -> AttentionCall:
    """Checks arguments (arrays, tracers or ShapeDtypeStructs) and gathers what is static about them.

    Raises:
        ValueError: shapes or dtypes do not belong together, or a number is out of range.
    """
    q_shape, k_shape, v_shape = query_BSNH.shape, key_BTKH.shape, value_BTKH.shape
    if len(q_shape) != 4 or len(k_shape) != 4:
        raise ValueError(f"expected query [B, S, N, H] and key [B, T, K, H], given query {q_shape}, key {k_shape}")
    if k_shape != v_shape:
        raise ValueError(f"expected key and value of one shape [B, T, K, H], given key {k_shape}, value {v_shape}")
    batch, length, heads, head_dim = q_shape
    key_length, kv_heads = k_shape[1:3]
    if k_shape[0] != batch or k_shape[3] != head_dim:
        raise ValueError(f"expected the same B and H in query and key, given query {q_shape}, key {k_shape}")
    if heads % kv_heads:
        raise ValueError(f"expected query heads to be a multiple of key/value heads, given {heads} and {kv_heads}")
    dtypes = [jnp.dtype(x.dtype) for x in (query_BSNH, key_BTKH, value_BTKH)]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(dtypes[0], jnp.floating):
        raise ValueError(f"expected query, key and value of one floating dtype, given {[d.name for d in dtypes]}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1, given {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap: expected a positive number, given {softcap}")
    if segments_BS is not None:
        if segments_BS.shape != (batch, length):
            raise ValueError(f"segments: expected shape {(batch, length)}, given {segments_BS.shape}")
        if not jnp.issubdtype(segments_BS.dtype, jnp.integer):
            raise ValueError(f"segments: expected an integer dtype, given {segments_BS.dtype}")
    call = AttentionCall(
        batch=batch,
        length=length,
        key_length=key_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtypes[0],
        has_segments=segments_BS is not None,
        window=window,
        softcap=softcap,
        scale=head_dim**-0.5 if scale is None else scale,
        causal=causal,
        mesh=mesh,
        platform=_platform(mesh, platform),
    )
    if call.needs_mask and length != key_length:
        raise ValueError(
            f"causal, window and segments speak of positions of one sequence, but there are {length} queries and "
            f"{key_length} keys; pass causal=False for attention to another sequence"
        )
    return call


def _platform(mesh: Mesh | None, platform: str | None) -> str:
    name = platform or jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if name not in _PLATFORMS:
        raise ValueError(f"platform: expected one of {', '.join(_PLATFORMS)}; given {name!r}")
    return _PLATFORMS[name]


def separate_padding(segments_BS: jax.Array) -> jax.Array:
    """Gives every padding position (segment 0) a segment of its own, so that it attends to itself alone.

    No row of the mask is then empty, so no softmax divides by zero, and what padding computes depends on nothing else.
    """
    return jnp.where(segments_BS == 0, -1 - jnp.arange(segments_BS.shape[1], dtype=segments_BS.dtype), segments_BS)


def allowed_BST(
    call: AttentionCall,
    rows_S: jax.Array,
    columns_T: jax.Array,
    row_ids_BS: jax.Array | None,
    column_ids_BT: jax.Array | None,
) -> jax.Array | None:
    """bool [B or 1, S, T]: may the query at position rows[s] attend to the key at columns[t]? None means always.

    Args:
        rows_S, columns_T: positions in the sequence, in any order.
        row_ids_BS, column_ids_BT: `separate_padding(segments)` at those positions, or None.
    """
    rows_S1, columns_1T = rows_S[:, None], columns_T[None, :]
    parts = []
    if call.looks_back_only:
        parts.append((columns_1T <= rows_S1)[None])
    if call.window is not None:
        parts.append((columns_1T > rows_S1 - call.window)[None])
    if row_ids_BS is not None and column_ids_BT is not None:
        parts.append(row_ids_BS[:, :, None] == column_ids_BT[:, None, :])
    mask = None
    for part in parts:
        mask = part if mask is None else mask & part
    return mask
