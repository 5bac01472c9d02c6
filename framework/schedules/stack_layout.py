"""How a run stores the stacks of a model: whole, or in parts that differ in their memory settings.

`split_stacks` splits the stacks of the model into ranges of layers that share the same memory settings. `StackParts`
converts the state between whole stacks, which checkpoints hold, and these parts. With `memory.update = layer_programs`
a group of the state holds each stack as a list of trees, one per layer. Otherwise it holds one tree per range of
layers, under the range's name. Each part's leaves have a leading layer axis. Conversion goes through host memory, one
leaf at a time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layers import remat
from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import (
    Nested,
    OptStateSpec,
    ParameterSpec,
    SplitArray,
    SplitSpec,
    StateLayout,
    TensorSpec,
    TrainState,
    flatten,
    path_name,
    unflatten,
)
from plimsoll.framework.learner.group_optimizer import unflatten_like
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.memory import Memory, Placement, count_repeats

# The fields of `Memory` that are placements.
PLACED_FIELDS = ("parameters", "gradients", "optimizer_state", "experts", "activations")
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
    "spare": "optimizer_state",
    "spare_ema": "optimizer_state",
}

# --- experts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadedExperts:
    """The experts that `memory.experts` offloads.

    Attributes:
        paths: by stage, the paths of the experts' parameters within it; stages without offloaded experts are missing.
        num_layers: by stack, how many layers, from the first, have their experts in host memory; a layer is one period
            of the stack's pattern.
        groups: the groups of the state whose leaves `memory.experts` places.
    """

    paths: dict[str, frozenset[str]] = field(default_factory=dict)
    num_layers: dict[str, int] = field(default_factory=dict)
    groups: frozenset[str] = frozenset()

    @staticmethod
    def find(model: Chain, memory: Memory) -> OffloadedExperts:
        """Find the offloaded experts of a model with whole stacks.

        Raises:
            ValueError: memory.experts names more layers than the stack has, or splits a period of the pattern.
        """
        placement = memory.experts
        if not placement.uses_host:
            return OffloadedExperts()
        num_layers = {name: placement.num_offloaded("experts", stack) for name, stack in model.stacks.items()}
        paths = {}
        for stage, stage_paths in find_expert_paths(model).items():
            # The parameters that layers share belong to all of them.
            if num_layers.get(stage, placement.offloads_everything):
                paths[stage] = stage_paths
        groups = {"parameter", "frozen", "optimizer", "ema"}
        if memory.offloads_expert_gradients:
            groups.add("gradient")
        return OffloadedExperts(paths, num_layers, frozenset(groups))

    def includes(self, stage: str, path: str, spec: TensorSpec) -> bool:
        """Return whether a leaf of the state belongs to offloaded experts.

        Args:
            stage: the stage, with whole stacks.
            path: path of the leaf within the stage.
            spec: spec of the leaf.
        """
        owner = spec.owner if isinstance(spec, OptStateSpec) else None
        return (path if owner is None else owner) in self.paths.get(stage, ())

    def place(self, stage: str, specs: Nested, offloaded: Nested) -> Nested:
        """Return the specs of a stage, with those of offloaded experts replaced by their specs in `offloaded`."""

        def choose(keypath: tuple[object, ...], spec: TensorSpec, other: TensorSpec) -> TensorSpec:
            return other if self.includes(stage, path_name(keypath), spec) else spec

        return jax.tree_util.tree_map_with_path(choose, specs, offloaded)


def find_expert_paths(model: Chain) -> dict[str, frozenset[str]]:
    """Return the paths of the experts' parameters within their stages, by stage; stages without experts are missing."""
    paths_by_stage = {}
    for stage, specs in model.parameter_specs().items():
        spec_by_path: dict[str, ParameterSpec] = flatten(specs)
        paths = frozenset(path for path, spec in spec_by_path.items() if "expert" in spec.roles)
        if paths:
            paths_by_stage[stage] = paths
    return paths_by_stage


def check_experts(model: Chain, memory: Memory) -> None:
    """Raise ValueError if memory.experts offloads the experts of a model that has none."""
    if memory.experts.uses_host and not find_expert_paths(model):
        raise ValueError(
            f"memory.experts = {memory.experts.text}, but the model has no experts; expected memory.experts = device, "
            "or memory.parameters for all weights"
        )


# --- ranges of layers -------------------------------------------------------------------------------------------------


