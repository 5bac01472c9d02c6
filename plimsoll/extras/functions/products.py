"""Products with, and row lookups in, a matrix that has an adapter: x W + scale * (x A) B.

No second array of W's size is allocated, neither here nor in what JAX derives from this for the backward pass: the
gradients of both factors are products with x A and with the cotangent times B. Imports jax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from plimsoll.extras.functions.factored import (
    LETTERS,
    FactoredMatrix,
    dense_weight,
    long_axes,
    result_type,
    without_short_axes,
)
from plimsoll.extras.functions.nf4 import QuantizedMatrix

source_info_util.register_exclusion(__file__)


def product(equation: JaxprEqn, operands: Sequence[Any]) -> jax.Array | None:
    """Compute a `dot_general` with a factored matrix as its left or right operand; None if both operands are factored.

    Returns:
        An array with the shape and dtype of the operation's result. The low-rank term is multiplied in x's dtype, with
        sums in float32 or wider.
    """
    side = 0 if isinstance(operands[0], FactoredMatrix) else 1
    matrix: FactoredMatrix = operands[side]
    other = operands[1 - side]
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


class _Letters(NamedTuple):
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


def lookup(equation: JaxprEqn, operands: Sequence[Any]) -> jax.Array | FactoredMatrix | None:
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
    if not _is_row_gather(equation, matrix.shape):
        return None
    indexed_axes = equation.params["dimension_numbers"].start_index_map
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


def _is_row_gather(equation: JaxprEqn, shape: Sequence[int]) -> bool:
    """Return whether each index selects the full extent of all other axes."""
    dimensions = equation.params["dimension_numbers"]
    indexed_axes = dimensions.start_index_map
    if indexed_axes != dimensions.collapsed_slice_dims or dimensions.operand_batching_dims:
        return False
    slice_sizes = equation.params["slice_sizes"]
    return all(slice_sizes[axis] == size for axis, size in enumerate(shape) if axis not in indexed_axes)


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
