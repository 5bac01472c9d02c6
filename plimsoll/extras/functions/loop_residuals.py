"""Values that a loop passes from its forward to its backward pass: residuals of pullbacks, and cotangents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from plimsoll.extras.functions.encoding import Tree
from plimsoll.framework.layers.pull_back import PullBack


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """The arrays that a pullback holds in addition to its arguments; a pytree that a loop can stack and slice."""

    arrays: list[Any]
    frame: PullBack = field(metadata={"static": True})

    @staticmethod
    def from_vjp(pull_back: Callable[[Tree], Tree], arguments: Tree) -> Residuals:
        """Split a pullback of `jax.vjp` into arrays and a static frame; see `PullBack.split`."""
        frame, arrays = PullBack.split(pull_back, arguments)
        return Residuals(arrays, frame)

    def pull_back(self, arguments: Tree) -> Callable[[Tree], Tree]:
        """Rebuild the pullback from the original arguments."""
        return self.frame.rebuild(arguments, self.arrays)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NoCotangent:
    """Placeholder for the cotangent of a non-float array, which a loop cannot carry."""

    shape: tuple[int, ...]


class Cotangents(NamedTuple):
    """Cotangents in a form that a loop can carry."""

    tree: Tree

    @staticmethod
    def from_vjp(cotangents: Tree) -> Cotangents:
        """Convert cotangents that `jax.vjp` returns or takes."""

        # A float0 array has no data, so its shape is enough to restore it.
        def to_carry(leaf: Any) -> Any:
            return _NoCotangent(leaf.shape) if leaf.dtype == jax.dtypes.float0 else leaf

        return Cotangents(jax.tree.map(to_carry, cotangents))

    def restore(self) -> Tree:
        """Return the original cotangents, the inverse of `from_vjp`."""
        return self._map(lambda shape: shape)

    def _map(self, get_shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Tree:
        def leaf(node: Any) -> Any:
            if isinstance(node, _NoCotangent):
                return np.zeros(get_shape(node.shape), jax.dtypes.float0)
            return node

        return jax.tree.map(leaf, self.tree, is_leaf=lambda node: isinstance(node, _NoCotangent))

    def restore_slice(self) -> Tree:
        """Return the cotangents of one iteration, for floats that a loop has sliced along their first axis."""
        return self._map(lambda shape: shape[1:])

    def restore_stack(self, length: int) -> Tree:
        """Return the cotangents of all iterations, for floats that a loop has stacked."""
        return self._map(lambda shape: (length, *shape))
