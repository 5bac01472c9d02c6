"""Decides which residuals layer programs save for each layer's backward pass, and in which memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from plimsoll.framework.layers.remat import group_size
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.schedules.layer_vjp import is_worth_offloading
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.stack_layout import policies

# "all" residuals of the layer's backward pass; "now", the same, but used so soon that offloading is not worth it;
# only the layer's "input"; or "nothing".
SavedValues = Literal["all", "now", "input", "nothing"]


class SavePolicy(NamedTuple):
    """The residuals that a layer's forward program saves.

    Attributes:
        what: see `SavedValues`.
        policy: the remat policy.
        offloads: whether large residuals go to host memory.
        label: distinguishes the programs of different kinds of layers.
    """

    what: SavedValues
    policy: str = "none"
    offloads: bool = False
    label: str = ""

    @property
    def program(self) -> str:
        """Return the name of the forward program."""
        return f"unit forward, keeps {self.what}{self.label}"

    def goes_to_host(self, x: Any) -> bool:
        """Return whether a residual, or one of its shape, goes to host memory."""
        return self.offloads and self.what != "now" and is_worth_offloading(x)


SAVE_NOTHING = SavePolicy("nothing")


class LayerGroup(NamedTuple):
    """Layers that save only the input of the first one until their own backward pass; or a single layer.

    Attributes:
        first: index of the first layer.
        count: number of layers.
    """

    first: int
    count: int


@dataclass(frozen=True)
class ResidualPlan:
    """The residuals that each layer of the stack saves.

    Attributes:
        policies: the remat policy of each layer.
        groups: groups of layers, in order.
        num_offloaded: number of layers, from the first, whose residuals go to host memory.
    """

    policies: tuple[str, ...]
    groups: tuple[LayerGroup, ...]
    num_offloaded: int

    @staticmethod
    def from_memory(memory: Memory, stack: Stack) -> ResidualPlan:
        """Create the plan of a stack from the memory settings."""
        layer_policies = policies(memory, stack)
        groups = []
        first = 0
        for policy, run in itertools.groupby(layer_policies):
            num_repeats = len(list(run))
            count = group_size(policy, num_repeats) or 1
            groups += [LayerGroup(first + offset, count) for offset in range(0, num_repeats, count)]
            first += num_repeats
        num_offloaded = memory.activations.num_offloaded("activations", stack)
        return ResidualPlan(tuple(layer_policies), tuple(groups), num_offloaded)

    @property
    def inverts(self) -> bool:
        """Return whether layers are inverted: all of them, or none."""
        return self.policies[0] == "invert"

    def label(self, index: int) -> str:
        """Return the label that distinguishes a layer's programs from those of others; "" if all layers are alike."""
        policy = self.policies[index]
        words = [policy] if len(set(self.policies)) > 1 else []
        if 0 < self.num_offloaded < len(self.policies):
            words.append("on the host" if index < self.num_offloaded else "on the device")
        return "".join(f", {word}" for word in words)

    def save_policy(self, index: int, what: SavedValues) -> SavePolicy:
        """Return which residuals a layer saves, for the given `what`."""
        return SavePolicy(what, self.policies[index], index < self.num_offloaded, self.label(index))

    def forward_save_policy(self, index: int) -> SavePolicy:
        """Return which residuals a layer saves in the forward pass."""
        if self.inverts:
            return self.save_policy(index, "nothing")
        group = next(group for group in self.groups if group.first <= index < group.first + group.count)
        if group.count == 1:
            return self.save_policy(index, "all")
        # A group saves only the input of its first layer.
        return self.save_policy(index, "input" if index == group.first else "nothing")
