"""A pull-back of `jax.vjp` without the arrays that are at hand anyway, so that a loop stacks no copies of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from framework.functions.encoding import Tree

# A pull-back: the cotangents of the arguments, from those of the outputs.
PullBack = Callable[[Tree], tuple[Tree, ...]]


@dataclass(frozen=True)
class _Frame:
    """What of a pull-back is no array.

    Attributes:
      sources: for each array that it holds, which leaf of the arguments it is; None for a residual.
      structure: the treedef of the pull-back.
    """

    sources: tuple[int | None, ...]
    # It holds jaxprs, which equal nothing but themselves. The turns of a loop are alike.
    structure: Any = field(compare=False, repr=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """A pytree of what a pull-back holds besides the arguments; it may be stacked by a loop and sliced again."""

    arrays: list[Any]
    frame: _Frame = field(metadata={"static": True})

    @staticmethod
    def of(pull_back: PullBack, arguments: Tree) -> Residuals:
        """Takes a pull-back apart.

        Args:
            pull_back: of jax.vjp, whose result is a pytree.
            arguments: the same arrays, not equal ones, are found in it.
        """
        leaves, structure = jax.tree.flatten(pull_back)
        # jax.vjp keeps an argument as it is, so it is the same object among the pull-back's leaves.
        number_of_argument = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(arguments))}
        sources = tuple(number_of_argument.get(id(leaf)) for leaf in leaves)
        arrays = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        return Residuals(arrays, _Frame(sources, structure))

    def pull_back(self, arguments: Tree) -> PullBack:
        """The pull-back, from the arguments as they were."""
        argument_leaves = jax.tree.leaves(arguments)
        next_residual = iter(self.arrays)
        leaves = []
        for source in self.frame.sources:
            leaf = next(next_residual) if source is None else argument_leaves[source]
            leaves.append(leaf)
        return jax.tree.unflatten(self.frame.structure, leaves)


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
