"""Conversion between whole stacks and stacks stored in parts.

Checkpoints hold whole stacks. A run stores a stack in parts when its layers are not all in the same memory. With
`memory.update = layer_programs` a group of the state holds each stack as a list of trees, one per layer. Otherwise it
holds one tree per range of layers with the same memory settings, under the range's name. Each part's leaves have a
leading layer axis. Conversion goes through host memory, one leaf at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, TrainState, flatten
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.memory import Memory

STACK = "stack"
# The stage of the layers before the stack, see `framework.models.causal_lm`.
FIRST = "first"
# The field of `Memory` that places each group of the state.
_PLACEMENT_FIELDS = {
    "parameter": "parameters",
    "frozen": "parameters",
    "optimizer": "optimizer_state",
    "ema": "optimizer_state",
    "gradient": "gradients",
}


class StackPart(NamedTuple):
    """Consecutive layers of a stack that a run stores together.

    Attributes:
        stack: the stage's name in the model.
        first: index of the first layer.
        count: number of layers.
        stage: the part's key in a group of the state.
        number: its index in the list under that key; None if there is no list.
    """

    stack: str
    first: int
    count: int
    stage: str
    number: int | None = None

    @property
    def path(self) -> str:
        """Return the common prefix of the part's leaf paths, below the group."""
        return self.stage if self.number is None else f"{self.stage}/{self.number}"

    def select(self, tree: Nested) -> Nested:
        """Return the part's tree from a group of the state."""
        return tree[self.stage] if self.number is None else tree[self.stage][self.number]


