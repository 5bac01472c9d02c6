"""Lookup of a table's rows by index, with a gradient that is summed in float32.

The gradient of `jnp.take` is a scatter-add in the table's dtype. In bfloat16, it loses every term below 1/256 of the
running sum: a token that makes up 10% of 65,536 keeps 43% of its gradient's length. Here the terms are added in
float32, over all tokens and all devices, and the sum is rounded once to the dtype in which the parameter is stored.

On a mesh, the table is never gathered. Each device looks up its own columns for the tokens of all devices of its fsdp
group, and the group then trades columns for tokens: this moves bytes of the tokens instead of bytes of the table. The
gradient takes the reverse path, so each device sums its own shard of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from plimsoll.framework.layers.base import BATCH_AXES, Context, cast
from plimsoll.framework.layers.custom_gradients import zero_cotangent

# Maximum bytes of float32 sums that may exist next to the gradient of a table in a narrower dtype: the gradient of a
# larger table is summed a few columns at a time.
SUM_BYTES = 128 << 20
# The number of lanes of a TPU's vector registers: columns are split at multiples of it if possible.
_LANES = 128
# The mesh axes of looked-up rows [B, S]. Not fsdp: each device of an fsdp group has all tokens of the group.
_TOKEN_AXES = tuple(axis for axis in BATCH_AXES if axis != "fsdp"), "seq"


def look_up(table_VD: jax.Array, indices_BS: jax.Array, ctx: Context, vocab_axes: tuple[str, ...]) -> jax.Array:
    """Look up the rows of the table at the given indices, [B, S, D] in the compute dtype.

    Args:
        table_VD: the table as it is stored: neither cast nor gathered.
        indices_BS: int32, from 0 to V - 1.
        ctx: provides the mesh and the compute dtype.
        vocab_axes: the mesh axes of V; () if it is not sharded. D is sharded over fsdp.
    """
    if ctx.kernels is not None:
        return ctx.kernels.look_up(table_VD, indices_BS, ctx, vocab_axes)
    # custom_vjp keeps these functions after the trace, so they may hold the mesh but no traced arrays.
    mesh_ctx = Context(batch={}, mesh=ctx.mesh)
    dtype = ctx.compute_dtype
    mesh = ctx.mesh
    shape = table_VD.shape
    table_dtype = table_VD.dtype

    @jax.custom_vjp
    def rows(table: jax.Array, indices: jax.Array) -> jax.Array:
        table = mesh_ctx.constrain(table, vocab_axes or None, "fsdp")
        indices = mesh_ctx.constrain(indices, *_TOKEN_AXES)
        # The cast comes after the lookup: the tokens need fewer rows than the table has.
        rows_BSD = cast(jnp.take(table, indices, axis=0), dtype)
        return mesh_ctx.constrain(rows_BSD, *_TOKEN_AXES, "fsdp")

    def backward(indices: jax.Array, rows_grad: jax.Array) -> tuple[jax.Array, jax.Array | np.ndarray]:
        gradient = partial(table_gradient, shape=shape, dtype=table_dtype)
        if mesh is not None and mesh.size > 1:
            gradient = jax.shard_map(
                partial(shard_gradient, gradient, mesh=mesh, vocab_axes=vocab_axes),
                mesh=mesh,
                in_specs=(PartitionSpec(*_TOKEN_AXES), PartitionSpec(*_TOKEN_AXES, "fsdp")),
                out_specs=PartitionSpec(vocab_axes or None, "fsdp"),
                check_vma=False,
            )
        with jax.named_scope("gradient"):
            grad = gradient(indices, rows_grad)
        return grad, zero_cotangent(indices)

    rows.defvjp(lambda table, indices: (rows(table, indices), indices), backward)
    return ctx.constrain_hidden(rows(table_VD, indices_BS))


def shard_gradient(
    compute_gradient: Callable[..., jax.Array],
    indices: jax.Array,
    rows_grad: jax.Array,
    *,
    mesh: Mesh | AbstractMesh,
    vocab_axes: tuple[str, ...],
) -> jax.Array:
    """Compute the gradient of one device's shard of the table, summed over the devices with other tokens.

    This runs inside shard_map.

    Args:
        compute_gradient: `table_gradient` with the shape of the whole table.
        indices: row indices of the tokens of the device's fsdp group.
        rows_grad: gradients of these tokens' rows, for the device's own columns.
        mesh, vocab_axes: see `look_up`.
    """
    num_rows, num_columns = compute_gradient.keywords["shape"]  # type: ignore[attr-defined]
    vocab_shards = math.prod(mesh.shape[axis] for axis in vocab_axes)
    shard = (num_rows // vocab_shards, num_columns // mesh.shape["fsdp"])
    if vocab_axes:
        # Makes indices relative to the shard's first row. Those of other shards fall outside, and are left out of the
        # sum.
        indices = indices - jax.lax.axis_index(vocab_axes) * shard[0]
    token_axes = tuple(axis for axis in (*_TOKEN_AXES[0], "seq") if mesh.shape[axis] > 1)
    if not token_axes:
        return compute_gradient(indices, rows_grad, shape=shard, over_devices=lambda sums: sums)
    over_devices = partial(jax.lax.psum, axis_name=token_axes)
    return compute_gradient(indices, rows_grad, shape=shard, over_devices=over_devices)


def table_gradient(
    indices: jax.Array,
    rows_grad: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    over_devices: Callable[[jax.Array], jax.Array] = lambda sums: sums,
) -> jax.Array:
    """Compute the gradient of a table [V, D]: each row is the sum of the gradients of the tokens that looked it up.

    Args:
        indices: [...], the row that each token looked up. Indices outside of 0 to V - 1 are ignored.
        rows_grad: [..., D], the gradients of the looked-up rows.
        shape: shape of the table.
        dtype: dtype of the table. The sum is taken in float32 or wider, and rounded to this dtype once.
        over_devices: adds up the sums of devices with other tokens, in the dtype of the sum.
    """
    num_rows, num_columns = shape
    indices = indices.reshape(-1)
    rows_grad = rows_grad.reshape(-1, num_columns)
    sum_dtype = jnp.promote_types(jnp.promote_types(dtype, rows_grad.dtype), jnp.float32)
    # A scatter in mode "drop" ignores the index `num_rows`, but a negative index would wrap around.
    is_row = (indices >= 0) & (indices < num_rows)
    indices = jnp.where(is_row, indices, num_rows)

    def sums(columns: jax.Array) -> jax.Array:
        zeros = jnp.zeros((num_rows, columns.shape[1]), sum_dtype)
        local_sums = zeros.at[indices].add(columns.astype(sum_dtype), mode="drop")
        return over_devices(local_sums).astype(dtype)

    width = num_columns
    if sum_dtype != dtype:
        # The largest divisor of the columns whose sums fit into SUM_BYTES, preferring multiples of 128.
        widths = []
        for divisor in range(1, num_columns + 1):
            if num_columns % divisor == 0 and num_rows * divisor * sum_dtype.itemsize <= SUM_BYTES:
                widths.append(divisor)
        aligned_widths = [divisor for divisor in widths if divisor % _LANES == 0]
        # One column if not even that is within the bound.
        width = max(aligned_widths or widths or [1])
    if width == num_columns:
        return sums(rows_grad)

    def body(step: jax.Array, grad: jax.Array) -> jax.Array:
        columns = jax.lax.dynamic_slice_in_dim(rows_grad, step * width, width, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(grad, sums(columns), step * width, axis=1)

    grad = jnp.zeros(shape, dtype)
    return jax.lax.fori_loop(0, num_columns // width, body, grad)
