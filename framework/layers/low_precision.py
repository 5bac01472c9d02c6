"""Matrix products of 8-bit numbers: the recipes of `model.precision`.

    y = x W:     y_to = s_t s_o sum_i x8_ti w8_io,     x8_ti = round(x_ti / s_t),     w8_io = round(w_io / s_o)

A scale s maps the largest magnitude that it covers to the largest number of the format:

    recipe       x and W              cotangents           a scale covers
    fp8_tensor   e4m3 (largest 448)   e5m2 (57344)         a whole array; it is a power of two
    fp8_delayed  e4m3                 e5m2                 the same, from earlier steps, see `scale_history`
    fp8_row      e4m3                 e5m2                 a vector along the summed axis: a token of x, an output of W
    int8_row     int8 (127)           int8, rounded        the same
                                      stochastically
    mxfp8        e4m3                 e4m3                 32 numbers along the summed axis, see `block_scaling`
    fp8_block    e4m3                 e4m3                 128 numbers along it, or 128 x 128 of W, see there

The formats are those of Micikevicius et al. 2022 (arXiv 2209.05433). Scales are computed from the arrays themselves
("current scaling"), in float32; those of weights also with `fp8_delayed`. The products of the backward pass, for the
cotangent g of y, use the same x8 and w8. Scales along the axis that a product sums over are multiplied into g before it
is rounded:

    dx_ti = s'_t sum_o round(g_to s_o / s'_t) w8_io,        dW_io = s''_o sum_t x8_ti round(g_to s_t / s''_o)

For the backward pass, x8 and its scales are saved instead of x, once for all layers that share an x (`RoundedInputs`),
and W is rounded again. Sums are in float32, or int32 for int8; the scaled results have the dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from plimsoll.framework.layers.block_scaling import (
    FP8_BLOCK,
    MXFP8,
    BlockInput,
    BlockOptions,
    BlockScaling,
    Partition,
    multiply_blocks,
    round_input,
)
from plimsoll.framework.layers.custom_gradients import dense_cotangent
from plimsoll.framework.layers.scale_history import pack_scales, read_scales

RecipeName = Literal["fp8_tensor", "fp8_delayed", "fp8_row", "int8_row", "mxfp8", "fp8_block"]
# Axes of an array that a scale covers; None means all.
Axes = tuple[int, ...] | None
# The contracted and the batch axes of a product, see `jax.lax.dot_general`.
Dimensions = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Recipe:
    """The formats and scales of a product.

    Attributes:
        forward: dtype of activations and weights.
        backward: dtype of cotangents.
        by_row: whether each row has a scale, not the whole array, whose scale is a power of two.
        stochastic: whether cotangents are rounded stochastically.
        blocks: the blocks whose numbers share a scale; None for recipes without blocks.
        delayed: whether scales of inputs and cotangents come from earlier steps, see `framework.layers.scale_history`.
    """

    forward: str
    backward: str
    by_row: bool
    stochastic: bool = False
    blocks: BlockScaling | None = None
    delayed: bool = False

    @property
    def is_idempotent(self) -> bool:
        """True if rounding a rounded weight again changes nothing, because the scale is a power of two."""
        return not self.by_row and self.blocks is None


RECIPES: dict[RecipeName, Recipe] = {
    "fp8_tensor": Recipe("float8_e4m3fn", "float8_e5m2", by_row=False),
    "fp8_delayed": Recipe("float8_e4m3fn", "float8_e5m2", by_row=False, delayed=True),
    "fp8_row": Recipe("float8_e4m3fn", "float8_e5m2", by_row=True),
    "int8_row": Recipe("int8", "int8", by_row=True, stochastic=True),
    "mxfp8": Recipe("float8_e4m3fn", "float8_e4m3fn", by_row=False, blocks=MXFP8),
    "fp8_block": Recipe("float8_e4m3fn", "float8_e4m3fn", by_row=False, blocks=FP8_BLOCK),
}


@dataclass(frozen=True)
class _Options:
    """The static arguments of a product.

    Attributes:
        recipe: formats and scales.
        platform: tpu, gpu or cpu.
    """

    recipe: Recipe
    platform: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """An array of 8-bit numbers.

    Attributes:
        values: the numbers.
        scale: float32, the factor on the numbers; the shape of `values`, with 1 for each axis that a scale covers.
        current_scale: with delayed scaling, the scale that the array needs, a float32 scalar; else None.
    """

    values: jax.Array
    scale: jax.Array
    current_scale: jax.Array | None = None


def fit_scale(x: jax.Array, dtype: DTypeLike, axes: Axes) -> jax.Array:
    """Return the scale that maps the largest magnitude along `axes` to the largest number of a format, float32.

    Args:
        x: array of floats.
        dtype: int8, float8_e4m3fn or float8_e5m2.
        axes: axes that a scale covers, which become 1. None for all; the scale is then the next power of two, which
            bfloat16 represents exactly.
    """
    largest = _get_largest(dtype)
    magnitude = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes, keepdims=True)
    # The scale of zeros is 1, and that of tiny numbers must not be a subnormal, whose inverse is infinite.
    scale = jnp.where(magnitude == 0, 1.0, jnp.maximum(magnitude / largest, jnp.finfo(jnp.float32).tiny))
    if axes is None:
        mantissa, exponent = jnp.frexp(scale)
        power = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
        # An array that is not finite stays so.
        scale = jnp.where(jnp.isfinite(scale), power, scale)
    return scale


def _get_largest(dtype: DTypeLike) -> float:
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def round_to(x: jax.Array, dtype: DTypeLike, axes: Axes, key: jax.Array | None = None) -> Rounded:
    """Round an array to 8-bit numbers with a scale for each vector along `axes`.

    Args:
        x, dtype, axes: see `fit_scale`.
        key: key for stochastic rounding, of int8; None rounds to the nearest number, ties to even.
    """
    scale = fit_scale(x, dtype, axes)
    # Conversion to float8 does not saturate, and the quotient may exceed the largest number by a rounding error.
    largest = _get_largest(dtype)
    quotient = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest)
    if not jnp.issubdtype(dtype, jnp.integer):
        return Rounded(quotient.astype(dtype), scale)
    if key is None:
        return Rounded(jnp.round(quotient).astype(dtype), scale)
    # Eight bits of noise: the expected value is exact to 2^-9 of a step.
    noise = (jax.random.bits(key, x.shape, jnp.uint8).astype(jnp.float32) + 0.5) / 256
    return Rounded(jnp.floor(quotient + noise).astype(dtype), scale)


def _round_delayed(x: jax.Array, dtype: DTypeLike, scale: jax.Array) -> Rounded:
    """Round an array to float8 numbers with a scalar scale of earlier steps."""
    largest = _get_largest(dtype)
    wide = x.astype(jnp.float32)
    # Clipping would hide a number that is not finite from the loss.
    quotient = jnp.where(jnp.isfinite(wide), jnp.clip(wide / scale, -largest, largest), jnp.nan)
    scale = scale.reshape((1,) * x.ndim)
    return Rounded(quotient.astype(dtype), scale, fit_scale(x, dtype, None).reshape(()))


class RoundedInputs:
    """The rounded inputs of the layers that run in a function, so that those with the same input round it once.

    It holds traced arrays, so it must not outlive the function.
    """

    def __init__(self) -> None:
        # With the input itself, whose id could belong to another one otherwise.
        self._rounded: dict[tuple[Any, ...], tuple[jax.Array, Rounded | BlockInput]] = {}

    def round(
        self,
        x: jax.Array,
        recipe: Recipe,
        platform: str,
        history: jax.Array | None = None,
        partition: Partition | None = None,
    ) -> Rounded | BlockInput:
        """Return the rounded input; a Rounded is the result of `_tag_bits`."""
        key = (id(x), recipe, None if partition is None else partition.inputs)
        if key not in self._rounded:
            # Layers that always have the same input have the same history of it.
            self._rounded[key] = (x, _round_input(x, recipe, platform, history, partition))
        return self._rounded[key][1]


def multiply(
    x: jax.Array,
    weight: jax.Array,
    key: jax.Array | None,
    recipe: Recipe,
    platform: str,
    rounded_inputs: RoundedInputs | None = None,
    history: jax.Array | None = None,
    partition: Partition | None = None,
) -> jax.Array:
    """Return x [..., I] @ weight [I, O] in x's dtype, as a product of 8-bit numbers.

    Args:
        x: activations, with at least two axes.
        weight: weights in x's dtype.
        key: key for stochastic rounding in the backward pass; None rounds to the nearest number.
        recipe: formats and scales.
        platform: tpu, gpu or cpu.
        rounded_inputs: inputs that were rounded for other products of the same function; None shares none.
        history: the layer's history of scales, for delayed scaling; its gradient is the scales that this step needs.
        partition: the devices that share a product of `BlockScaling.in_shards`; None for one.
    """
    rounded = (rounded_inputs or RoundedInputs()).round(x, recipe, platform, history, partition)
    if isinstance(rounded, BlockInput):
        assert recipe.blocks is not None
        return multiply_blocks(x, rounded, weight, BlockOptions(recipe.blocks, platform, partition))
    return _multiply(x, rounded, weight, key, history, _Options(recipe, platform))


def _round_input(
    x: jax.Array, recipe: Recipe, platform: str, history: jax.Array | None, partition: Partition | None
) -> Rounded | BlockInput:
    if recipe.blocks is not None:
        return round_input(x, BlockOptions(recipe.blocks, platform, partition))
    # Its cotangent is that of x, see `_backward`.
    x = jax.lax.stop_gradient(x)
    if recipe.delayed:
        assert history is not None, "delayed scaling needs a history"
        scale, _ = read_scales(jax.lax.stop_gradient(history))
        return _tag_bits(_round_delayed(x, recipe.forward, scale))
    return _tag_bits(round_to(x, recipe.forward, (x.ndim - 1,) if recipe.by_row else None))


def round_and_restore(weight: jax.Array, constrain_bits: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Round a weight as the recipe fp8_tensor does, and return the rounded numbers in its dtype; not differentiable.

    Args:
        weight: weight in bfloat16 or wider, which represent the rounded numbers exactly.
        constrain_bits: moves the bits of the 8-bit numbers, uint8, to the devices that need them.
    """
    rounded = round_to(weight, RECIPES["fp8_tensor"].forward, None)
    bits = constrain_bits(jax.lax.bitcast_convert_type(rounded.values, jnp.uint8))
    values = jax.lax.bitcast_convert_type(bits, rounded.values.dtype)
    return values.astype(weight.dtype) * rounded.scale.astype(weight.dtype)


