"""`Trained`: weights with the state of their optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from framework.functions.encoding import Tree, decoded, float_part, with_floats


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
