"""Factored form of a matrix with an adapter, as a program transforms it, and the products with it.

W + scale * A B is stored as three arrays. The two factors broadcast against W and have one more axis, the rank, at the
end: for W [*stack, in, out] they are [*stack, in, 1, rank] and [*stack, 1, out, rank]. So an operation that moves the
axes of W moves theirs in the same way, on either side of the matrix. A product is x W + scale * (x A) B: no second
array of W's size is allocated, neither here nor in what JAX derives from this for the backward pass, where the
gradients of both factors are products with x A and with the cotangent times B.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from plimsoll.extras.functions.lora_adapters import QuantizedMatrix

# Keeps this file out of source locations, so that compiled programs name the user's line.
source_info_util.register_exclusion(__file__)
# Letters for the axes of the operands of an einsum.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"
_RANK = "Z"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("weight", "left", "right"), meta_fields=("path", "scale")
)
@dataclass(frozen=True)
class FactoredMatrix:
    """W + scale * (sum of left * right over the last axis). Without factors it is only W, stored in 4 bits.

    Attributes:
        path: path of W in the parameter tree, for messages.
        weight: W, of any shape.
        left, right: factors with W's axes, some of size 1, and the rank axis. Both are None, or neither is.
        scale: alpha / rank.
    """

    path: str
    weight: jax.Array | QuantizedMatrix
    left: jax.Array | None
    right: jax.Array | None
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of W."""
        return self.weight.shape

    def dense(self) -> jax.Array:
        """Return W + scale * A B, an array of W's shape and dtype."""
        weight = dense_weight(self.weight)
        if self.left is None or self.right is None:
            return weight
        dtype = jnp.promote_types(weight.dtype, jnp.float32)
        letters = LETTERS[: weight.ndim]
        left_letters = long_axes(self.left, letters)
        right_letters = long_axes(self.right, letters)
        product_letters = "".join(letter for letter in letters if letter in left_letters + right_letters)
        product = jnp.einsum(
            f"{left_letters},{right_letters}->{product_letters}",
            without_short_axes(self.left).astype(dtype),
            without_short_axes(self.right).astype(dtype),
        )
        sizes = zip(letters, weight.shape, strict=True)
        product = product.reshape([size if letter in product_letters else 1 for letter, size in sizes])
        return (weight.astype(dtype) + self.scale * product).astype(weight.dtype)

    def transform(self, weight: jax.Array | QuantizedMatrix, move: Callable[[jax.Array], jax.Array]) -> FactoredMatrix:
        """Return a factored matrix with another W and with `move` applied to both factors."""
        left = None if self.left is None else move(self.left)
        right = None if self.right is None else move(self.right)
        return FactoredMatrix(self.path, weight, left, right, self.scale)


# An operand of an operation.
Value = jax.Array | FactoredMatrix


def long_axes(factor: jax.Array, letters: str) -> str:
    """Return the einsum letters of those of W's axes along which a factor is longer than 1, plus that of the rank."""
    axes = zip(letters, factor.shape, strict=False)
    return "".join(letter for letter, size in axes if size > 1) + _RANK


def without_short_axes(factor: jax.Array) -> jax.Array:
    """Return the factor with only the axes that `long_axes` lists."""
    return factor.reshape(*(size for size in factor.shape[:-1] if size > 1), factor.shape[-1])


def dense_weight(weight: jax.Array | QuantizedMatrix) -> jax.Array:
    """Return the frozen matrix as an array."""
    return weight.dense() if isinstance(weight, QuantizedMatrix) else weight


def result_type(equation: JaxprEqn) -> core.ShapedArray:
    """Return the shape and dtype of an operation's only result."""
    return cast(core.ShapedArray, equation.outvars[0].aval)


# --- operations on the matrix before it is multiplied ----------------------------------------------------------------


source_info_util.register_exclusion(__file__)