def multiply_rounded(
    left: jax.Array,
    right: jax.Array,
    dimensions: Dimensions,
    scale: jax.Array,
    dtype: DTypeLike,
    recipe: Recipe,
    platform: str,
    *,
    fast: bool = False,
) -> jax.Array:
    """Multiply 8-bit numbers, and scale the result; not differentiable.

    Args:
        left, right: the numbers.
        dimensions: see `jax.lax.dot_general`.
        scale: float32, the factor on the result.
        dtype: dtype of the result.
        recipe: formats and scales.
        platform: tpu, gpu or cpu.
        fast: sum in the tensor cores of a GPU with fewer bits, as usual in the forward pass.
    """
    return _scale(_dot(left, right, dimensions, dtype, _Options(recipe, platform), fast), scale, dtype)


def _compute(x: Rounded, weight: Rounded, dtype: DTypeLike, options: _Options) -> jax.Array:
    over_inputs = (((x.values.ndim - 1,), (0,)), ((), ()))
    y = _dot(x.values, weight.values, over_inputs, dtype, options, fast=True)
    return _scale(y, x.scale * weight.scale.reshape(-1), dtype)


def _dot(
    left: jax.Array, right: jax.Array, dimensions: Dimensions, dtype: DTypeLike, options: _Options, fast: bool = False
) -> jax.Array:
    """Multiply 8-bit numbers. The result is int32 for int8, float32 on TPU and CPU, and else `dtype`.

    Args:
        left, right: the numbers.
        dimensions: see `jax.lax.dot_general`.
        dtype: dtype of the result of float8 numbers; float32 instead of float16.
        options: how the product is computed.
        fast: sum in the tensor cores of a GPU with fewer bits, as usual in the forward pass.
    """
    if jnp.issubdtype(left.dtype, jnp.integer):
        return jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.int32)
    if options.platform != "gpu":
        return jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
    # The unscaled sums may exceed the largest float16.
    dtype = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
    # Without an algorithm, XLA for GPU chooses Triton kernels that convert some of these operands to float16.
    algorithm = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
    if fast:
        algorithm = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    return jax.lax.dot_general(left, right, dimensions, precision=algorithm, preferred_element_type=dtype)


