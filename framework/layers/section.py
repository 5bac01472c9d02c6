"""A section of a stack: units that follow each other, live in the same places and are recomputed alike.

Where placement or recomputation changes from one layer to the next, the loop over the layers is cut. Each section then
is a stage of the model, and its arrays are arrays of their own, so nothing is sliced out of a longer stack.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """Some units of a stack.

    Attributes:
      home: the name of the stack in the model, and in checkpoints.
      first: the index of the first unit.
      count: the number of units.
      total: the units of the whole stack.
      remat: what the backward pass recomputes of these units.
      offloads: whether what is kept of them for the backward pass goes to host memory.
    """

    home: str
    first: int
    count: int
    total: int
    remat: str
    offloads: bool

    @property
    def end(self) -> int:
        """The index behind the last unit."""
        return self.first + self.count

    @property
    def is_whole(self) -> bool:
        """Whether the section is all of the stack."""
        return self.count == self.total

    @property
    def name(self) -> str:
        """The name of the stage: that of the stack, with the units of which it has but some, as in stack.0-19."""
        return self.home if self.is_whole else f"{self.home}.{self.first}-{self.end - 1}"
