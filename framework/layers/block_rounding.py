"""Rounds matrices to 8-bit floats (e4m3) with a scale for each block of numbers.

Scales are powers of two: the smallest for which no number of a block exceeds 448. The scale of zeros is 1. In blocks
with a number that is not finite, all numbers become NaN: they must reach the loss, where the run notices them.

XLA for GPU reads a matrix once for its scales and again to round it, along each of its axes. For blocks of 128 numbers,
a Pallas kernel for Triton reads it once for both axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# The size of the blocks that the kernel rounds.
TILE = 128
# Float32: bits of the mantissa, and the mantissa of 448 = 1.75 * 2^8.
_MANTISSA_BITS = 23
_LARGEST_MANTISSA, _LARGEST_EXPONENT = 0x600000, 8
_BIAS = 127
_NAN_SCALE = 255


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """A matrix of 8-bit numbers, as its bits, so that JAX may save it: see `low_precision._tag_bits`.

    Attributes:
        values: uint8[M, K], the bits of e4m3 numbers.
        scales: uint8[M, K / size], the bits of e8m0 scales of blocks along K; [M / size, K / size] for square blocks.
    """

    values: jax.Array
    scales: jax.Array


def round_blocks(x: jax.Array, size: int) -> Blocks:
    """Round a matrix [M, K] of floats in blocks of `size` numbers along K, which `size` divides."""
    rows, channels = x.shape
    return _round(x, (rows, 1, channels // size, size))


def round_square_blocks(x: jax.Array, size: int) -> Blocks:
    """Round a matrix of floats in blocks of size x size numbers."""
    rows, channels = x.shape
    return _round(x, (rows // size, size, channels // size, size))


def _round(x: jax.Array, shape: tuple[int, int, int, int]) -> Blocks:
    """Round a matrix in blocks, given its shape (rows of blocks, rows of a block, columns of blocks, ...)."""
    blocks = x.astype(jnp.float32).reshape(shape)
    magnitude = jnp.max(jnp.abs(blocks), axis=(1, 3))
    scales, factor = _find_scales(jax.lax.bitcast_convert_type(magnitude, jnp.int32))
    # A factor for each block, because XLA for GPU writes what is computed for each number before a transposition.
    values = blocks * jnp.where(jnp.isfinite(magnitude), factor, jnp.nan)[:, None, :, None]
    return Blocks(_to_bits(values.reshape(x.shape).astype(jnp.float8_e4m3fn)), scales.astype(jnp.uint8))


def _find_scales(magnitude_bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the bits of e8m0 scales as int32, the float32 inverses of these scales).

    Args:
        magnitude_bits: bits of the largest magnitudes of blocks, in float32, as int32. This is exact, unlike a
            division by 448 on GPUs.
    """
    mantissa = magnitude_bits & ((1 << _MANTISSA_BITS) - 1)
    exponent = (magnitude_bits >> _MANTISSA_BITS) - _LARGEST_EXPONENT
    exponent += (mantissa > _LARGEST_MANTISSA).astype(jnp.int32)
    # Neither the scale nor its inverse may be a subnormal number, which GPUs replace by zero.
    scales = jnp.where(magnitude_bits == 0, _BIAS, jnp.maximum(exponent, 1))
    is_finite = magnitude_bits < _NAN_SCALE << _MANTISSA_BITS
    scales = jnp.where(is_finite, scales, _NAN_SCALE)
    inverse_bits = jnp.where(is_finite, 2 * _BIAS - scales, _BIAS) << _MANTISSA_BITS
    return scales, jax.lax.bitcast_convert_type(inverse_bits, jnp.float32)


def _to_bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint8)


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
    values_MK, scales_BM, values_KM, scales_BK = pl.pallas_call(
        _round_tile_along_both_axes,
        out_shape=shapes,
        grid=(columns // TILE, rows // TILE),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="fp8_block_rounding",
    )(x_MK)
    return Blocks(_to_bits(values_MK), scales_BM.T), Blocks(_to_bits(values_KM), scales_BK.T)


def round_square_tiles(x_MK: jax.Array, transpose: bool, interpret: bool = False) -> Blocks:
    """Return x, or its transpose [K, M], rounded in blocks of 128 x 128 numbers, on a GPU.

    Args:
        x_MK, interpret: see `round_along_both_axes`.
        transpose: whether to return the transpose.
    """
    rows, columns = x_MK.shape
    check_size(x_MK.size)
    grid = (columns // TILE, rows // TILE)
    values, scales = pl.pallas_call(
        partial(_round_square_tile, transpose=transpose),
        out_shape=(
            jax.ShapeDtypeStruct((columns, rows) if transpose else (rows, columns), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(grid if transpose else grid[::-1], jnp.uint8),
        ),
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="fp8_block_rounding",
    )(x_MK)
    return Blocks(_to_bits(values), scales)


def _round_tile_along_both_axes(
    x_ref: jax.Ref, values_MK_ref: jax.Ref, scales_BM_ref: jax.Ref, values_KM_ref: jax.Ref, scales_BK_ref: jax.Ref
) -> None:
    column_tile, row_tile = pl.program_id(0), pl.program_id(1)
    rows = pl.ds(row_tile * TILE, TILE)
    columns = pl.ds(column_tile * TILE, TILE)
    x = plgpu.load(x_ref.at[rows, columns]).astype(jnp.float32)
    magnitude_bits = _find_magnitude_bits(x)
    scales, factor = _find_scales(jnp.max(magnitude_bits, axis=1))
    plgpu.store(values_MK_ref.at[rows, columns], (x * factor[:, None]).astype(jnp.float8_e4m3fn))
    plgpu.store(scales_BM_ref.at[column_tile, rows], scales.astype(jnp.uint8))
    scales, factor = _find_scales(jnp.max(magnitude_bits, axis=0))
    plgpu.store(values_KM_ref.at[columns, rows], (x * factor[None, :]).astype(jnp.float8_e4m3fn).T)
    plgpu.store(scales_BK_ref.at[row_tile, columns], scales.astype(jnp.uint8))


def _round_square_tile(x_ref: jax.Ref, values_ref: jax.Ref, scales_ref: jax.Ref, *, transpose: bool) -> None:
    column_tile, row_tile = pl.program_id(0), pl.program_id(1)
    rows = pl.ds(row_tile * TILE, TILE)
    columns = pl.ds(column_tile * TILE, TILE)
    x = plgpu.load(x_ref.at[rows, columns]).astype(jnp.float32)
    magnitude_bits = _find_magnitude_bits(x)
    scale, factor = _find_scales(jnp.max(jnp.max(magnitude_bits, axis=1), axis=0))
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
