"""`Trained`: weights with the state of their optimizer, and `Updater`, which makes the new of both from a gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from framework.functions.encoding import (
    Tree,
    decoded,
    encoded,
    float_part,
    with_floats,
)
from framework.functions.mixing import refuse_mixing
from framework.functions.rules import Rule, all_finite, as_rule


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trained:
    """The weights of a piece and the state of their optimizer: a pytree whose leaves are all floats.

    So it is an argument of `jax.grad`, whose result for it is the `Trained` after the update. It can be jitted,
    donated, sharded and saved as any pytree; what it holds is told by `weights` and `state`.

    Attributes:
      encoded_weights: see `encoding.encoded`.
      encoded_state: likewise.
      name: of the piece.
    """

    encoded_weights: Tree
    encoded_state: Tree
    name: str = field(metadata={"static": True})

    @property
    def weights(self) -> Tree:
        """The weights, in the structure and dtypes that they were given in."""
        return decoded(self.encoded_weights)

    @property
    def state(self) -> Tree:
        """The state of the optimizer, in its own structure and dtypes."""
        return decoded(self.encoded_state)

    @property
    def floats(self) -> Tree:
        """The weights that are floats, with None in the place of all else: what gradients are taken of."""
        return float_part(self.encoded_weights)

    def weights_with(self, floats: Tree) -> Tree:
        """The weights, with those that are floats replaced."""
        return decoded(with_floats(self.encoded_weights, floats))


@dataclass(frozen=True)
class Updater:
    """The update of a piece by its gradient.

    Attributes:
      name: of the piece.
      rule: see `Rule`.
      skip_nonfinite: whether a gradient with infinities or NaN leaves weights and state as they are.
      mixes: whether the rule may look at several tensors of the piece together.
    """

    name: str
    rule: Rule
    skip_nonfinite: bool
    mixes: bool

    @staticmethod
    def make(
        optimizer_or_rule: Any,
        name: str,
        *,
        skip_nonfinite: bool,
        max_update_rms: float | None,
        mixes: bool,
    ) -> Updater:
        """See `eager` for the arguments, and `as_rule` for what is raised."""
        rule = as_rule(optimizer_or_rule, name, max_update_rms)
        return Updater(name, rule, skip_nonfinite, mixes)

    def checked_floats(self, weights: Tree) -> tuple[Tree, Tree]:
        """(the weights encoded, those that are floats).

        Raises:
            ValueError: there are no floats, a weight is complex, or a part of the weights is trained already.
        """
        for node in jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, Trained)):
            if isinstance(node, Trained):
                raise ValueError(
                    f"{self.name}: its weights hold {node.name!r}, which is trained already; give that one to the "
                    "piece as an input"
                )
        try:
            encoded_weights = encoded(weights)
        except ValueError as error:
            raise ValueError(f"{self.name}: its weights have {error}") from None
        floats = float_part(encoded_weights)
        if not jax.tree.leaves(floats):
            raise ValueError(f"{self.name}: its weights have no array of floats, so there is nothing to train")
        return encoded_weights, floats

    def check_rule(self, floats: Tree, state: Tree) -> None:
        """Raises ValueError when the rule looks at several tensors together, and was not allowed to."""
        if not self.mixes:
            refuse_mixing(self.rule, floats, state, self.name)

    def updated(self, trained: Trained, gradient: Tree) -> Trained:
        """The weights and the state after one update.

        Args:
            trained: what is updated.
            gradient: as `trained.floats`.
        """
        floats = trained.floats
        state = trained.state
        with jax.named_scope(f"update_{self.name}"):
            new_floats, new_state = self.rule.update(floats, gradient, state)
            new_floats = self._alike(new_floats, floats, "weights")
            new_state = self._alike(new_state, state, "state")
            new = Trained(
                with_floats(trained.encoded_weights, new_floats),
                encoded(new_state),
                trained.name,
            )
            if not self.skip_nonfinite:
                return new
            is_finite = all_finite(gradient)
            return jax.tree.map(lambda new_leaf, leaf: jnp.where(is_finite, new_leaf, leaf), new, trained)

    def _alike(self, new: Tree, old: Tree, what: str) -> Tree:
        """The new tree in the dtypes of the old one.

        Raises:
            ValueError: the rule changed the structure of the tree, or a shape.
        """
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise ValueError(
                f"{self.name}: the rule returned {what} of another structure: {jax.tree.structure(new)}, where it was "
                f"given {jax.tree.structure(old)}"
            )

        def alike(new_leaf: Any, old_leaf: Any) -> Any:
            if not hasattr(old_leaf, "dtype"):
                return old_leaf
            new_array = jnp.asarray(new_leaf)
            if new_array.shape != old_leaf.shape:
                raise ValueError(
                    f"{self.name}: the rule returned {what} of the shape {new_array.shape}, where it was given "
                    f"{old_leaf.shape}"
                )
            return new_array.astype(old_leaf.dtype)

        return jax.tree.map(alike, new, old)


def with_arrays(state: Tree) -> Tree:
    """An optimizer's state with arrays in the place of Python's numbers, so that they are no constants."""

    def as_array(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float)) else leaf

    return jax.tree.map(as_array, state)
