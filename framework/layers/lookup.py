"""Rows of a table by their indices, with a gradient that is summed in float32.

`jnp.take` has a scatter-add in the table's dtype for its gradient. In bfloat16 that loses every term that is under
1/256 of the sum so far: a token that is 10% of 65,536 keeps 43% of its gradient's length. Here the terms are added in
float32, over all tokens and all devices, and the sum is rounded once to the dtype in which the parameter is stored.

On a mesh the table is never gathered. Each device looks up its own columns for the tokens of all devices of its fsdp
group, and tokens and columns change places: bytes of the tokens instead of bytes of the table. The gradient goes the
same way back, so each device sums its own shard of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from framework.layers.base import BATCH_AXES, Context, cast

# Bytes of the float32 sums that may stand beside a narrower table's gradient: more are made a few columns at a time.
SUM_BYTES = 128 << 20
_LANES = 128  # of a TPU's registers: columns are cut at multiples where possible
_TOKEN_AXES = tuple(axis for axis in BATCH_AXES if axis != "fsdp"), "seq"


def look_up(table_VD: jax.Array, indices_BS: jax.Array, ctx: Context, vocab_axis: str | None) -> jax.Array:
    """The rows of the table that the indices name, [B, S, D] in the compute dtype.

    Args:
        table_VD: as it is stored: neither cast nor gathered.
        indices_BS: int32, from 0 to V - 1.
        ctx: the mesh and the compute dtype.
        vocab_axis: the mesh axis of V; that of D is fsdp.
    """
    # custom_vjp keeps the functions below for longer than the trace: they may hold the mesh, but no traced array.
    place, dtype, mesh = Context(batch={}, mesh=ctx.mesh), ctx.compute_dtype, ctx.mesh
    shape, table_dtype = table_VD.shape, table_VD.dtype

    @jax.custom_vjp
    def rows(table: jax.Array, indices: jax.Array) -> jax.Array:
        table, indices = place.constrain(table, vocab_axis, "fsdp"), place.constrain(indices, *_TOKEN_AXES)
        return place.constrain(cast(jnp.take(table, indices, axis=0), dtype), *_TOKEN_AXES, "fsdp")

    def forward(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rows(table, indices), indices

    def backward(indices: jax.Array, rows_grad: jax.Array) -> tuple[jax.Array, Any]:
        summed = partial(table_gradient, shape=shape, dtype=table_dtype)
        with jax.named_scope("gradient"):
            grad = on_mesh(summed, mesh, vocab_axis)(indices, rows_grad)
        return grad, np.zeros(indices.shape, jax.dtypes.float0)

    rows.defvjp(forward, backward)
    return ctx.constrain_hidden(rows(table_VD, indices_BS))


def on_mesh(
    summed: Callable[..., jax.Array], mesh: Mesh | None, vocab_axis: str | None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`table_gradient` on each device's shard of the table."""
    if mesh is None or mesh.size == 1:
        return summed
    tokens, table = PartitionSpec(*_TOKEN_AXES), PartitionSpec(vocab_axis, "fsdp")
    local = partial(shard_gradient, summed, mesh=mesh, vocab_axis=vocab_axis)
    in_specs = tokens, PartitionSpec(*_TOKEN_AXES, "fsdp")
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=table, check_vma=False)


def shard_gradient(
    summed: Callable[..., jax.Array], indices: jax.Array, rows_grad: jax.Array, *, mesh: Any, vocab_axis: str | None
) -> jax.Array:
    """Inside shard_map: the gradient of one device's shard of the table, summed over the devices with other tokens.

    Args:
        summed: `table_gradient` with the shape of the whole table.
        indices: of the tokens of the device's fsdp group.
        rows_grad: these tokens' gradients, of the device's own columns.
        mesh, vocab_axis: see `look_up`.
    """
    num_rows, num_columns = summed.keywords["shape"]  # type: ignore[attr-defined]
    shard = num_rows // (1 if vocab_axis is None else mesh.shape[vocab_axis]), num_columns // mesh.shape["fsdp"]
    if vocab_axis is not None:
        indices = indices - jax.lax.axis_index(vocab_axis) * shard[0]
    others = tuple(axis for axis in ("data", "seq") if mesh.shape[axis] > 1)
    over_devices = partial(jax.lax.psum, axis_name=others) if others else lambda sums: sums
    return summed(indices, rows_grad, shape=shard, over_devices=over_devices)


def table_gradient(
    indices: jax.Array,
    rows_grad: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: Any,
    over_devices: Callable[[jax.Array], jax.Array] = lambda sums: sums,
) -> jax.Array:
    """The gradient of a table [V, D]: for each row the sum of the gradients of the tokens that looked it up.

    Args:
        indices: [...], which row each token looked up. Others than 0 to V - 1 are left out.
        rows_grad: [..., D].
        shape: of the table.
        dtype: of the table. The sum is taken in float32 at least, and rounded to it once.
        over_devices: adds up what devices with other tokens have, in the dtype of the sum.
    """
    num_rows, num_columns = shape
    indices, rows_grad = indices.reshape(-1), rows_grad.reshape(-1, num_columns)
    wide = jnp.promote_types(jnp.promote_types(dtype, rows_grad.dtype), jnp.float32)
    indices = jnp.where((indices >= 0) & (indices < num_rows), indices, num_rows)  # a negative one would wrap around

    def sums(columns: jax.Array) -> jax.Array:
        zeros = jnp.zeros((num_rows, columns.shape[1]), wide)
        return over_devices(zeros.at[indices].add(columns.astype(wide), mode="drop")).astype(dtype)

    width = _columns_at_once(num_rows, num_columns, wide.itemsize) if wide != dtype else num_columns
    if width == num_columns:
        return sums(rows_grad)

    def body(step: jax.Array, grad: jax.Array) -> jax.Array:
        columns = jax.lax.dynamic_slice_in_dim(rows_grad, step * width, width, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(grad, sums(columns), step * width, axis=1)

    return jax.lax.fori_loop(0, num_columns // width, body, jnp.zeros(shape, dtype))


def _columns_at_once(num_rows: int, num_columns: int, itemsize: int) -> int:
    """The largest divisor of the number of columns of which sums are under SUM_BYTES; a multiple of 128 if there is."""
    fits = [n for n in range(1, num_columns + 1) if num_columns % n == 0 and num_rows * n * itemsize <= SUM_BYTES]
    whole_tiles = [n for n in fits if n % _LANES == 0]
    return max(whole_tiles or fits or [1])