def policies(memory: Memory, stack: Stack) -> list[str]:
    """Return the remat policy of each layer of a whole stack, in order.

    Raises:
        ValueError: memory.remat covers more or fewer layers than the stack has, or its numbers split a repetition of
            the layer pattern.
    """
    layer_policies: list[str] = []
    num_repeats = stack.num_repeats
    if stack.is_first:
        # Layer counts refer to the main stack; the layers before it follow the main stack's first layer.
        return [stack.policy(remat.parse_policies(memory.remat)[0].policy)] * num_repeats
    setting = f"memory.remat = {memory.remat}"
    for span in remat.parse_policies(memory.remat):
        rest = num_repeats - len(layer_policies)
        count = rest if span.layers is None else count_repeats(setting, span.layers, stack)
        if not 0 < count <= rest:
            num_layers = num_repeats * len(stack.pattern.layers)
            raise ValueError(f"{setting}: the stack has only {num_layers} layers; reduce the layer counts")
        layer_policies += [span.policy] * count
    if len(layer_policies) < num_repeats:
        missing_layers = (num_repeats - len(layer_policies)) * len(stack.pattern.layers)
        raise ValueError(f"{setting}: no policy covers the last {missing_layers} layers; add one for them")
    return layer_policies


def split_stacks(model: Chain, memory: Memory) -> list[LayerRange]:
    """Split all stacks into ranges of layers with the same placements and remat policy.

    Args:
        model: the model with whole stacks.
        memory: the placements, and the remat policies.

    Returns:
        The ranges of all stacks, in order; [] if no stack needs a range of its own.

    Raises:
        ValueError: the placements or policies name other numbers of layers than a stack has, or experts that the model
            does not have.
    """
    check_experts(model, memory)
    layer_ranges = []
    for name, stack in model.stacks.items():
        layer_policies = policies(memory, stack)
        placements: dict[str, Placement] = {field: getattr(memory, field) for field in PLACED_FIELDS}
        num_offloaded = {field: placement.num_offloaded(field, stack) for field, placement in placements.items()}
        cuts = {0, stack.num_repeats, *num_offloaded.values()}
        for index in range(1, stack.num_repeats):
            if layer_policies[index] != layer_policies[index - 1]:
                cuts.add(index)
        for first, end in itertools.pairwise(sorted(cuts)):
            layer_range = LayerRange(
                home=name,
                first=first,
                count=end - first,
                total=stack.num_repeats,
                remat=layer_policies[first],
                offloads=end <= num_offloaded["activations"],
            )
            layer_ranges.append(layer_range)
    is_cut = not all(layer_range.is_whole for layer_range in layer_ranges)
    # An unsplit stack also needs a range if its settings come from layer counts: neither the context's policy nor the
    # stages outside the stack have them.
    counts_layers = not remat.is_uniform(memory.remat)
    return layer_ranges if is_cut or counts_layers or memory.activations.is_partial else []


