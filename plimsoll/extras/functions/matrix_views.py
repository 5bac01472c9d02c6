"""Operations allowed on a matrix with an adapter before it is multiplied: casts, transpositions, reshapes, slices.

Each is applied to W and to both factors, which have W's axes (`factored.py`). Imports jax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from plimsoll.extras.functions.factored import FactoredMatrix, result_type
from plimsoll.extras.functions.nf4 import QuantizedMatrix

source_info_util.register_exclusion(__file__)


def apply_view(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    """Return the result of an operation on a matrix; None if the result has no factored form.

    Args:
        matrix: the operation's first operand.
        equation: the operation.
        operands: its other operands, such as the start indices of a slice.
    """
    rule = _RULES.get(equation.primitive.name)
    return rule(matrix, equation, operands) if rule is not None else None


def _apply_to_weight(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    """Apply the operation to W itself; None if W is stored in 4 bits and the operation has computed operands."""

    def view(weight: jax.Array) -> jax.Array:
        return equation.primitive.bind(weight, *operands, **equation.params)

    if not isinstance(matrix.weight, QuantizedMatrix):
        return view(matrix.weight)
    return None if operands else matrix.weight.apply_view(view)


def _same_factors(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    return matrix.transform(_apply_to_weight(matrix, equation, operands), lambda factor: factor)


def _cast(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    dtype = equation.params["new_dtype"]
    # A cast to integers or to fewer than 16 bits rounds on purpose: the product is then not a sum of products.
    if not jnp.issubdtype(dtype, jnp.inexact) or jnp.dtype(dtype).itemsize < 2:
        return None
    # Factors keep their dtype until they are multiplied.
    return _same_factors(matrix, equation, operands)


def _stop_gradient(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    return matrix.transform(_apply_to_weight(matrix, equation, operands), lax.stop_gradient)


def _transpose(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    permutation = equation.params["permutation"]
    rank_axis = len(permutation)
    weight = _apply_to_weight(matrix, equation, operands)
    return matrix.transform(weight, lambda factor: lax.transpose(factor, (*permutation, rank_axis)))


def _squeeze(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    axes = equation.params["dimensions"]

    def squeeze(array: jax.Array) -> jax.Array:
        return lax.squeeze(array, axes)

    weight = matrix.weight
    if isinstance(weight, QuantizedMatrix) and all(axis < weight.num_stack_axes for axis in axes):
        return matrix.transform(weight.slice_stack(squeeze), squeeze)
    return matrix.transform(_apply_to_weight(matrix, equation, operands), squeeze)


def _broadcast(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    axes = equation.params["broadcast_dimensions"]
    num_axes = len(equation.params["shape"])

    def spread(factor: jax.Array) -> jax.Array:
        # All matrices along the new axes are the same, so the factors have size 1 there.
        shape = [1] * num_axes
        for axis, size in zip(axes, factor.shape, strict=False):
            shape[axis] = size
        return factor.reshape(*shape, factor.shape[-1])

    return matrix.transform(_apply_to_weight(matrix, equation, operands), spread)


def _slice(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    """Slice a matrix at constant starts, or at computed ones, which are the operands."""
    shape = matrix.shape
    sizes = result_type(equation).shape

    def is_full(array: jax.Array, axis: int) -> bool:
        # Along this axis, a factor has size 1, or the codes of a quantized matrix are shorter than the matrix.
        return array.shape[axis] != shape[axis]

    def take_slice(array: jax.Array) -> jax.Array:
        if equation.primitive.name == "dynamic_slice":
            further_sizes = array.shape[len(shape) :]
            zero = jnp.zeros_like(operands[0])
            starts = [zero if is_full(array, axis) else start for axis, start in enumerate(operands)]
            slice_sizes = [array.shape[axis] if is_full(array, axis) else size for axis, size in enumerate(sizes)]
            return lax.dynamic_slice(array, (*starts, *[zero] * len(further_sizes)), (*slice_sizes, *further_sizes))
        starts = equation.params["start_indices"]
        limits = equation.params["limit_indices"]
        strides = equation.params["strides"] or [1] * len(shape)
        slices = map(slice, starts, limits, strides)
        return array[tuple(slice(None) if is_full(array, axis) else one for axis, one in enumerate(slices))]

    weight = matrix.weight
    if not isinstance(weight, QuantizedMatrix):
        return matrix.transform(_apply_to_weight(matrix, equation, operands), take_slice)
    sliced_axes = [axis for axis, size in enumerate(shape) if sizes[axis] != size]
    if any(axis >= weight.num_stack_axes for axis in sliced_axes):
        return None
    return matrix.transform(weight.slice_stack(take_slice), take_slice)


def split_matrix(matrix: FactoredMatrix, equation: JaxprEqn) -> list[FactoredMatrix]:
    """Return the parts into which `jnp.split` cuts a matrix, along one of its sides or along a stack."""
    axis = equation.params["axis"]
    size = matrix.shape[axis]

    def take_part(number: int) -> FactoredMatrix:
        def take_slice(array: jax.Array) -> jax.Array:
            # A factor of the other side is the same for all parts.
            return lax.split(array, equation.params["sizes"], axis)[number] if array.shape[axis] == size else array

        weight = matrix.weight
        is_stored = isinstance(weight, QuantizedMatrix)
        return matrix.transform(weight.apply_view(take_slice) if is_stored else take_slice(weight), take_slice)

    return [take_part(number) for number in range(len(equation.outvars))]


def _reshape(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    groups = _group_axes(matrix.shape, equation.params["new_sizes"])
    factors = [factor for factor in (matrix.left, matrix.right) if factor is not None]
    # Merging axes of both sides into one would make a factor as large as the matrix.
    if not all(_is_full_or_single(factor, matrix.shape, group) for factor in factors for group in groups):
        return None

    def reshape(factor: jax.Array) -> jax.Array:
        new_shape: list[int] = []
        for group in groups:
            size = math.prod(factor.shape[axis] for axis in group.old_axes)
            new_shape += group.new_sizes if size > 1 else [1] * len(group.new_sizes)
        return factor.reshape(*new_shape, factor.shape[-1])

    return matrix.transform(_apply_to_weight(matrix, equation, operands), reshape)


class _AxisGroup(NamedTuple):
    """Neighboring axes, and the sizes of the axes that a reshape turns them into."""

    old_axes: list[int]
    new_sizes: list[int]


def _group_axes(old_shape: Sequence[int], new_shape: Sequence[int]) -> list[_AxisGroup]:
    """Return the smallest groups of neighboring axes that a reshape keeps in order."""
    groups = []
    old_axis = 0
    new_axis = 0
    while old_axis < len(old_shape) or new_axis < len(new_shape):
        group = _AxisGroup([], [])
        old_size = 1
        new_size = 1
        # Takes the first axis of each, then one more of the smaller side until both have as many elements.
        while not (group.old_axes or group.new_sizes) or old_size != new_size:
            takes_old = old_axis < len(old_shape) and (old_size <= new_size or new_axis == len(new_shape))
            if takes_old:
                group.old_axes.append(old_axis)
                old_size *= old_shape[old_axis]
                old_axis += 1
            else:
                group.new_sizes.append(new_shape[new_axis])
                new_size *= new_shape[new_axis]
                new_axis += 1
        groups.append(group)
    return groups


def _is_full_or_single(factor: jax.Array, shape: Sequence[int], group: _AxisGroup) -> bool:
    """Return whether a factor has either all elements of a group of W's axes, or a single one."""
    size = math.prod(factor.shape[axis] for axis in group.old_axes)
    return size in (1, math.prod(shape[axis] for axis in group.old_axes))


def _scale(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[Any]) -> FactoredMatrix | None:
    """Multiply or divide W by a single number."""
    (number,) = operands
    if jnp.ndim(number) or isinstance(matrix.weight, QuantizedMatrix):
        return None
    weight = equation.primitive.bind(matrix.weight, number, **equation.params)
    if matrix.left is None:
        return None
    left = equation.primitive.bind(matrix.left, jnp.asarray(number, matrix.left.dtype), **equation.params)
    return FactoredMatrix(matrix.path, weight, left, matrix.right, matrix.scale)


_Rule = Callable[[FactoredMatrix, JaxprEqn, Sequence[Any]], FactoredMatrix | None]
# {primitive: function that applies it to a matrix that is its first operand}
_RULES: dict[str, _Rule] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _cast,
    "copy": _same_factors,
    "copy_p": _same_factors,
    "div": _scale,
    "dynamic_slice": _slice,
    "mul": _scale,
    "name": _same_factors,
    "reshape": _reshape,
    "sharding_constraint": _same_factors,
    "slice": _slice,
    "squeeze": _squeeze,
    "stop_gradient": _stop_gradient,
    "transpose": _transpose,
}
