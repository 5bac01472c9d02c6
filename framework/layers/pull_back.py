"""A pull-back of `jax.vjp` without the arrays that are at hand anyway, so that a loop over layers stacks no copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class PullBack:
    """A pull-back of `jax.vjp` without the arrays that it holds.

    Attributes:
      sources: for each of these arrays, which leaf of the function's arguments it is; None for a residual.
      structure: the treedef of the pull-back.
    """

    sources: tuple[int | None, ...]
    # It holds jaxprs, which equal nothing but themselves. The layers of a stack are alike, so what was traced for
    # one of them serves all: the sources alone tell one kind of pull-back from another.
    structure: Any = field(compare=False, repr=False)

    @staticmethod
    def split(pull: Any, arguments: Any) -> tuple[PullBack, list[Any]]:
        """Takes a pull-back apart: (what is not an array, the residuals).

        Args:
            pull: from jax.vjp; a pytree whose leaves are what it holds.
            arguments: a pytree: the same arrays, not equal ones, are found in `pull`.
        """
        leaves, structure = jax.tree.flatten(pull)
        argument_leaves = jax.tree.leaves(arguments)
        # jax.vjp keeps an argument as it is, so it is the same object among the pull-back's leaves.
        position = {id(leaf): i for i, leaf in enumerate(argument_leaves)}
        sources = tuple(position.get(id(leaf)) for leaf in leaves)
        residuals = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        return PullBack(sources, structure), residuals

    def joined(self, arguments: Any, residuals: list[Any]) -> Callable[[Any], Any]:
        """The inverse of `split`."""
        argument_leaves = jax.tree.leaves(arguments)
        next_residual = iter(residuals)
        pull_leaves = []
        for source in self.sources:
            leaf = next(next_residual) if source is None else argument_leaves[source]
            pull_leaves.append(leaf)
        return jax.tree.unflatten(self.structure, pull_leaves)
