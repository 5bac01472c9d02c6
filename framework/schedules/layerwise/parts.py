"""What a step in layers goes through: stages and units, their parts of trees, and the keys by which those move."""

from __future__ import annotations

from typing import NamedTuple

from framework.layout import Nested
from framework.schedules.layerwise.moves import MoveKey
from framework.schedules.storage import STACK


class Part(NamedTuple):
    """What one update covers: a stage, or one unit of the stack.

    Attributes:
      stage: the stage's name.
      index: the unit's, if the stage is the stack, or the layers before it; else None.
    """

    stage: str
    index: int | None = None

    @staticmethod
    def unit(index: int) -> Part:
        """The unit of the stack at `index`."""
        return Part(STACK, index)

    def of(self, tree: Nested) -> Nested:
        """This part of a tree by stages, of which stacks are lists of their units; {} for none."""
        stage_tree = tree.get(self.stage, {})
        return stage_tree[self.index] if self.index is not None and stage_tree else stage_tree

    def put(self, tree: Nested, new: Nested) -> None:
        """Replaces this part of a tree by stages."""
        if self.index is None:
            tree[self.stage] = new
        else:
            tree[self.stage][self.index] = new

    @property
    def weights(self) -> MoveKey:
        """The parameters that its stage or unit reads, on their way to be computed with."""
        role = "weights" if self.stage == STACK else self.stage
        return MoveKey(role, self.index)

    @property
    def residuals(self) -> MoveKey:
        """What is kept of a unit for its backward pass."""
        return MoveKey("kept", self.index)

    @property
    def gradients(self) -> MoveKey:
        """Gradients that wait for an update."""
        return MoveKey(f"gradient {self.stage}", self.index)

    @property
    def old_parameters(self) -> MoveKey:
        """The parameters, on their way to be updated."""
        return self._update_key("home")

    @property
    def old_state(self) -> MoveKey:
        """Optimizer state and averages, on their way to be updated."""
        return self._update_key("state")

    @property
    def updated(self) -> MoveKey:
        """What an update returns, on its way to where it is stored."""
        return self._update_key("new")

    def _update_key(self, content: str) -> MoveKey:
        role = content if self.stage == STACK else f"{content} {self.stage}"
        return MoveKey(role, self.index)
