"""A range of a stack: consecutive layers that share the same placement and recomputation settings.

Where these settings change from one layer to the next, the loop over layers is split. Each range is then a stage of the
model with its own arrays, so nothing is sliced out of a longer stack. A layer is one repeat of the stack's pattern.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerRange:
    """A range of the layers of a stack.

    Attributes:
        home: the name of the stack in the model, and in checkpoints.
        first: the index of the first layer.
        count: the number of layers.
        total: the number of layers of the whole stack.
        remat: the policy of these layers, see `framework.layers.remat`.
        offloads: whether the residuals of these layers are offloaded to host memory.
    """

    home: str
    first: int
    count: int
    total: int
    remat: str
    offloads: bool

    @property
    def end(self) -> int:
        """The index after the last layer."""
        return self.first + self.count

    @property
    def is_whole(self) -> bool:
        """True if the range is the whole stack."""
        return self.count == self.total

    @property
    def name(self) -> str:
        """The name of the stage: the stack's name, followed by the layers if only some, as in stack.0-19."""
        return self.home if self.is_whole else f"{self.home}.{self.first}-{self.end - 1}"
