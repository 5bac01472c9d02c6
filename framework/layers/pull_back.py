"""The pullback of `jax.vjp` without arrays that are available anyway, so that a loop over layers stacks no copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from plimsoll.framework.layout import PyTree


@dataclass(frozen=True)
class PullBack:
    """A pullback of `jax.vjp` without the arrays that it holds.

    Attributes:
        sources: for each of these arrays, the index of the leaf of the function's arguments that it is; None for a
            residual.
        structure: the treedef of the pullback.
    """

    sources: tuple[int | None, ...]
    # It holds jaxprs, which are equal only to themselves. The layers of a stack are alike, so the trace of one of
    # them works for all: `sources` is enough to tell different pullbacks apart.
    structure: Any = field(compare=False, repr=False)

    @staticmethod
    def split(pull: Callable[..., PyTree], arguments: PyTree) -> tuple[PullBack, list[jax.Array]]:
        """Split a pullback into (the part without arrays, the residuals).

        Args:
            pull: from jax.vjp; a pytree whose leaves are the arrays that it holds.
            arguments: a pytree of the function's arguments. They are found in `pull` by identity, not by value.
        """
        leaves, structure = jax.tree.flatten(pull)
        argument_leaves = jax.tree.leaves(arguments)
        # jax.vjp does not copy an argument, so the same object is among the pullback's leaves.
        position = {id(leaf): i for i, leaf in enumerate(argument_leaves)}
        sources = tuple(position.get(id(leaf)) for leaf in leaves)
        residuals = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        return PullBack(sources, structure), residuals

    def rebuild(self, arguments: PyTree, residuals: list[jax.Array]) -> Callable[[PyTree], PyTree]:
        """Inverse of `split`."""
        argument_leaves = jax.tree.leaves(arguments)
        next_residual = iter(residuals)
        pull_leaves = []
        for source in self.sources:
            leaf = next(next_residual) if source is None else argument_leaves[source]
            pull_leaves.append(leaf)
        return jax.tree.unflatten(self.structure, pull_leaves)
