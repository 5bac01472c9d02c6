"""`Trained`: weights together with the state of their optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from plimsoll.extras.functions.encoding import Tree, decode, select_floats, with_floats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trained:
    """The weights of a module and the state of their optimizer: a pytree whose leaves are all floats.

    So it can be an argument of `jax.grad`, whose result for it is the `Trained` after the update. It can be jitted,
    donated, sharded and saved like any pytree. Read its contents through `weights` and `state`.

    Attributes:
        encoded_weights: the weights as floats, see `encoding.encode`.
        encoded_state: the optimizer state as floats, see `encoding.encode`.
        name: name of the module.
    """

    encoded_weights: Tree
    encoded_state: Tree
    name: str = field(metadata={"static": True})

    @property
    def weights(self) -> Tree:
        """The weights, in their original structure and dtypes."""
        return decode(self.encoded_weights)

    @property
    def state(self) -> Tree:
        """The optimizer state, in its original structure and dtypes."""
        return decode(self.encoded_state)

    @property
    def floats(self) -> Tree:
        """The float weights, which gradients are taken of; None for all other leaves."""
        return select_floats(self.encoded_weights)

    def weights_with(self, floats: Tree) -> Tree:
        """Return the weights with the float leaves replaced."""
        return decode(with_floats(self.encoded_weights, floats))
