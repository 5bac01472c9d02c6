"""The weights, gradients, optimizer state and averages of a parameter group, as leaves by path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import jax

from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, flatten
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.update import LayerTrainState

Leaf = TypeVar("Leaf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupLeaves(Generic[Leaf]):
    """The four parts of a `LayerTrainState`, or some of their leaves, by path: arrays or specs.

    Attributes:
        weights: trainable parameters.
        grads: their gradients; {} where gradients take no part.
        entry: optimizer state.
        average: moving averages of the parameters.
    """

    weights: dict[str, Leaf]
    grads: dict[str, Leaf] = field(default_factory=dict)
    entry: dict[str, Leaf] = field(default_factory=dict)
    average: dict[str, Leaf] = field(default_factory=dict)

    @staticmethod
    def from_train_state(train_state: LayerTrainState) -> GroupLeaves[Leaf]:
        """Return the leaves of a train state, or of its specs."""
        return GroupLeaves(
            flatten(train_state.weights),
            flatten(train_state.grads),
            flatten(train_state.entry),
            flatten(train_state.average),
        )

    @property
    def parts(self) -> dict[str, dict[str, Leaf]]:
        """Return the four parts by name."""
        return {"weights": self.weights, "grads": self.grads, "entry": self.entry, "average": self.average}


def is_offloaded(spec: TensorSpec) -> bool:
    """Return whether a leaf is in host memory."""
    return spec.memory_kind != "device"


def train_state_specs(layout: StateLayout, learner: Learner, group: ParamGroup, gradients: Nested) -> LayerTrainState:
    """Return the specs of a group's weights, gradients, optimizer state and averages.

    Args:
        layout, learner, group: the layout of the training state, the learner, and the parameter group.
        gradients: specs of the group's gradients, which are returned unchanged.
    """
    specs = layout.specs
    weights = learner.select(specs.parameter, group)
    # Optimizer state is already keyed by stage and group; the others are selected from trees of all parameters.
    entry = specs.optimizer[group.stage][group.label]
    average = learner.select(specs.ema, group) if specs.ema else {}
    return LayerTrainState(weights, gradients, entry, average)
