"""Products of 8-bit floats with a scale for each block of 128 numbers on GPUs, as a Pallas kernel for Triton.

    y_mn = sum_b s_mb t_nb sum_(k in block b) left_mk right_nk

XLA for GPU has no such product: it converts the numbers to bfloat16, or writes the sums of each block to memory. The
kernel multiplies one block at a time in the tensor cores and adds the scaled sums in float32 registers. On Hopper,
whose tensor cores add 8-bit products with fewer bits than float32, this is the "promotion" of DeepSeek-V3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.triton import dialect as triton
from jax._src.pallas.triton import lowering
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.typing import DTypeLike

from plimsoll.framework.layers.block_rounding import TILE, check_size

# The kernel's name in traced and compiled programs.
NAME = "fp8_block_product"
# Rows and columns of the result that a program computes.
_TILE_ROWS = _TILE_COLUMNS = 128
# Programs that run at the same time read the rows of this many tiles, and share them in the L2 cache.
_GROUPED_TILES = 8


def multiply_blocks(
    left_MK: jax.Array,
    left_scales_MB: jax.Array,
    right_NK: jax.Array,
    right_scales: jax.Array,
    dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """Return left @ right^T [M, N], summed in float32.

    Args:
        left_MK: float8_e4m3fn; K is a multiple of 128.
        left_scales_MB: float32, scales of blocks along K.
        right_NK: float8_e4m3fn; N is a multiple of 128.
        right_scales: float32, [N, K / 128], or [N / 128, K / 128] for blocks of 128 x 128 numbers.
        dtype: dtype of the result.
        interpret: run the kernel as JAX operations, on any platform.
    """
    num_rows, summed = left_MK.shape
    num_columns = right_NK.shape[0]
    check_size(max(left_MK.size, right_NK.size, num_rows * num_columns))
    is_square = right_scales.shape[0] < num_columns
    num_tiles = pl.cdiv(num_rows, _TILE_ROWS) * (num_columns // _TILE_COLUMNS)
    out_shape = jax.ShapeDtypeStruct((num_rows, num_columns), dtype)
    num_bytes = left_MK.size + right_NK.size + out_shape.size * out_shape.dtype.itemsize
    # Scales with rows next to each other can be prefetched with the numbers.
    return pl.pallas_call(
        partial(_multiply_tile, is_square=is_square),
        out_shape=out_shape,
        grid=(num_tiles,),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=4),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * num_columns * summed, transcendentals=0, bytes_accessed=num_bytes
        ),
        interpret=interpret,
        name=NAME,
    )(left_MK, left_scales_MB.T, right_NK, right_scales if is_square else right_scales.T)


def _multiply_tile(
    left_ref: jax.Ref,
    left_scales_ref: jax.Ref,
    right_ref: jax.Ref,
    right_scales_ref: jax.Ref,
    y_ref: jax.Ref,
    *,
    is_square: bool,
) -> None:
    """Compute one tile of the result."""
    num_rows, num_columns = y_ref.shape
    row_tiles = pl.cdiv(num_rows, _TILE_ROWS)
    column_tiles = num_columns // _TILE_COLUMNS
    # The tiles of a group of rows come first, column by column.
    tile = pl.program_id(0)
    group, tile_in_group = tile // (_GROUPED_TILES * column_tiles), tile % (_GROUPED_TILES * column_tiles)
    first_row_tile = group * _GROUPED_TILES
    group_rows = jnp.minimum(row_tiles - first_row_tile, _GROUPED_TILES)
    row_tile = first_row_tile + tile_in_group % group_rows
    column_tile = tile_in_group // group_rows
    rows = pl.ds(row_tile * _TILE_ROWS, _TILE_ROWS)
    columns = pl.ds(column_tile * _TILE_COLUMNS, _TILE_COLUMNS)
    is_row = None
    if num_rows % _TILE_ROWS:
        is_row = row_tile * _TILE_ROWS + jnp.arange(_TILE_ROWS) < num_rows

    zeros = jnp.zeros((_TILE_ROWS, _TILE_COLUMNS), jnp.float32)

    def add_block(block: jax.Array, total: jax.Array) -> jax.Array:
        numbers = pl.ds(block * TILE, TILE)
        row_mask = None if is_row is None else is_row[:, None]
        left = plgpu.load(left_ref.at[rows, numbers], mask=row_mask)
        right = plgpu.load(right_ref.at[columns, numbers])
        left_scales = plgpu.load(left_scales_ref.at[block, rows], mask=is_row)
        product = _dot_p.bind(left, right, zeros)
        if is_square:
            return total + product * (left_scales * right_scales_ref[column_tile, block])[:, None]
        right_scales = plgpu.load(right_scales_ref.at[block, columns])
        return total + product * (left_scales[:, None] * right_scales[None, :])

    total = jax.lax.fori_loop(0, left_ref.shape[1] // TILE, add_block, zeros)
    row_mask = None if is_row is None else is_row[:, None]
    plgpu.store(y_ref.at[rows, columns], total.astype(y_ref.dtype), mask=row_mask)


def _dot(left: jax.Array, right: jax.Array, start: jax.Array) -> jax.Array:
    """Return start [M, N] + left [M, K] @ right [N, K]^T."""
    over_second = (((1,), (1,)), ((), ()))
    return start + jax.lax.dot_general(left, right, over_second, preferred_element_type=jnp.float32)


def _lower_dot(ctx: Any, left: Any, right: Any, start: Any) -> Any:
    return triton.dot(left, triton.trans(right, (1, 0)), start, max_num_imprecise_acc=TILE)


# `plgpu.dot` has no option for this attribute. Without it, Triton for Hopper expects all sums to have the bits of
# float32, which the 8-bit instructions (wgmma) do not provide, and converts the numbers to float16.
_dot_p = Primitive("fp8_block_dot")
_dot_p.def_abstract_eval(lambda left, right, start: ShapedArray(start.shape, start.dtype))
mlir.register_lowering(_dot_p, mlir.lower_fun(_dot, multiple_results=False))
lowering.register_lowering(_dot_p)(_lower_dot)
