"""What the programs of layers keep of each unit for its backward pass, and where."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from framework.layers.remat import group_size
from framework.layers.stack import Stack
from framework.schedules.memory import Memory
from framework.schedules.sections import policies
from framework.schedules.unit import is_worth_offloading

# "all" that the unit's backward pass needs; the same for "now", which is not worth a move to the host; the unit's
# "input"; or "nothing".
What = Literal["all", "now", "input", "nothing"]


class Keeping(NamedTuple):
    """What a unit's forward program keeps.

    Attributes:
      what: see `What`.
      policy: what the backward pass recomputes.
      offloads: whether what is kept goes to host memory where it is large.
      label: tells the programs of unlike units apart.
    """

    what: What
    policy: str = "none"
    offloads: bool = False
    label: str = ""

    @property
    def program(self) -> str:
        """The name of the forward program."""
        return f"unit forward, keeps {self.what}{self.label}"

    def goes_to_host(self, x: Any) -> bool:
        """Whether an activation that is kept, or one of its shape, goes to host memory."""
        return self.offloads and self.what != "now" and is_worth_offloading(x)


NOTHING = Keeping("nothing")


class UnitGroup(NamedTuple):
    """Units of which only the input of the first is kept, until their own backward pass; or one unit.

    Attributes:
      first: the index of the first unit.
      count: the number of units.
    """

    first: int
    count: int


@dataclass(frozen=True)
class UnitPlan:
    """What is kept of each unit of the stack.

    Attributes:
      policies: what the backward pass recomputes of each unit.
      groups: of units, in order.
      num_offloaded: of so many units, from the first, what is kept goes to host memory.
    """

    policies: tuple[str, ...]
    groups: tuple[UnitGroup, ...]
    num_offloaded: int

    @staticmethod
    def of(memory: Memory, stack: Stack) -> UnitPlan:
        """The plan of a stack by the memory section."""
        unit_policies = policies(memory, stack)
        groups = []
        first = 0
        for policy, run in itertools.groupby(unit_policies):
            num_units = len(list(run))
            count = group_size(policy, num_units) or 1
            groups += [UnitGroup(first + offset, count) for offset in range(0, num_units, count)]
            first += num_units
        num_offloaded = memory.activations.hosted_units("activations", stack)
        return UnitPlan(tuple(unit_policies), tuple(groups), num_offloaded)

    @property
    def inverts(self) -> bool:
        """Whether units are inverted: all of them, or none."""
        return self.policies[0] == "invert"

    def label(self, index: int) -> str:
        """What tells the programs of a unit from those of others; "" where all units are alike."""
        policy = self.policies[index]
        words = [policy] if len(set(self.policies)) > 1 else []
        if 0 < self.num_offloaded < len(self.policies):
            words.append("on the host" if index < self.num_offloaded else "on the device")
        return "".join(f", {word}" for word in words)

    def keeping(self, index: int, what: What) -> Keeping:
        """What is kept of a unit."""
        return Keeping(what, self.policies[index], index < self.num_offloaded, self.label(index))

    def kept_in_forward(self, index: int) -> Keeping:
        """What the forward pass keeps of a unit."""
        if self.inverts:
            return self.keeping(index, "nothing")
        group = next(group for group in self.groups if group.first <= index < group.first + group.count)
        if group.count == 1:
            return self.keeping(index, "all")
        # Of a group only the input of its first unit is kept.
        return self.keeping(index, "input" if index == group.first else "nothing")