@dataclass(frozen=True)
class StackParts:
    """The parts in which a run stores the stacks of its state.

    Attributes:
        parts: the parts of all stacks that are stored in parts, in order.
        num_offloaded: by (group of the state, stack), how many layers, from the first, are in host memory; a layer
            is one period of the stack's pattern, as everywhere in this file. A missing group stays where the specs of
            the whole stacks place it.
    """

    parts: tuple[StackPart, ...]
    num_offloaded: dict[tuple[str, str], int]

    @staticmethod
    def one_per_layer(model: Chain, memory: Memory) -> StackParts:
        """Return one part, in a list, for each layer of the stack and of the layers before it."""
        parts = []
        for name, stack in model.stacks.items():
            parts += [StackPart(name, index, 1, name, index) for index in range(stack.num_repeats)]
        return StackParts(tuple(parts), _count_offloaded_layers(model, memory))

    @staticmethod
    def from_layer_ranges(model: Chain, memory: Memory, layer_ranges: list[LayerRange]) -> StackParts:
        """Return one part for each layer range of the model's stacks; none for whole stacks."""
        parts = tuple(
            StackPart(layer_range.home, layer_range.first, layer_range.count, layer_range.name)
            for layer_range in layer_ranges
        )
        return StackParts(parts, _count_offloaded_layers(model, memory))

    def list_parts(self, stack: str) -> list[StackPart]:
        """Return the parts of one stack; [] if it is whole."""
        return [part for part in self.parts if part.stack == stack]

    @property
    def stacks(self) -> list[str]:
        """Return the names of the stacks that are stored in parts."""
        return list(dict.fromkeys(part.stack for part in self.parts))

    def place(self, path: str, layer_index: int) -> tuple[str, int]:
        """Find a layer's values of a leaf of the whole stack.

        Args:
            path: path of the leaf below its group, stack/block0/... .
            layer_index: index of the layer in the stack.

        Returns:
            (path of the leaf in the run, index of the layer in that leaf).
        """
        stack, path_in_stack = path.split("/", 1)
        for part in self.list_parts(stack):
            if part.first <= layer_index < part.first + part.count:
                return f"{part.path}/{path_in_stack}", layer_index - part.first
        return path, layer_index

    # --- specs -------------------------------------------------------------------------------------------------------

    def specs(self, whole: TrainState) -> TrainState:
        """Convert specs of whole stacks to the specs of the state in parts."""
        return TrainState(**{group: self._build_group_specs(group, tree) for group, tree in whole.items()})

    def _build_group_specs(self, group: str, tree: Nested) -> Nested:
        parts = {}
        for part in self.parts:
            if tree.get(part.stack):
                parts[part] = self._build_part_specs(group, part, tree[part.stack])
        return self._replace_stacks(tree, parts)

    def _build_part_specs(self, group: str, part: StackPart, tree: Nested) -> Nested:
        num_offloaded = self.num_offloaded.get((group, part.stack))
        is_offloaded = num_offloaded is None or part.first + part.count <= num_offloaded
        # Gradient buffers are part of the state only in host memory: on the device they exist only within a step.
        if group == "gradient" and not is_offloaded:
            return {}

        def make_part_spec(spec: TensorSpec) -> TensorSpec:
            part_spec = replace(spec, shape=(part.count, *spec.shape[1:]))
            return part_spec if is_offloaded else replace(part_spec, memory_kind="device")

        return jax.tree.map(make_part_spec, tree)

    def _replace_stacks(self, tree: Nested, parts: dict[StackPart, Nested]) -> Nested:
        """Replace the whole stacks in a group of the state with their parts."""
        if not parts:
            return tree
        replaced: Nested = {}
        for stage, stage_tree in tree.items():
            stage_parts = [part for part in parts if part.stack == stage]
            if not stage_parts:
                replaced[stage] = stage_tree
            for part in stage_parts:
                if part.number is not None:
                    replaced.setdefault(part.stage, []).append(parts[part])
                elif parts[part]:
                    replaced[part.stage] = parts[part]
        return replaced

    def specs_before_split(self, layout: StateLayout) -> TrainState:
        """Return the specs that `split_state` expects: the stacks to be split are in host memory.

        Args:
            layout: the layout of the whole stacks.
        """

        def move_specs_to_host(tree: Nested) -> Nested:
            return jax.tree.map(lambda spec: replace(spec, memory_kind="pinned_host"), tree)

        specs = {}
        for group, tree in layout.checkpoint_specs.items():
            whole_stacks = {stack: move_specs_to_host(tree[stack]) for stack in self.stacks if tree.get(stack)}
            specs[group] = {**tree, **whole_stacks}
        return TrainState(**specs)

    # --- inside jit --------------------------------------------------------------------------------------------------

    def join_in_jit(self, state: TrainState) -> TrainState:
        """Inside jit: join a state in parts into whole stacks, which are copies in addition to the parts."""
        joined_state = {}
        for group, tree in state.items():
            part_stages = {part.stage for part in self.parts}
            joined_tree = {stage: stage_tree for stage, stage_tree in tree.items() if stage not in part_stages}
            for stack in self.stacks:
                parts = [part.select(tree) for part in self.list_parts(stack) if part.stage in tree]
                if parts:
                    joined_tree[stack] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
            joined_state[group] = joined_tree
        return TrainState(**joined_state)

    # --- arrays ------------------------------------------------------------------------------------------------------

    def join_stacks(self, state: TrainState, layout: StateLayout) -> TrainState:
        """Join a state in parts into whole stacks, which are copies in host memory.

        Args:
            state: the state in parts; empty groups stay empty.
            layout: the layout of the whole stacks.
        """
        joined_state = {}
        for group, tree in state.items():
            joined_state[group] = self._join_group(tree, layout.specs[group], layout) if tree else {}
        return TrainState(**joined_state)

    def _join_group(self, tree: Nested, specs: Nested, layout: StateLayout) -> Nested:
        def join(spec: TensorSpec, *leaves: jax.Array) -> jax.Array:
            return _join_leaf(spec, leaves, layout)

        # Counters have no stages.
        joined_stages = {}
        for stage in specs:
            parts = self.list_parts(stage)
            if parts and specs[stage]:
                joined_stages[stage] = jax.tree.map(join, specs[stage], *[part.select(tree) for part in parts])
            else:
                joined_stages[stage] = tree[stage]
        return joined_stages

    def split_state(self, state: TrainState, layout: StateLayout) -> TrainState:
        """Split a state of whole stacks in host memory into parts, and delete the whole stacks.

        Args:
            state: the state of whole stacks.
            layout: the layout of the parts.
        """
        split_groups = {group: self._split_group(tree, layout.specs[group], layout) for group, tree in state.items()}
        return TrainState(**split_groups)

    def _split_group(self, tree: Nested, specs: Nested, layout: StateLayout) -> Nested:
        parts = {}
        for stack in self.stacks:
            if tree.get(stack):
                parts |= dict(self._split_stack(stack, tree[stack], specs, layout))
        return self._replace_stacks(tree, parts)

    def _split_stack(
        self, stack: str, tree: Nested, specs: Nested, layout: StateLayout
    ) -> Iterator[tuple[StackPart, Nested]]:
        """Yield the parts of a stack, each with its tree."""
        parts = self.list_parts(stack)
        specs_by_part = {part: flatten(part.select(specs)) for part in parts}
        leaves_by_part: dict[StackPart, dict[str, jax.Array]] = {part: {} for part in parts}
        for path, leaf in flatten(tree).items():
            for part in parts:
                leaves_by_part[part][path] = _slice_leaf(leaf, part, specs_by_part[part][path], layout)
            # Freed leaf by leaf, so that host memory need not hold all whole stacks and all parts at the same time.
            leaf.delete()
        for part in parts:
            leaves = [leaves_by_part[part][path] for path in specs_by_part[part]]
            yield part, jax.tree.unflatten(jax.tree.structure(part.select(specs)), leaves)


