"""Grouped products on GPUs, as Pallas kernels for Triton: rows times their experts' weights, and their gradients.

XLA for GPU has no kernel for `jax.lax.ragged_dot`: it multiplies all rows by all experts' weights and discards all
but one of the products, which takes E times the multiply-adds, and memory for E times the rows. (jax 0.10.2 and
0.11.2; its option `jax_ragged_dot_use_gpu_pallas_triton_lowering` names a module that no released jax has.)

A tile is TILE_ROWS consecutive rows of one expert; the last tile of an expert may be partly empty. The number of
tiles depends on the router, so there are as many programs as there could be tiles, and those without rows end
immediately. Functions import Pallas when they run, because every command imports this module, and most models have no
experts.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

TILE_ROWS = 64
# Tile sizes of a weight's columns and of the contracted axis: the largest that divides the axis is used.
_TILE_COLUMNS = (128, 64, 32, 16)
_TILE_CONTRACTED = (64, 32, 16)
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


def rows_times_weights(
    x_NI: jax.Array, weight_EIO: jax.Array, sizes_E: jax.Array, transpose: bool = False, interpret: bool = False
) -> jax.Array:
    """Multiply each row by its expert's weight: [N, O] in x's dtype, summed in float32.

    Args:
        x_NI: rows sorted by expert, followed by at least TILE_ROWS spare ones.
        weight_EIO: weights in x's dtype.
        sizes_E: int32, the number of rows of each expert.
        transpose: x is [N, O], and the result [N, I].
        interpret: run the kernel as JAX operations, on any platform.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    columns = weight_EIO.shape[1 if transpose else 2]
    x_NI = _pad(x_NI, 1)
    weight_EIO = _pad(_pad(weight_EIO, 1), 2)
    num_rows, contracted = x_NI.shape
    padded_columns = weight_EIO.shape[1 if transpose else 2]
    _check_size(x_NI.dtype, num_rows * max(contracted, padded_columns))
    tile_columns = _largest_divisor(padded_columns, _TILE_COLUMNS)
    experts, first_rows, end_rows = _tiles(sizes_E, num_rows)
    kernel = partial(
        _rows_kernel,
        tile_columns=tile_columns,
        tile_contracted=_largest_divisor(contracted, _TILE_CONTRACTED),
        transpose=transpose,
    )
    y_NO = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_rows, padded_columns), x_NI.dtype),
        grid=(experts.shape[0], padded_columns // tile_columns),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_rows",
    )(experts, first_rows, end_rows, x_NI, weight_EIO)
    return y_NO[:, :columns]


