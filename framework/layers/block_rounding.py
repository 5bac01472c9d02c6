"""Rounds matrices to 8-bit floats (e4m3) with a scale for each block of numbers.

Scales are powers of two: the smallest for which no number of a block exceeds 448. The scale of zeros is 1. In blocks
with a number that is not finite, all numbers become NaN: they must reach the loss, where the run notices them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

# The name of our kernel for products in traced and compiled programs.
PRODUCT_KERNEL = "fp8_block_product"
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
    scales, factor = find_scales(jax.lax.bitcast_convert_type(magnitude, jnp.int32))
    # A factor for each block, because XLA for GPU writes what is computed for each number before a transposition.
    values = blocks * jnp.where(jnp.isfinite(magnitude), factor, jnp.nan)[:, None, :, None]
    return Blocks(to_bits(values.reshape(x.shape).astype(jnp.float8_e4m3fn)), scales.astype(jnp.uint8))


def find_scales(magnitude_bits: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def to_bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint8)
