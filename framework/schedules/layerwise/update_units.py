"""Update units, which are stages or single layers: their parts of the state, and the keys of their transfers."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.framework.layout import Nested
from plimsoll.framework.schedules.layerwise.transfers import TransferKey
from plimsoll.framework.schedules.stack_layout import STACK


class UpdateUnit(NamedTuple):
    """A stage, or one layer of a stack: the unit of an update.

    Attributes:
        stage: name of the stage.
        index: index of the layer, if the stage is the stack or the layers before it; else None.
    """

    stage: str
    index: int | None = None

    @staticmethod
    def layer(index: int) -> UpdateUnit:
        """Return the update unit of the layer of the stack at `index`."""
        return UpdateUnit(STACK, index)

    def select(self, tree: Nested) -> Nested:
        """Return this unit's part of a tree by stages, in which a stack is a list of layers; {} if it has none."""
        stage_tree = tree.get(self.stage, {})
        return stage_tree[self.index] if self.index is not None and stage_tree else stage_tree

    def put(self, tree: Nested, new: Nested) -> None:
        """Replace this unit's part of a tree by stages."""
        if self.index is None:
            tree[self.stage] = new
        else:
            tree[self.stage][self.index] = new

    @property
    def weights(self) -> TransferKey:
        """Key for the parameters that the stage or layer reads, moved to the device for its computation."""
        role = "weights" if self.stage == STACK else self.stage
        return TransferKey(role, self.index)

    @property
    def residuals(self) -> TransferKey:
        """Key for the residuals of a layer."""
        return TransferKey("kept", self.index)

    @property
    def gradients(self) -> TransferKey:
        """Key for gradients that wait for an update."""
        return TransferKey(f"gradient {self.stage}", self.index)

    @property
    def old_parameters(self) -> TransferKey:
        """Key for the parameters, moved to the device for their update."""
        return self._update_key("home")

    @property
    def old_state(self) -> TransferKey:
        """Key for optimizer state and averages, moved to the device for their update."""
        return self._update_key("state")

    @property
    def update_results(self) -> TransferKey:
        """Key for the results of an update, moved to the memory in which they are stored."""
        return self._update_key("new")

    def _update_key(self, content: str) -> TransferKey:
        role = content if self.stage == STACK else f"{content} {self.stage}"
        return TransferKey(role, self.index)