# --- parts of the state -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackPart:
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
        experts: the experts that are in host memory in addition.
    """

    parts: tuple[StackPart, ...]
    num_offloaded: dict[tuple[str, str], int]
    experts: OffloadedExperts = OffloadedExperts()

    @staticmethod
    def one_per_layer(model: Chain, memory: Memory) -> StackParts:
        """Return one part, in a list, for each layer of the stack and of the layers before it."""
        parts = []
        for name, stack in model.stacks.items():
            parts += [StackPart(name, index, 1, name, index) for index in range(stack.num_repeats)]
        return StackParts(tuple(parts), _count_offloaded_layers(model, memory), OffloadedExperts.find(model, memory))

    @staticmethod
    def from_layer_ranges(model: Chain, memory: Memory, layer_ranges: list[LayerRange]) -> StackParts:
        """Return one part for each layer range of the model's stacks; none for whole stacks."""
        parts = tuple(
            StackPart(layer_range.home, layer_range.first, layer_range.count, layer_range.name)
            for layer_range in layer_ranges
        )
        return StackParts(parts, _count_offloaded_layers(model, memory), OffloadedExperts.find(model, memory))

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
        specs = {}
        for group, tree in whole.items():
            parts = {}
            for part in self.parts:
                if tree.get(part.stack):
                    parts[part] = self._part_specs(group, part, tree[part.stack])
            specs[group] = self._replace_stacks(tree, parts)
        return TrainState(**specs)

    def _part_specs(self, group: str, part: StackPart, tree: Nested) -> Nested:
        """Return the specs of a part, given those of its whole stack; {} if it is not in the group."""
        num_offloaded = self.num_offloaded.get((group, part.stack))
        end = part.first + part.count
        is_offloaded = num_offloaded is None or end <= num_offloaded
        offloads_experts = group in self.experts.groups and end <= self.experts.num_layers.get(part.stack, 0)

        def make_part_spec(keypath: tuple[object, ...], spec: TensorSpec) -> TensorSpec:
            part_spec = replace(spec, shape=(part.count, *spec.shape[1:]))
            is_expert = offloads_experts and self.experts.includes(part.stack, path_name(keypath), spec)
            return part_spec if is_offloaded or is_expert else replace(part_spec, memory_kind="device")

        part_specs = jax.tree_util.tree_map_with_path(make_part_spec, tree)
        # Gradient buffers are part of the state only in host memory: on the device they exist only within a step.
        # There are second copies only of state in host memory.
        if group in ("gradient", "spare", "spare_ema") and not is_offloaded:
            return select_offloaded(part_specs)
        return part_specs

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

    def join_stacks(self, state: TrainState, layout: StateLayout, *, copy: bool = True) -> TrainState:
        """Join a state in parts into whole stacks.

        Args:
            state: the state in parts; empty groups stay empty.
            layout: the layout of the whole stacks.
            copy: whether the leaves of the stacks are copies in host memory; otherwise they are `SplitArray`s of the
                parts, or `SplitSpec`s if the state is abstract.
        """

        def join(spec: TensorSpec, *parts: Any) -> jax.Array | SplitArray | SplitSpec:
            if copy:
                return _join_leaf(layout, spec, *parts)
            is_abstract = isinstance(parts[0], jax.ShapeDtypeStruct)
            return SplitSpec(parts) if is_abstract else SplitArray(parts)

        joined_state = {}
        for group, tree in state.items():
            joined_state[group] = {}
            if not tree:
                continue
            # Counters have no stages.
            for stage, specs in layout.specs[group].items():
                parts = self.list_parts(stage)
                if parts and specs:
                    part_trees = [part.select(tree) for part in parts]
                    joined_state[group][stage] = jax.tree.map(join, specs, *part_trees)
                else:
                    joined_state[group][stage] = tree[stage]
        return TrainState(**joined_state)

    def split_state(self, state: TrainState, layout: StateLayout) -> TrainState:
        """Split a state of whole stacks in host memory into parts, and delete the whole stacks.

        Args:
            state: the state of whole stacks, whose leaves may also be `SplitArray`s of the parts.
            layout: the layout of the parts.
        """
        split_state = {}
        for group, tree in state.items():
            parts: dict[StackPart, Nested] = {}
            for stack in self.stacks:
                if tree.get(stack):
                    parts |= self._split_stack(stack, tree[stack], layout.specs[group], layout)
            split_state[group] = self._replace_stacks(tree, parts)
        return TrainState(**split_state)

    def _split_stack(self, stack: str, tree: Nested, specs: Nested, layout: StateLayout) -> dict[StackPart, Nested]:
        """Return the tree of each part of a stack."""
        parts = self.list_parts(stack)
        specs_by_part = {part: flatten(part.select(specs)) for part in parts}
        leaves_by_part: dict[StackPart, dict[str, jax.Array]] = {part: {} for part in parts}
        for path, leaf in flatten(tree).items():
            if isinstance(leaf, SplitArray):
                for part, part_leaf in zip(parts, leaf.parts, strict=True):
                    leaves_by_part[part][path] = part_leaf
                continue
            for part in parts:
                leaves_by_part[part][path] = _slice_leaf(leaf, part, specs_by_part[part][path], layout)
            # Freed leaf by leaf, so that host memory need not hold all whole stacks and all parts at the same time.
            leaf.delete()
        return {part: unflatten_like(part.select(specs), leaves_by_part[part]) for part in parts}


def select_offloaded(specs: Nested) -> Nested:
    """Return the specs of the leaves in host memory, in nested dicts."""
    return unflatten({path: spec for path, spec in flatten(specs).items() if spec.is_offloaded})


def _count_offloaded_layers(model: Chain, memory: Memory) -> dict[tuple[str, str], int]:
    """Return the value of `StackParts.num_offloaded`."""
    num_offloaded = {}
    for stack_name, stack in model.stacks.items():
        for group, placed_field in _PLACEMENT_FIELDS.items():
            placement = getattr(memory, placed_field)
            num_offloaded[group, stack_name] = placement.num_offloaded(placed_field, stack)
    return num_offloaded


def _join_leaf(layout: StateLayout, spec: TensorSpec, *parts: jax.Array) -> jax.Array:
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
