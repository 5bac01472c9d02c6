"""Look-up of a table's rows by their indices, with a gradient that is summed in float32.

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

# Bytes of the float32 sums that may exist beside a narrower table's gradient: a larger table is
# summed a few columns at a time.
SUM_BYTES = 128 << 20
# The lanes of a TPU's registers: columns are cut at multiples where possible.
_LANES = 128
# The axes of looked-up rows [B, S]. Not fsdp: each device of an fsdp group has all of its tokens.
_TOKEN_AXES = tuple(axis for axis in BATCH_AXES if axis != "fsdp"), "seq"


def look_up(
    table_VD: jax.Array,
    indices_BS: jax.Array,
    ctx: Context,
    vocab_axis: str | None,
) -> jax.Array:
    """Looks up the rows of the table that the indices name, [B, S, D] in the compute dtype.

    Args:
        table_VD: as it is stored: neither cast nor gathered.
        indices_BS: int32, from 0 to V - 1.
        ctx: the mesh and the compute dtype.
        vocab_axis: the mesh axis of V; that of D is fsdp.
    """
    if ctx.kernels is not None:
        return ctx.kernels.look_up(table_VD, indices_BS, ctx, vocab_axis)
    # custom_vjp keeps these functions beyond the trace. They may hold the mesh, not traced arrays.
    place = Context(batch={}, mesh=ctx.mesh)
    dtype = ctx.compute_dtype
    mesh = ctx.mesh
    shape = table_VD.shape
    table_dtype = table_VD.dtype

    @jax.custom_vjp
    def rows(table: jax.Array, indices: jax.Array) -> jax.Array:
        table = place.constrain(table, vocab_axis, "fsdp")
        indices = place.constrain(indices, *_TOKEN_AXES)
        # Cast after the look-up: there are fewer rows of tokens than rows of the table.
        rows_BSD = cast(jnp.take(table, indices, axis=0), dtype)
        return place.constrain(rows_BSD, *_TOKEN_AXES, "fsdp")

    def forward(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rows(table, indices), indices

    def backward(indices: jax.Array, rows_grad: jax.Array) -> tuple[jax.Array, Any]:
        summed = partial(table_gradient, shape=shape, dtype=table_dtype)
        gradient = on_mesh(summed, mesh, vocab_axis)
        with jax.named_scope("gradient"):
            grad = gradient(indices, rows_grad)
        # float0 is JAX's dtype for cotangents of integers.
        return grad, np.zeros(indices.shape, jax.dtypes.float0)

    rows.defvjp(forward, backward)
    return ctx.constrain_hidden(rows(table_VD, indices_BS))


def on_mesh(
    summed: Callable[..., jax.Array], mesh: Mesh | None, vocab_axis: str | None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`table_gradient` on each device's shard of the table."""
    if mesh is None or mesh.size == 1:
        return summed
    token_spec = PartitionSpec(*_TOKEN_AXES)
    rows_spec = PartitionSpec(*_TOKEN_AXES, "fsdp")
    table_spec = PartitionSpec(vocab_axis, "fsdp")
    local = partial(shard_gradient, summed, mesh=mesh, vocab_axis=vocab_axis)
    in_specs = (token_spec, rows_spec)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=table_spec,
        check_vma=False,
    )


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
    vocab_shards = 1 if vocab_axis is None else mesh.shape[vocab_axis]
    shard = (num_rows // vocab_shards, num_columns // mesh.shape["fsdp"])
    if vocab_axis is not None:
        # Indices from the shard's first row on. Those of other shards fall outside, and are left
        # out of the sum.
        indices = indices - jax.lax.axis_index(vocab_axis) * shard[0]
    token_axes = tuple(axis for axis in (*_TOKEN_AXES[0], "seq") if mesh.shape[axis] > 1)
    if not token_axes:
        return summed(indices, rows_grad, shape=shard, over_devices=lambda sums: sums)
    over_devices = partial(jax.lax.psum, axis_name=token_axes)
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
        indices: [...], which row each token looked up. Indices outside of 0 to V - 1 are left out.
        rows_grad: [..., D].
        shape: of the table.
        dtype: of the table. The sum is taken in float32 at least, and rounded to it once.
        over_devices: adds up the sums of devices with other tokens, in the dtype of the sum.
    """
    num_rows, num_columns = shape
    indices = indices.reshape(-1)
    rows_grad = rows_grad.reshape(-1, num_columns)
    sum_dtype = jnp.promote_types(jnp.promote_types(dtype, rows_grad.dtype), jnp.float32)
    indices = _drop_outside(indices, num_rows)

    def sums(columns: jax.Array) -> jax.Array:
        zeros = jnp.zeros((num_rows, columns.shape[1]), sum_dtype)
        local_sums = zeros.at[indices].add(columns.astype(sum_dtype), mode="drop")
        return over_devices(local_sums).astype(dtype)

    width = num_columns
    if sum_dtype != dtype:
        width = _columns_at_once(num_rows, num_columns, sum_dtype.itemsize)
    if width == num_columns:
        return sums(rows_grad)

    def body(step: jax.Array, grad: jax.Array) -> jax.Array:
        columns = jax.lax.dynamic_slice_in_dim(rows_grad, step * width, width, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(grad, sums(columns), step * width, axis=1)

    grad = jnp.zeros(shape, dtype)
    return jax.lax.fori_loop(0, num_columns // width, body, grad)


def _columns_at_once(num_rows: int, num_columns: int, itemsize: int) -> int:
    """The largest divisor of the number of columns of which sums are under SUM_BYTES; a multiple of 128 if there is."""
    widths = []
    for width in range(1, num_columns + 1):
        if num_columns % width == 0 and num_rows * width * itemsize <= SUM_BYTES:
            widths.append(width)
    aligned_widths = [width for width in widths if width % _LANES == 0]
    # One column where not even that is under the bound.
    return max(aligned_widths or widths or [1])


def _drop_outside(indices: jax.Array, num_rows: int) -> jax.Array:
    """The indices, with `num_rows` for those outside of 0 to num_rows - 1: a scatter in mode "drop" leaves it out."""
    # A negative index would wrap around.
    is_row = (indices >= 0) & (indices < num_rows)
    return jnp.where(is_row, indices, num_rows)