def _scale(y: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    # In this dtype, a scalar becomes an argument of cuBLAS; float32 would need another pass over the product. It is a
    # power of two, so nothing is rounded.
    if y.dtype == dtype and scale.size == 1:
        return y * scale.reshape(()).astype(dtype)
    return (y.astype(jnp.float32) * scale).astype(dtype)


def _round_weight(weight: jax.Array, recipe: Recipe) -> Rounded:
    # Otherwise XLA for GPU stores the transposed weights of all layers of a loop in addition to the weights.
    weight = with_layout_constraint(weight, Layout(major_to_minor=(0, 1)))
    return round_to(weight, recipe.forward, (0,) if recipe.by_row else None)


def _tag_bits(rounded: Rounded) -> Rounded:
    """Return the bits of the numbers, uint8, under a name, in the form in which the backward pass may find them.

    `memory.remat = none` saves what has a name, but recomputes conversions from their operands, here in float32. JAX
    passes saved floats through `reduce_precision`, which takes e4m3 for a format with infinities and turns all numbers
    above 240 into NaN, so bits are saved.
    """
    bits = jax.lax.bitcast_convert_type(rounded.values, jnp.uint8)
    return replace(rounded, values=checkpoint_name(bits, "rounded"))


def _read_bits(tagged: Rounded, recipe: Recipe) -> Rounded:
    """Inverse of `_tag_bits`."""
    return replace(tagged, values=jax.lax.bitcast_convert_type(tagged.values, recipe.forward))


def _plain(
    x: jax.Array,
    tagged: Rounded,
    weight: jax.Array,
    key: jax.Array | None,
    history: jax.Array | None,
    options: _Options,
) -> jax.Array:
    rounded_weight = _round_weight(weight, options.recipe)
    return _compute(_read_bits(tagged, options.recipe), rounded_weight, x.dtype, options)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """Residuals of the product: a frozen weight needs no input, an input without a gradient no weight.

    The input is the result of `_tag_bits`. The other two are the scale of the cotangent, with delayed scaling, and the
    one that the input needs, if the history is to record it.
    """

    x: Rounded | None
    weight: jax.Array | None
    key: jax.Array | None
    grad_scale: jax.Array | None
    x_scale: jax.Array | None


def _forward(
    x: CustomVJPPrimal,
    tagged: Rounded,
    weight: CustomVJPPrimal,
    key: CustomVJPPrimal | None,
    history: CustomVJPPrimal | None,
    options: _Options,
) -> tuple[jax.Array, _Residuals]:
    # With symbolic_zeros, each array is replaced by its value and a flag that tells whether it is differentiated.
    tagged_x: Rounded = jax.tree.map(lambda primal: primal.value, tagged)
    y = _plain(x.value, tagged_x, weight.value, None, None, options)
    return y, _Residuals(
        x=replace(tagged_x, current_scale=None) if weight.perturbed else None,
        weight=weight.value if x.perturbed else None,
        key=None if key is None else key.value,
        grad_scale=None if history is None else read_scales(history.value)[1],
        x_scale=tagged_x.current_scale if history is not None and history.perturbed else None,
    )


def _backward(
    options: _Options, residuals: _Residuals, y_grad: jax.Array | SymbolicZero
) -> tuple[jax.Array | None, None, jax.Array | None, np.ndarray | None, jax.Array | None]:
    recipe = options.recipe
    grad = dense_cotangent(y_grad)
    last = grad.ndim - 1
    tokens = tuple(range(last))
    keys: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if recipe.stochastic and residuals.key is not None:
        first_key, second_key = jax.random.split(residuals.key)
        keys = (first_key, second_key)
    x_grad = None
    weight_grad = None
    shared = None
    if residuals.grad_scale is not None:
        shared = _round_delayed(grad, recipe.backward, residuals.grad_scale)
    elif not recipe.by_row:
        shared = round_to(grad, recipe.backward, None)
    if residuals.weight is not None:
        weight = _round_weight(residuals.weight, recipe)
        rounded = shared or round_to(grad * weight.scale.reshape(-1), recipe.backward, (last,), keys[0])
        over_outputs = (((last,), (1,)), ((), ()))
        product = _dot(rounded.values, weight.values, over_outputs, grad.dtype, options)
        scale = rounded.scale * weight.scale if shared else rounded.scale
        x_grad = _scale(product, scale.reshape((1,) * grad.ndim) if shared else scale, grad.dtype)
    if residuals.x is not None:
        x = _read_bits(residuals.x, recipe)
        rounded = shared or round_to(grad * x.scale, recipe.backward, tokens, keys[1])
        over_tokens = ((tokens, tokens), ((), ()))
        product = _dot(x.values, rounded.values, over_tokens, grad.dtype, options)
        scale = rounded.scale * x.scale if shared else rounded.scale
        weight_grad = _scale(product, scale.reshape(-1), grad.dtype)
    key_grad = None if residuals.key is None else np.zeros(residuals.key.shape, jax.dtypes.float0)
    history_grad = None
    if residuals.x_scale is not None:
        assert shared is not None
        assert shared.current_scale is not None
        history_grad = pack_scales(residuals.x_scale, shared.current_scale)
    return x_grad, None, weight_grad, key_grad, history_grad


_multiply = jax.custom_vjp(_plain, nondiff_argnums=(5,))
_multiply.defvjp(_forward, _backward, symbolic_zeros=True)
