"""Decides which residuals layer programs save for each layer's backward pass, and in which memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import jax

from plimsoll.framework.layers.base import BATCH_AXES
from plimsoll.framework.layers.remat import group_size
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import MemoryKind, TensorSpec
from plimsoll.framework.schedules.layer_vjp import Carry, LayerResiduals, is_worth_offloading
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.stack_layout import policies

# "all" residuals of the layer's backward pass; "now", the same, but used so soon that offloading is not worth it;
# only the layer's "input"; or "nothing".
SavedValues = Literal["all", "now", "input", "nothing"]
# An array, or the shape and dtype of one.
Shaped = jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class SavePolicy:
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

    def goes_to_host(self, x: Shaped) -> bool:
        """Return whether a residual, or one of its shape, goes to host memory."""
        return self.offloads and self.what != "now" and is_worth_offloading(x)


SAVE_NOTHING = SavePolicy("nothing")


@dataclass(frozen=True)
class ResidualPlan:
    """The residuals that each layer of the stack saves.

    Attributes:
        policies: the remat policy of each layer.
        groups: in order, the ranges of layers that save only the input of the first one until their own backward pass.
            A range may be a single layer.
        num_offloaded: number of layers, from the first, whose residuals go to host memory.
    """

    policies: tuple[str, ...]
    groups: tuple[range, ...]
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
            end = first + num_repeats
            groups += [range(start, start + count) for start in range(first, end, count)]
            first = end
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
        group = next(group for group in self.groups if index in group)
        if len(group) == 1:
            return self.save_policy(index, "all")
        # A group saves only the input of its first layer.
        return self.save_policy(index, "input" if index == group[0] else "nothing")


def carry_specs(tree: Carry, kind: MemoryKind = "device") -> Carry:
    """Return the specs of activations between layers: rows are sharded over data and fsdp, positions over seq."""

    def make_spec(x: Shaped) -> TensorSpec:
        if x.ndim > 2:
            feature_axes = (None,) * (x.ndim - 2)
            return TensorSpec(x.shape, x.dtype, (BATCH_AXES, "seq", *feature_axes), kind)
        axes = (BATCH_AXES,) * (x.ndim > 0)
        return TensorSpec(x.shape, x.dtype, axes, kind)

    return jax.tree.map(make_spec, tree)


def residual_specs(residuals: LayerResiduals, save_policy: SavePolicy, carry: Carry) -> LayerResiduals:
    """Return the specs of a layer's residuals.

    If the policy saves only inputs, residuals are sharded like them. Otherwise the compiler chooses the sharding.

    Args:
        residuals: the layer's residuals.
        save_policy: the remat policy, and the memory of the residuals.
        carry: the activations between layers, [B, S, ...].
    """
    leaves = residuals.leaves
    kinds: list[MemoryKind] = ["pinned_host" if save_policy.goes_to_host(x) else "device" for x in leaves]
    # With other policies the leaves are whatever a pull-back holds, and their axes are unknown.
    if save_policy.policy != "full" and not save_policy.policy.startswith("sqrt"):
        return residuals.with_leaves(kinds)
    rows = {x.shape[:2] for x in jax.tree.leaves(carry)}
    specs = []
    for x, kind in zip(leaves, kinds, strict=True):
        if x.ndim > 2 and x.shape[:2] in rows:
            specs.append(carry_specs(x, kind))
        else:
            # A leaf without rows is a constant of the layer (rotary frequencies), and is replicated.
            specs.append(TensorSpec(x.shape, x.dtype, memory_kind=kind))
    return residuals.with_leaves(specs)
