"""A section of a stack: consecutive layers that share the same placement and recomputation settings.

Where these settings change from one layer to the next, the loop over layers is split. Each section is then a stage of
the model with its own arrays, so nothing is sliced out of a longer stack.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerRange:
    """A range of the units of a stack.

    Attributes:
        home: the name of the stack in the model, and in checkpoints.
        first: the index of the first unit.
        count: the number of units.
        total: the number of units of the whole stack.
        remat: which activations of these units the backward pass recomputes.
        offloads: whether the residuals of these units are offloaded to host memory.
    """

    home: str
    first: int
    count: int
    total: int
    remat: str
    offloads: bool

    @property
    def end(self) -> int:
        """The index after the last unit."""
        return self.first + self.count

    @property
    def is_whole(self) -> bool:
        """True if the section is the whole stack."""
        return self.count == self.total

    @property
    def name(self) -> str:
        """The name of the stage: the stack's name, followed by the range of units if partial, as in stack.0-19."""
        return self.home if self.is_whole else f"{self.home}.{self.first}-{self.end - 1}"
