"""The training state: a pytree with one field for each group of arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import jax

from plimsoll.framework.layout.trees import Nested

SavedGroup = Literal["parameter", "frozen", "buffer", "optimizer", "ema", "counter"]
UnsavedGroup = Literal["gradient", "pending", "spare", "spare_ema"]
Group = SavedGroup | UnsavedGroup
# Groups that checkpoints do not hold; they start as zeros.
UNSAVED_GROUPS: tuple[UnsavedGroup, ...] = ("gradient", "pending", "spare", "spare_ema")
# In the order in which reports list the groups.
GROUPS: tuple[Group, ...] = ("parameter", "frozen", "buffer", "optimizer", "ema", "counter", *UNSAVED_GROUPS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The training state, or a part of it: then the other groups are empty.

    The leaves are arrays, or their specs (`TensorSpec`), shardings or abstract arrays. A group is a nested dict whose
    first level names the stages of the model: {"embed": ..., "stack": ..., "head": ...}. Below it, a leaf of a whole
    stack has a leading axis of layers, [L, ...]; a stack in parts (`framework.schedules.stack_layout`) has an entry for
    each part. `StateLayout` gives each leaf its dtype, sharding and memory kind ("device" or "pinned_host").

    The fields are in alphabetical order, which is the order of the arrays in the arguments of compiled programs.

    Attributes:
        buffer: values that the forward pass changes, such as the load of experts; always on the device.
        counter: scalars that belong to no stage, always on the device: "step" and "skipped" (int32), "grad_norm" and
            statistics of the loss (float32), and "rng", the words of the run's PRNG key (uint32[2]).
        ema: moving averages of the trainable parameters, with their paths and shapes; empty without averages. Stored
            where memory.optimizer_state says.
        frozen: parameters that are not trained, in the dtype that the model gives them. Stored where
            memory.parameters says, and only once for all checkpoints of a run.
        gradient: buffers of gradients, with the paths and shapes of trainable parameters. Only those in host memory
            are part of the state (memory.gradients); checkpoints do not hold them.
        optimizer: optimizer state by stage, and below it by label of the parameter group. Stored where
            memory.optimizer_state says; vectors, scalars and small leaves are always on the device.
        parameter: trainable parameters, in the dtype that the model gives them. Stored where memory.parameters says.
        pending: scalars of an update that the next step applies to the stacks with the gradients in `gradient`; see
            `framework.schedules.delayed_update`. Empty without delayed updates, and not in checkpoints.
        spare: a second copy of the offloaded leaves of `optimizer`, by the same paths, which the next step writes; see
            `framework.schedules.speculative_update`. Empty without speculative updates, and not in checkpoints.
        spare_ema: the same for `ema`.
    """

    buffer: Nested = field(default_factory=dict)
    counter: Nested = field(default_factory=dict)
    ema: Nested = field(default_factory=dict)
    frozen: Nested = field(default_factory=dict)
    gradient: Nested = field(default_factory=dict)
    optimizer: Nested = field(default_factory=dict)
    parameter: Nested = field(default_factory=dict)
    pending: Nested = field(default_factory=dict)
    spare: Nested = field(default_factory=dict)
    spare_ema: Nested = field(default_factory=dict)

    def __getitem__(self, group: str) -> Nested:
        """Return a group by its name, for code where the name is a variable."""
        return getattr(self, group)

    def items(self) -> Iterator[tuple[str, Nested]]:
        """Yield (name, tree) of each group, also of those that are empty."""
        for group in fields(self):
            yield group.name, getattr(self, group.name)

    def select(self, groups: Collection[str]) -> TrainState:
        """Return a state with only these groups."""
        return TrainState(**{group: self[group] for group in groups})

    def without_unsaved(self) -> TrainState:
        """Return the state without the groups that checkpoints do not hold."""
        return replace(self, **{group: {} for group in UNSAVED_GROUPS})