def weight_gradients(x_NI: jax.Array, grad_NO: jax.Array, sizes_E: jax.Array, interpret: bool = False) -> jax.Array:
    """Return the sums over each expert's rows of x^T grad: [E, I, O] in the rows' dtype, summed in float32.

    Args:
        x_NI, grad_NO: rows sorted by expert, followed by at least TILE_ROWS spare ones.
        sizes_E, interpret: see `rows_times_weights`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    shape = (sizes_E.shape[0], x_NI.shape[1], grad_NO.shape[1])
    x_NI = _pad(x_NI, 1)
    grad_NO = _pad(grad_NO, 1)
    inputs = x_NI.shape[1]
    outputs = grad_NO.shape[1]
    _check_size(x_NI.dtype, x_NI.shape[0] * max(inputs, outputs))
    num_experts = sizes_E.shape[0]
    tile_inputs = _largest_divisor(inputs, _TILE_CONTRACTED)
    tile_outputs = _largest_divisor(outputs, _TILE_COLUMNS)
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    weight_grads = pl.pallas_call(
        partial(_weights_kernel, tile_inputs=tile_inputs, tile_outputs=tile_outputs),
        out_shape=jax.ShapeDtypeStruct((num_experts, inputs, outputs), x_NI.dtype),
        grid=(num_experts, inputs // tile_inputs, outputs // tile_outputs),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_weights",
    )(ends_E - sizes_E, ends_E, x_NI, grad_NO)
    return weight_grads[:, : shape[1], : shape[2]]


def _pad(x: jax.Array, axis: int) -> jax.Array:
    """Pad an axis of x with zeros to a multiple of the smallest tile: adapters may have few columns."""
    missing = -x.shape[axis] % _TILE_CONTRACTED[-1]
    if missing == 0:
        return x
    widths = [(0, missing if index == axis else 0) for index in range(x.ndim)]
    return jnp.pad(x, widths)


def _check_size(dtype: DTypeLike, elements: int) -> None:
    """Raise ValueError if the offsets of the elements do not fit into int32, which Triton computes with."""
    if elements >= 2**31:
        raise ValueError(
            f"the rows of all experts have {elements} elements of {dtype}; the GPU kernels support fewer than 2^31: "
            "raise learner.accumulate, or set experts.implementation=blocks"
        )


def _largest_divisor(size: int, candidates: tuple[int, ...]) -> int:
    return next(tile for tile in candidates if size % tile == 0)


def _tiles(sizes_E: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return for each tile its expert, its first row, and the end of its expert's rows, int32 [T].

    Unused tiles end at 0.
    """
    num_experts = sizes_E.shape[0]
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    starts_E = ends_E - sizes_E
    tile_ends_E = jnp.cumsum((sizes_E + TILE_ROWS - 1) // TILE_ROWS, dtype=jnp.int32)
    # Each expert needs less than one tile more than its rows fill.
    tiles_T = jnp.arange(num_rows // TILE_ROWS + num_experts, dtype=jnp.int32)
    experts_T = jnp.searchsorted(tile_ends_E, tiles_T, side="right").astype(jnp.int32)
    is_used_T = experts_T < num_experts
    experts_T = jnp.minimum(experts_T, num_experts - 1)
    first_tiles_T = jnp.where(experts_T > 0, tile_ends_E[experts_T - 1], 0)
    first_rows_T = starts_E[experts_T] + (tiles_T - first_tiles_T) * TILE_ROWS
    return (experts_T, jnp.where(is_used_T, first_rows_T, 0), jnp.where(is_used_T, ends_E[experts_T], 0))


def _rows_kernel(
    experts_ref: jax.Ref,
    first_rows_ref: jax.Ref,
    end_rows_ref: jax.Ref,
    x_ref: jax.Ref,
    weight_ref: jax.Ref,
    y_ref: jax.Ref,
    *,
    tile_columns: int,
    tile_contracted: int,
    transpose: bool,
) -> None:
    """Multiply one tile of rows by some columns of its expert's weight."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    tile = pl.program_id(0)
    expert = experts_ref[tile]
    first_row = first_rows_ref[tile]
    end_row = end_rows_ref[tile]
    rows = pl.ds(first_row, TILE_ROWS)
    columns = pl.ds(pl.program_id(1) * tile_columns, tile_columns)
    # Rows after the expert's belong to the next one. They are read, because each row of a product is independent, but
    # not written.
    is_in_expert = (first_row + jnp.arange(TILE_ROWS)) < end_row

    def add_product(step: jax.Array, total: jax.Array) -> jax.Array:
        contracted = pl.ds(step * tile_contracted, tile_contracted)
        x_tile = plgpu.load(x_ref.at[rows, contracted])
        if transpose:
            weight_tile = plgpu.load(weight_ref.at[expert, columns, contracted])
        else:
            weight_tile = plgpu.load(weight_ref.at[expert, contracted, columns])
        return total + plgpu.dot(x_tile, weight_tile, trans_b=transpose, allow_tf32=False)

    # An unused tile does nothing. This avoids `where`, whose result Pallas lowers to a boolean.
    is_used = (first_row < end_row).astype(jnp.int32)
    steps = is_used * (x_ref.shape[1] // tile_contracted)
    zeros = jnp.zeros((TILE_ROWS, tile_columns), jnp.float32)
    y_tile = jax.lax.fori_loop(0, steps, add_product, zeros)
    plgpu.store(y_ref.at[rows, columns], y_tile.astype(y_ref.dtype), mask=is_in_expert[:, None])


def _weights_kernel(
    starts_ref: jax.Ref,
    ends_ref: jax.Ref,
    x_ref: jax.Ref,
    grad_ref: jax.Ref,
    weight_grad_ref: jax.Ref,
    *,
    tile_inputs: int,
    tile_outputs: int,
) -> None:
    """Compute some inputs and outputs of one expert's gradient, the sum over all of its rows."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    expert = pl.program_id(0)
    start = starts_ref[expert]
    end = ends_ref[expert]
    inputs = pl.ds(pl.program_id(1) * tile_inputs, tile_inputs)
    outputs = pl.ds(pl.program_id(2) * tile_outputs, tile_outputs)

    def add_product(step: jax.Array, total: jax.Array) -> jax.Array:
        first_row = start + step * TILE_ROWS
        rows = pl.ds(first_row, TILE_ROWS)
        is_in_expert = ((first_row + jnp.arange(TILE_ROWS)) < end)[:, None]
        # Both are masked: a spare row may hold NaN, and 0 times NaN is NaN.
        x_tile = plgpu.load(x_ref.at[rows, inputs], mask=is_in_expert, other=0.0)
        grad_tile = plgpu.load(grad_ref.at[rows, outputs], mask=is_in_expert, other=0.0)
        return total + plgpu.dot(x_tile, grad_tile, trans_a=True, allow_tf32=False)

    steps = (end - start + TILE_ROWS - 1) // TILE_ROWS
    zeros = jnp.zeros((tile_inputs, tile_outputs), jnp.float32)
    total = jax.lax.fori_loop(0, steps, add_product, zeros)
    plgpu.store(weight_grad_ref.at[expert, inputs, outputs], total.astype(weight_grad_ref.dtype))