def apply_view(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    """Return the result of an operation on a matrix; None if the result has no factored form.

    Args:
        matrix: the operation's first operand.
        equation: the operation.
        operands: its other operands, such as the start indices of a slice.
    """
    rule = _RULES.get(equation.primitive.name)
    return rule(matrix, equation, operands) if rule is not None else None


def _apply_to_weight(
    matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]
) -> jax.Array | QuantizedMatrix:
    """Apply the operation to W itself, or, if W is stored in 4 bits, to the result of each dequantization."""

    def view(weight: jax.Array) -> jax.Array:
        return equation.primitive.bind(weight, *operands, **equation.params)

    return matrix.weight.apply_view(view) if isinstance(matrix.weight, QuantizedMatrix) else view(matrix.weight)


def _same_factors(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    return matrix.transform(_apply_to_weight(matrix, equation, operands), lambda factor: factor)


def _cast(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    dtype = equation.params["new_dtype"]
    # A cast to integers or to fewer than 16 bits rounds on purpose: the product is then not a sum of products.
    if not jnp.issubdtype(dtype, jnp.inexact) or jnp.dtype(dtype).itemsize < 2:
        return None
    # Factors keep their dtype until they are multiplied.
    return _same_factors(matrix, equation, operands)


def _stop_gradient(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    return matrix.transform(_apply_to_weight(matrix, equation, operands), lax.stop_gradient)


def _transpose(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    permutation = equation.params["permutation"]
    rank_axis = len(permutation)
    weight = _apply_to_weight(matrix, equation, operands)
    return matrix.transform(weight, lambda factor: lax.transpose(factor, (*permutation, rank_axis)))


def _squeeze(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    axes = equation.params["dimensions"]

    def squeeze(array: jax.Array) -> jax.Array:
        return lax.squeeze(array, axes)

    weight = matrix.weight
    if isinstance(weight, QuantizedMatrix) and all(axis < weight.num_stack_axes for axis in axes):
        return matrix.transform(weight.slice_stack(squeeze), squeeze)
    return matrix.transform(_apply_to_weight(matrix, equation, operands), squeeze)


def _broadcast(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    axes = equation.params["broadcast_dimensions"]
    num_axes = len(equation.params["shape"])

    def spread(factor: jax.Array) -> jax.Array:
        # All matrices along the new axes are the same, so the factors have size 1 there.
        shape = [1] * num_axes
        for axis, size in zip(axes, factor.shape, strict=False):
            shape[axis] = size
        return factor.reshape(*shape, factor.shape[-1])

    return matrix.transform(_apply_to_weight(matrix, equation, operands), spread)


def _slice(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
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


def _reshape(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    groups = _group_axes(matrix.shape, equation.params["new_sizes"])
    factors = [factor for factor in (matrix.left, matrix.right) if factor is not None]
    # Merging axes of both sides into one would make a factor as large as the matrix. So of each group of axes, a factor
    # must have either all elements or a single one.
    for factor in factors:
        for group in groups:
            size = math.prod(factor.shape[axis] for axis in group.old_axes)
            if size not in (1, math.prod(matrix.shape[axis] for axis in group.old_axes)):
                return None

    def reshape(factor: jax.Array) -> jax.Array:
        new_shape: list[int] = []
        for group in groups:
            size = math.prod(factor.shape[axis] for axis in group.old_axes)
            new_shape += group.new_sizes if size > 1 else [1] * len(group.new_sizes)
        return factor.reshape(*new_shape, factor.shape[-1])

    return matrix.transform(_apply_to_weight(matrix, equation, operands), reshape)


@dataclass
class _AxisGroup:
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


def _scale(matrix: FactoredMatrix, equation: JaxprEqn, operands: Sequence[jax.Array]) -> FactoredMatrix | None:
    """Multiply or divide W by a single number."""
    (number,) = operands
    if jnp.ndim(number) or isinstance(matrix.weight, QuantizedMatrix):
        return None
    weight = equation.primitive.bind(matrix.weight, number, **equation.params)
    if matrix.left is None:
        return None
    left = equation.primitive.bind(matrix.left, jnp.asarray(number, matrix.left.dtype), **equation.params)
    return FactoredMatrix(matrix.path, weight, left, matrix.right, matrix.scale)


_Rule = Callable[[FactoredMatrix, JaxprEqn, Sequence[jax.Array]], FactoredMatrix | None]
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


# --- products --------------------------------------------------------------------------------------------------------


source_info_util.register_exclusion(__file__)


def product(equation: JaxprEqn, operands: Sequence[Value]) -> jax.Array | None:
    """Compute a `dot_general` with a factored matrix as its left or right operand; None if both operands are factored.

    Returns:
        An array with the shape and dtype of the operation's result. The low-rank term is multiplied in x's dtype, with
        sums in float32 or wider.
    """
    left, right = operands
    if isinstance(left, FactoredMatrix):
        side, matrix, other = 0, left, right
    else:
        side, matrix, other = 1, cast(FactoredMatrix, right), left
    if isinstance(other, FactoredMatrix):
        return None

    def with_weight(activations: jax.Array, weight: jax.Array | QuantizedMatrix) -> jax.Array:
        dense = dense_weight(weight)
        pair = (dense, activations) if side == 0 else (activations, dense)
        return equation.primitive.bind(*pair, **equation.params)

    if isinstance(matrix.weight, QuantizedMatrix):
        # The backward pass dequantizes again instead of saving the array from the forward pass.
        with_weight = jax.checkpoint(with_weight)
    result = with_weight(other, matrix.weight)
    if matrix.left is None or matrix.right is None:
        return result
    letters = _dot_letters(equation, matrix.shape, other.ndim, side)
    return result + _low_rank_product(matrix, (matrix.left, matrix.right), other, equation, letters)


def _low_rank_product(
    matrix: FactoredMatrix,
    factors: tuple[jax.Array, jax.Array],
    other: jax.Array,
    equation: JaxprEqn,
    letters: _Letters,
) -> jax.Array:
    """Return scale * (x A) B, in a shape that broadcasts against the operation's result."""
    # The factor that is contracted with x comes first, so that the rank replaces the contracted axes.
    first, second = sorted(factors, key=lambda factor: -_count_contracted_elements(factor, letters))
    first_letters = long_axes(first, letters.matrix)
    second_letters = long_axes(second, letters.matrix)
    inner_letters = ""
    for letter in dict.fromkeys(letters.other + first_letters):
        # All other axes are already summed over.
        if letter in letters.result + second_letters:
            inner_letters += letter
    precision = equation.params["precision"]
    inner = jnp.einsum(
        f"{letters.other},{first_letters}->{inner_letters}",
        other,
        without_short_axes(first).astype(other.dtype),
        precision=precision,
        preferred_element_type=jnp.promote_types(other.dtype, jnp.float32),
    )
    # Scaled before rounding, because the scale itself would be rounded to the dtype of x.
    inner = (matrix.scale * inner).astype(other.dtype)
    outcome = result_type(equation)
    outer_letters = "".join(letter for letter in letters.result if letter in inner_letters + second_letters)
    outer = jnp.einsum(
        f"{inner_letters},{second_letters}->{outer_letters}",
        inner,
        without_short_axes(second).astype(other.dtype),
        precision=precision,
        preferred_element_type=outcome.dtype,
    )
    sizes = zip(letters.result, outcome.shape, strict=True)
    return outer.reshape([size if letter in outer_letters else 1 for letter, size in sizes])


@dataclass(frozen=True)
class _Letters:
    """Einsum letters for the axes of a `dot_general`'s matrix, of its other operand and of its result."""

    matrix: str
    other: str
    result: str


def _dot_letters(equation: JaxprEqn, matrix_shape: Sequence[int], other_ndim: int, side: int) -> _Letters:
    contracting, batch = equation.params["dimension_numbers"]
    matrix_letters = LETTERS[: len(matrix_shape)]
    other_letters = list(LETTERS[len(matrix_shape) : len(matrix_shape) + other_ndim])
    pairs = [*zip(contracting[side], contracting[1 - side], strict=True)]
    pairs += zip(batch[side], batch[1 - side], strict=True)
    for matrix_axis, other_axis in pairs:
        other_letters[other_axis] = matrix_letters[matrix_axis]
    batch_letters = [matrix_letters[axis] for axis in batch[side]]
    shared_letters = {matrix_letters[matrix_axis] for matrix_axis, _ in pairs}
    matrix_free = [letter for letter in matrix_letters if letter not in shared_letters]
    other_free = [letter for letter in other_letters if letter not in shared_letters]
    free = matrix_free + other_free if side == 0 else other_free + matrix_free
    return _Letters(matrix_letters, "".join(other_letters), "".join(batch_letters + free))


def _count_contracted_elements(factor: jax.Array, letters: _Letters) -> int:
    """Return how many elements of x are summed into one element of (x times this factor)."""
    axes = zip(letters.matrix, factor.shape, strict=False)
    return math.prod(size for letter, size in axes if letter not in letters.result)


# --- rows ------------------------------------------------------------------------------------------------------------


def lookup(equation: JaxprEqn, operands: Sequence[Value]) -> Value | None:
    """Compute a `gather`: rows of W plus rows of A times B, or, for a stack of matrices, the matrices at some indices.

    Returns:
        Rows as an array, matrices of a stack as a factored matrix. None if slices are not whole rows, if the indices
        address both axes of a matrix, or if W is stored in 4 bits, where rows are packed in blocks.
    """
    matrix, indices = operands
    if not isinstance(matrix, FactoredMatrix) or isinstance(indices, FactoredMatrix):
        return None
    if matrix.left is None or matrix.right is None or isinstance(matrix.weight, QuantizedMatrix):
        return None
    dimensions = equation.params["dimension_numbers"]
    indexed_axes = dimensions.start_index_map
    if indexed_axes != dimensions.collapsed_slice_dims or dimensions.operand_batching_dims:
        return None
    # Each index must select the full extent of all other axes.
    for axis, size in enumerate(matrix.shape):
        if axis not in indexed_axes and equation.params["slice_sizes"][axis] != size:
            return None
    row_factors = []
    num_indexed = 0
    for factor in (matrix.left, matrix.right):
        indexed_sizes = [factor.shape[axis] for axis in indexed_axes]
        if indexed_sizes == [matrix.shape[axis] for axis in indexed_axes]:
            row_factors.append(_rows(factor, indices, equation))
            num_indexed += 1
        elif all(size == 1 for size in indexed_sizes):
            row_factors.append(_expand_shared_row(factor, equation))
        else:
            return None
    if num_indexed == 0:
        return None
    weight = equation.primitive.bind(matrix.weight, indices, **equation.params)
    left_rows, right_rows = row_factors
    rows = FactoredMatrix(matrix.path, weight, left_rows, right_rows, matrix.scale)
    # If both factors are indexed, the index is along the stack and each row is a matrix. Otherwise it is activations.
    return rows if num_indexed == 2 else rows.dense()


def _rows(factor: jax.Array, indices: jax.Array, equation: JaxprEqn) -> jax.Array:
    """Gather the rows of a factor as the operation gathers those of W; the rank stays the last axis."""
    params = equation.params
    dimensions = params["dimension_numbers"]
    rank_axis = len(result_type(equation).shape)
    sizes = [1 if axis in dimensions.start_index_map else size for axis, size in enumerate(factor.shape)]
    return lax.gather(
        factor,
        indices,
        dimensions._replace(offset_dims=(*dimensions.offset_dims, rank_axis)),
        sizes,
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
        # Out-of-range rows keep the value that the operation fills in, so the factor adds zero to them.
        fill_value=0,
    )


def _expand_shared_row(factor: jax.Array, equation: JaxprEqn) -> jax.Array:
    """Return a factor that all rows share, with an axis of size 1 for each axis of the indices."""
    dimensions = equation.params["dimension_numbers"]
    row_sizes = [size for axis, size in enumerate(factor.shape[:-1]) if axis not in dimensions.start_index_map]
    shape = [1] * len(result_type(equation).shape)
    for axis, size in zip(dimensions.offset_dims, row_sizes, strict=True):
        shape[axis] = size
    return factor.reshape(*shape, factor.shape[-1])