def _count_offloaded_layers(model: Chain, memory: Memory) -> dict[tuple[str, str], int]:
    """Return the value of `StackParts.num_offloaded`."""
    num_offloaded = {}
    for stack_name, stack in model.stacks.items():
        for group, field in _PLACEMENT_FIELDS.items():
            placement = getattr(memory, field)
            num_offloaded[group, stack_name] = placement.num_offloaded(field, stack)
    return num_offloaded


def _join_leaf(spec: TensorSpec, parts: tuple[jax.Array, ...], layout: StateLayout) -> jax.Array:
    """Join the parts of a leaf into a leaf of the whole stack, in host memory."""
    sharding = layout.sharding(replace(spec, memory_kind="pinned_host"))
    shards_by_part = [[shard.data for shard in part.addressable_shards] for part in parts]
    stack_shards = []
    # The layer axis is never sharded, so a device's shard of the stack is made of its own shards of the parts.
    for number, shard in enumerate(parts[0].addressable_shards):
        part_arrays = [np.asarray(shards[number]) for shards in shards_by_part]
        stack_array = np.concatenate(part_arrays)
        host_sharding = jax.sharding.SingleDeviceSharding(shard.device, memory_kind="pinned_host")
        stack_shards.append(jax.device_put(stack_array, host_sharding))
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, stack_shards)


def _slice_leaf(leaf: jax.Array, part: StackPart, spec: TensorSpec, layout: StateLayout) -> jax.Array:
    """Copy a part of a whole stack's leaf to the memory kind of `spec`."""
    part_shards = []
    for shard in leaf.addressable_shards:
        sharding = jax.sharding.SingleDeviceSharding(shard.device, memory_kind=spec.memory_kind)
        part_view = np.asarray(shard.data)[part.first : part.first + part.count]
        # JAX may use a NumPy array's memory without copying it, and this view shares the memory of the whole stack.
        part_array = np.array(part_view)
        part_shards.append(jax.device_put(part_array, sharding))
    return jax.make_array_from_single_device_arrays(spec.shape, layout.sharding(spec), part_shards)
