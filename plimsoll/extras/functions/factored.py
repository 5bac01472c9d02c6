"""Factored form of a matrix with an adapter, as a program transforms it.

W + scale * A B is stored as three arrays. The two factors broadcast against W and have one more axis, the rank, at the
end: for W [*stack, in, out] they are [*stack, in, 1, rank] and [*stack, 1, out, rank]. So an operation that moves the
axes of W moves theirs in the same way, on either side of the matrix (`matrix_views.py`). Imports jax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from plimsoll.extras.functions.adapters import Adapter
from plimsoll.extras.functions.nf4 import QuantizedMatrix

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


def to_factored(path: str, weight: jax.Array | QuantizedMatrix, adapter: Adapter | None) -> FactoredMatrix:
    """Return the factored form of the matrix [*stack, in, out] at a path, with its adapter if it has one."""
    if adapter is None:
        return FactoredMatrix(path, weight, None, None, 1.0)
    left, right = adapter.factors(len(weight.shape))
    return FactoredMatrix(path, weight, left, right, adapter.scale)


def result_type(equation: JaxprEqn) -> Any:
    """Return the shape and dtype of an operation's only result."""
    return equation.outvars[0].aval
