"""What a loop hands from a forward pass to its backward pass: the residuals of pull-backs, and cotangents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from framework.functions.encoding import Tree
from framework.layers.pull_back import PullBack


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """A pytree of what a pull-back holds besides the arguments; it may be stacked by a loop and sliced again."""

    arrays: list[Any]
    frame: PullBack = field(metadata={"static": True})

    @staticmethod
    def of(pull_back: Callable[[Tree], Tree], arguments: Tree) -> Residuals:
        """Takes a pull-back of `jax.vjp` apart; see `PullBack.split`."""
        frame, arrays = PullBack.split(pull_back, arguments)
        return Residuals(arrays, frame)

    def pull_back(self, arguments: Tree) -> Callable[[Tree], Tree]:
        """The pull-back, from the arguments as they were."""
        return self.frame.joined(arguments, self.arrays)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NoCotangent:
    """Stands for the cotangent of an array that is not of floats, which a loop cannot carry."""

    shape: tuple[int, ...]


class Cotangents(NamedTuple):
    """Cotangents that a loop can carry."""

    tree: Tree

    @staticmethod
    def of(cotangents: Tree) -> Cotangents:
        """Those of `jax.vjp`, or of what it is given."""

        def carried(leaf: Any) -> Any:
            return _NoCotangent(leaf.shape) if leaf.dtype == jax.dtypes.float0 else leaf

        return Cotangents(jax.tree.map(carried, cotangents))

    def restored(self) -> Tree:
        """The inverse of `of`."""
        return self._map(lambda shape: shape)

    def _map(self, shape_of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Tree:
        def leaf(node: Any) -> Any:
            if isinstance(node, _NoCotangent):
                return np.zeros(shape_of(node.shape), jax.dtypes.float0)
            return node

        return jax.tree.map(leaf, self.tree, is_leaf=lambda node: isinstance(node, _NoCotangent))

    def of_turn(self) -> Tree:
        """Where a loop has sliced the floats along their first axis: the cotangents of one turn."""
        return self._map(lambda shape: shape[1:])

    def of_all_turns(self, length: int) -> Tree:
        """Where a loop has stacked the floats: the cotangents of all turns."""
        return self._map(lambda shape: (length, *shape))
