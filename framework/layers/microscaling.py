"""Matrix products of 8-bit floats with a scale for each block of 32 numbers: the recipe `mxfp8` of `model.precision`.

The format is MXFP8 of the OCP Microscaling Formats (MX) specification 1.0: numbers are e4m3, scales e8m0, which are
powers of two. A scale is the smallest for which no number of its block exceeds 448. Blocks lie along the axis that a
product sums over, so each array is rounded once for each product that it is a factor of:

    y = x W: x and W along inputs      dx = g W^T: g and W along outputs      dW = x^T g: x and g along tokens

For the backward pass, x rounded along tokens is saved. Blackwell's tensor cores compute these products
(`jax.nn.scaled_matmul`); a CPU computes them in float32 from the rounded numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from plimsoll.framework.layers.custom_gradients import dense_cotangent

BLOCK = 32
_LARGEST = 448.0
# Exponents of e8m0.
_LEAST_EXPONENT, _MOST_EXPONENT = -127, 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """A matrix of 8-bit numbers, as its bits, so that JAX may save it: see `low_precision._tag_bits`.

    Attributes:
        values: uint8[M, K], the bits of e4m3 numbers.
        scales: uint8[M, K / 32], the bits of e8m0 scales of blocks along K.
    """

    values: jax.Array
    scales: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockInput:
    """An input of T tokens, rounded for the products that it is a factor of.

    Attributes:
        by_token: [T, I], for y.
        by_channel: [I, T], for the weight's gradient; None if T is not a multiple of 32, as in generation.
    """

    by_token: Blocks
    by_channel: Blocks | None


def round_blocks(x: jax.Array) -> Blocks:
    """Round a matrix [M, K] of floats in blocks along K, a multiple of 32."""
    rows, channels = x.shape
    blocks = x.astype(jnp.float32).reshape(rows, channels // BLOCK, BLOCK)
    magnitude = jnp.max(jnp.abs(blocks), axis=-1)
    mantissa, exponent = jnp.frexp(magnitude / _LARGEST)
    exponent = jnp.clip(jnp.where(mantissa == 0.5, exponent - 1, exponent), _LEAST_EXPONENT, _MOST_EXPONENT)
    # The scale of zeros is 1.
    exponent = jnp.where(magnitude == 0, 0, exponent)
    # A number that is not finite makes its block NaN: it must reach the loss, where the run notices it. This is a
    # factor for each block, because XLA for GPU writes what is computed for each number before a transposition.
    factor = jnp.where(jnp.isfinite(magnitude), jnp.ldexp(jnp.float32(1), -exponent), jnp.nan)
    values = jnp.clip(blocks * factor[..., None], -_LARGEST, _LARGEST)
    bits = jax.lax.bitcast_convert_type(values.reshape(x.shape).astype(jnp.float8_e4m3fn), jnp.uint8)
    return Blocks(bits, (exponent - _LEAST_EXPONENT).astype(jnp.uint8))


def round_input(x: jax.Array) -> BlockInput:
    """Round an input [..., I] for its products. It has no gradient: that passes by x itself."""
    x_TI = jax.lax.stop_gradient(x).reshape(-1, x.shape[-1])
    if x_TI.shape[0] % BLOCK:
        return BlockInput(round_blocks(x_TI), None)
    by_channel = jax.tree.map(lambda bits: checkpoint_name(bits, "rounded"), round_blocks(x_TI.T))
    return BlockInput(round_blocks(x_TI), by_channel)


def multiply_blocks(x: jax.Array, rounded: BlockInput, weight: jax.Array, platform: str) -> jax.Array:
    """Return x [..., I] @ weight [I, O] in x's dtype.

    Args:
        x: activations, which `rounded` replaces; it gets their gradient.
        rounded: the result of `round_input`.
        weight: weights.
        platform: gpu, of Blackwell, or cpu.
    """
    return _multiply(x, rounded, weight, platform)


def _dot(left: Blocks, right: Blocks, dtype: jnp.dtype, platform: str) -> jax.Array:
    """Return left [M, K] @ right [N, K]^T."""
    factors = []
    for blocks in (left, right):
        values = jax.lax.bitcast_convert_type(blocks.values, jnp.float8_e4m3fn)
        scales = jax.lax.bitcast_convert_type(blocks.scales, jnp.float8_e8m0fnu)
        factors.append((values, scales))
    (left_values, left_scales), (right_values, right_scales) = factors
    if platform == "gpu":
        # Its operands have a batch axis.
        arrays = (array[None] for array in (left_values, right_values, left_scales, right_scales))
        return jax.nn.scaled_matmul(*arrays, preferred_element_type=dtype)[0]
    wide = [
        values.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), BLOCK, axis=-1)
        for values, scales in factors
    ]
    return jnp.einsum("mk,nk->mn", *wide).astype(dtype)


def _plain(x: jax.Array, rounded: BlockInput, weight: jax.Array, platform: str) -> jax.Array:
    y_TO = _dot(rounded.by_token, round_blocks(weight.T), x.dtype, platform)
    return y_TO.reshape(*x.shape[:-1], weight.shape[1])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """Residuals of the product: a frozen weight needs no input, an input without a gradient no weight."""

    x: Blocks | None
    weight: jax.Array | None


def _forward(
    x: CustomVJPPrimal, rounded: BlockInput, weight: CustomVJPPrimal, platform: str
) -> tuple[jax.Array, _Residuals]:
    # With symbolic_zeros, each array is replaced by its value and a flag that tells whether it is differentiated.
    values: BlockInput = jax.tree.map(lambda primal: primal.value, rounded)
    if weight.perturbed and values.by_channel is None:
        tokens = values.by_token.values.shape[0]
        raise ValueError(f"mxfp8 needs a multiple of {BLOCK} tokens in a microbatch, given {tokens}")
    y = _plain(x.value, values, weight.value, platform)
    return y, _Residuals(
        x=values.by_channel if weight.perturbed else None, weight=weight.value if x.perturbed else None
    )


def _backward(
    platform: str, residuals: _Residuals, y_grad: jax.Array | SymbolicZero
) -> tuple[jax.Array | None, None, jax.Array | None]:
    grad = dense_cotangent(y_grad)
    grad_TO = grad.reshape(-1, grad.shape[-1])
    x_grad = None
    weight_grad = None
    if residuals.weight is not None:
        product_TI = _dot(round_blocks(grad_TO), round_blocks(residuals.weight), grad.dtype, platform)
        x_grad = product_TI.reshape(*grad.shape[:-1], -1)
    if residuals.x is not None:
        weight_grad = _dot(residuals.x, round_blocks(grad_TO.T), grad.dtype, platform)
    return x_grad, None, weight_grad


_multiply = jax.custom_vjp(_plain, nondiff_argnums=(3,))
_multiply.defvjp(_forward, _backward, symbolic_zeros=True)
