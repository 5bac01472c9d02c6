"""Kernels for 8-bit floats with a scale for each block of 128 numbers on GPUs, in Pallas for Triton.

**Products**, y_mn = sum_b s_mb t_nb sum_(k in block b) left_mk right_nk. XLA for GPU has no such product: it converts
the numbers to bfloat16, or writes the sums of each block to memory. The kernel multiplies one block at a time in the
tensor cores and adds the scaled sums in float32 registers. On Hopper, whose tensor cores add 8-bit products with fewer
bits than float32, this is the "promotion" of DeepSeek-V3.

Triton for Hopper multiplies 8-bit numbers only if a product has the attribute `maxNumImpreciseAcc`; otherwise it
expects sums with all bits of float32, and converts the numbers to float16. Pallas has no argument for it, so the
program that Pallas makes of the kernel gets it before it is compiled.

**Rounding**: XLA for GPU reads a matrix once for its scales and again to round it, along each of its axes. The kernel
reads it once for both axes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton

from plimsoll.framework.layers.block_rounding import PRODUCT_KERNEL, Blocks, find_scales, to_bits
from plimsoll.framework.layers.pallas_gpu import call_kernel, describe_absent_gpu

# The size of the blocks.
TILE = 128
# Rows and columns of the result that a program computes.
_TILE_ROWS = _TILE_COLUMNS = 128
# Programs that run at the same time read the rows of this many tiles, and share them in the L2 cache.
_GROUPED_TILES = 8


# --- products ---------------------------------------------------------------------------------------------------------


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
    num_rows = left_MK.shape[0]
    num_columns = right_NK.shape[0]
    check_size(max(left_MK.size, right_NK.size, num_rows * num_columns))
    is_square = right_scales.shape[0] < num_columns
    # Scales with rows next to each other can be prefetched with the numbers.
    operands = (left_MK, left_scales_MB.T, right_NK, right_scales if is_square else right_scales.T)
    options = {"dtype": jnp.dtype(dtype), "is_square": is_square}
    return _call_kernel(*operands, **options, interpret=True) if interpret else _product_p.bind(*operands, **options)


def _call_kernel(
    left: jax.Array,
    left_scales: jax.Array,
    right: jax.Array,
    right_scales: jax.Array,
    *,
    dtype: np.dtype,
    is_square: bool,
    interpret: bool = False,
) -> jax.Array:
    out_shape = jax.ShapeDtypeStruct((left.shape[0], right.shape[0]), dtype)
    return pl.pallas_call(
        partial(_multiply_tile, is_square=is_square),
        out_shape=out_shape,
        grid=(pl.cdiv(left.shape[0], _TILE_ROWS) * (right.shape[0] // _TILE_COLUMNS),),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=4),
        interpret=interpret,
        name=PRODUCT_KERNEL,
    )(left, left_scales, right, right_scales)


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
        over_second = (((1,), (1,)), ((), ()))
        product = jax.lax.dot_general(left, right, over_second, preferred_element_type=jnp.float32)
        if is_square:
            return total + product * (left_scales * right_scales_ref[column_tile, block])[:, None]
        right_scales = plgpu.load(right_scales_ref.at[block, columns])
        return total + product * (left_scales[:, None] * right_scales[None, :])

    total = jax.lax.fori_loop(0, left_ref.shape[1] // TILE, add_block, zeros)
    row_mask = None if is_row is None else is_row[:, None]
    plgpu.store(y_ref.at[rows, columns], total.astype(y_ref.dtype), mask=row_mask)


def _call_with_8_bit_products(*operands: jax.Array, dtype: np.dtype, is_square: bool) -> jax.Array:
    """Call the kernel with the attribute that Hopper needs."""
    kernel = jax.jit(partial(_call_kernel, dtype=dtype, is_square=is_square))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    with nullcontext() if jax.default_backend() == "gpu" else describe_absent_gpu():
        traced = kernel.trace(*shapes)
    lowered = traced.lower(lowering_platforms=("cuda",))
    call = next(one for one in _walk(lowered.compiler_ir()) if "mhlo.backend_config" in one.attributes)
    settings = {named.name: named.attr for named in call.attributes["mhlo.backend_config"]}
    program = _allow_imprecise_sums(settings.pop("ir").value_bytes)
    attributes = {name: _read_attribute(attribute) for name, attribute in settings.items()}
    target = call.attributes["call_target_name"].value
    out_shape = jax.ShapeDtypeStruct((operands[0].shape[0], operands[2].shape[0]), dtype)
    # Names the call in the program, for plans and profiles.
    with jax.named_scope(PRODUCT_KERNEL):
        return jax.ffi.ffi_call(target, out_shape, custom_call_api_version=4)(*operands, ir=program, **attributes)


def _allow_imprecise_sums(program: bytes) -> str:
    """Set the attribute of all products of a Triton program."""
    with ir.Context() as context, ir.Location.unknown():
        triton.register_dialect(context)
        context.load_all_available_dialects()
        module = ir.Module.parse(program)
        for operation in _walk(module):
            if operation.name == "tt.dot":
                bound = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), TILE)
                operation.attributes["maxNumImpreciseAcc"] = bound
        return str(module)


def _walk(module: Any) -> list[Any]:
    """Return all operations of a module."""
    operations = []

    def visit(operation: Any) -> Any:
        operations.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return operations


def _read_attribute(attribute: Any) -> bool | str | np.int32:
    """Return an MLIR attribute in the form in which `jax.ffi` takes it."""
    return np.int32(attribute.value) if isinstance(attribute, ir.IntegerAttr) else attribute.value


# A primitive of its own, so that a trace for an estimate compiles nothing.
_product_p = Primitive(PRODUCT_KERNEL)
_product_p.def_abstract_eval(
    lambda left, left_scales, right, right_scales, dtype, is_square: ShapedArray((left.shape[0], right.shape[0]), dtype)
)
mlir.register_lowering(_product_p, mlir.lower_fun(_call_with_8_bit_products, multiple_results=False), platform="cuda")


# --- rounding ---------------------------------------------------------------------------------------------------------


def check_size(elements: int) -> None:
    """Raise ValueError if the offsets of the elements of an array do not fit into int32, as Triton computes them."""
    if elements >= 2**31:
        raise ValueError(
            f"a product of fp8_block has an array of {elements} elements, but its GPU kernels support fewer than 2^31: "
            "raise learner.accumulate"
        )


def round_along_both_axes(x_MK: jax.Array, interpret: bool = False) -> tuple[Blocks, Blocks]:
    """Return x and its transpose [K, M], both rounded in blocks of 128 numbers along their second axis, on a GPU.

    Args:
        x_MK: floats; M and K are multiples of 128.
        interpret: run the kernel as JAX operations, on any platform.
    """
    rows, columns = x_MK.shape
    check_size(x_MK.size)
    shapes = (
        jax.ShapeDtypeStruct((rows, columns), jnp.float8_e4m3fn),
        # Scales of consecutive rows are next to each other: a program writes those of a tile at once.
        jax.ShapeDtypeStruct((columns // TILE, rows), jnp.uint8),
        jax.ShapeDtypeStruct((columns, rows), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((rows // TILE, columns), jnp.uint8),
    )
    run = pl.pallas_call(
        _round_tile_along_both_axes,
        out_shape=shapes,
        grid=(columns // TILE, rows // TILE),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="fp8_block_rounding",
    )
    values_MK, scales_BM, values_KM, scales_BK = run(x_MK) if interpret else call_kernel(run, x_MK)
    return Blocks(to_bits(values_MK), scales_BM.T), Blocks(to_bits(values_KM), scales_BK.T)


def round_square_tiles(x_MK: jax.Array, transpose: bool, interpret: bool = False) -> Blocks:
    """Return x, or its transpose [K, M], rounded in blocks of 128 x 128 numbers, on a GPU.

    Args:
        x_MK, interpret: see `round_along_both_axes`.
        transpose: whether to return the transpose.
    """
    rows, columns = x_MK.shape
    check_size(x_MK.size)
    grid = (columns // TILE, rows // TILE)
    run = pl.pallas_call(
        partial(_round_square_tile, transpose=transpose),
        out_shape=(
            jax.ShapeDtypeStruct((columns, rows) if transpose else (rows, columns), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(grid if transpose else grid[::-1], jnp.uint8),
        ),
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="fp8_block_rounding",
    )
    values, scales = run(x_MK) if interpret else call_kernel(run, x_MK)
    return Blocks(to_bits(values), scales)


def _round_tile_along_both_axes(
    x_ref: jax.Ref, values_MK_ref: jax.Ref, scales_BM_ref: jax.Ref, values_KM_ref: jax.Ref, scales_BK_ref: jax.Ref
) -> None:
    column_tile, row_tile = pl.program_id(0), pl.program_id(1)
    rows = pl.ds(row_tile * TILE, TILE)
    columns = pl.ds(column_tile * TILE, TILE)
    x = plgpu.load(x_ref.at[rows, columns]).astype(jnp.float32)
    magnitude_bits = _find_magnitude_bits(x)
    scales, factor = find_scales(jnp.max(magnitude_bits, axis=1))
    plgpu.store(values_MK_ref.at[rows, columns], (x * factor[:, None]).astype(jnp.float8_e4m3fn))
    plgpu.store(scales_BM_ref.at[column_tile, rows], scales.astype(jnp.uint8))
    scales, factor = find_scales(jnp.max(magnitude_bits, axis=0))
    plgpu.store(values_KM_ref.at[columns, rows], (x * factor[None, :]).astype(jnp.float8_e4m3fn).T)
    plgpu.store(scales_BK_ref.at[row_tile, columns], scales.astype(jnp.uint8))


def _round_square_tile(x_ref: jax.Ref, values_ref: jax.Ref, scales_ref: jax.Ref, *, transpose: bool) -> None:
    column_tile, row_tile = pl.program_id(0), pl.program_id(1)
    rows = pl.ds(row_tile * TILE, TILE)
    columns = pl.ds(column_tile * TILE, TILE)
    x = plgpu.load(x_ref.at[rows, columns]).astype(jnp.float32)
    magnitude_bits = _find_magnitude_bits(x)
    scale, factor = find_scales(jnp.max(jnp.max(magnitude_bits, axis=1), axis=0))
    values = (x * factor).astype(jnp.float8_e4m3fn)
    if transpose:
        plgpu.store(values_ref.at[columns, rows], values.T)
        scales_ref[column_tile, row_tile] = scale.astype(jnp.uint8)
    else:
        plgpu.store(values_ref.at[rows, columns], values)
        scales_ref[row_tile, column_tile] = scale.astype(jnp.uint8)


def _find_magnitude_bits(x: jax.Array) -> jax.Array:
    """Return the bits of the magnitudes of float32 numbers as int32.

    Their order is that of the magnitudes, with NaN as the largest; maxima of floats in Triton ignore NaN.
    """
    return jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
