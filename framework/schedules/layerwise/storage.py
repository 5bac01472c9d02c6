"""A stack held in parts, one for each unit, and as a whole: how a state is stored is a matter of the run.

`memory.update = layer_programs` takes a layer's arrays one by one, so there a group of the state has for its stack a
list of trees, each with a leading axis of one unit. What a checkpoint holds, and what every other schedule has, are
whole stacks; between the two, arrays pass through host memory, a leaf at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from framework.layout import Nested, StateLayout, TensorSpec, flatten

STACK = "stack"


def in_parts(specs: Nested, num_units: int, hosted_units: int | None = None) -> Nested:
    """The specs of a state whose stacks are lists of parts.

    Args:
        specs: by group, of whole stacks.
        num_units: of the stack.
        hosted_units: weights of no more than the first so many parts are tagged for the host; None leaves tags alone.
    """

    def part(group: str, index: int, spec: TensorSpec) -> TensorSpec:
        assert spec.shape[0] == num_units, f"{spec.shape} is no stack of {num_units}"
        part_spec = replace(spec, shape=(1, *spec.shape[1:]))
        # Weights alone are hosted by layer; optimizer state and gradients are where the tags say, in all units.
        is_weight = group in ("parameter", "frozen")
        if is_weight and hosted_units is not None and index >= hosted_units:
            return replace(part_spec, memory_kind="device")
        return part_spec

    def cut(group: str, tree: Nested) -> list[Nested]:
        return [jax.tree.map(partial(part, group, index), tree) for index in range(num_units)]

    return {group: _on_stack(tree, partial(cut, group)) for group, tree in specs.items()}


def _on_stack(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A group of the state with its stack changed; one without a stack (counters, say) as it is."""
    if isinstance(tree, dict) and tree.get(STACK):
        return {**tree, STACK: change(tree[STACK])}
    return tree


def part_path(path: str, index: int) -> str:
    """The path of a unit's part of a leaf: stack/block0/... -> stack/3/block0/..."""
    stage, path_in_stage = path.split("/", 1)
    return f"{stage}/{index}/{path_in_stage}"


def joined(state: Nested, layout: StateLayout) -> Nested:
    """A state in parts as one of whole stacks, which are copies in host memory.

    Args:
        state: by group.
        layout: of the whole stacks.
    """

    def join(spec: TensorSpec, *parts: jax.Array) -> jax.Array:
        sharding = layout.sharding(replace(spec, memory_kind="pinned_host"))
        shards_by_part = [[shard.data for shard in part.addressable_shards] for part in parts]
        stack_shards = []
        # The axis of units is never sharded, so a device's shard of the stack is made of its own shards of the parts.
        for number, shard in enumerate(parts[0].addressable_shards):
            unit_arrays = [np.asarray(shards[number]) for shards in shards_by_part]
            stack_array = np.concatenate(unit_arrays)
            host_sharding = jax.sharding.SingleDeviceSharding(shard.device, memory_kind="pinned_host")
            stack_shards.append(jax.device_put(stack_array, host_sharding))
        return jax.make_array_from_single_device_arrays(spec.shape, sharding, stack_shards)

    def join_parts(group: str, parts: list[Nested]) -> Nested:
        return jax.tree.map(join, layout.specs[group][STACK], *parts)

    return {group: _on_stack(tree, partial(join_parts, group)) for group, tree in state.items()}


def before_cut(layout: StateLayout) -> Nested:
    """The specs that `cut` takes: whole stacks are in host memory."""

    def hosted(tree: Nested) -> Nested:
        return jax.tree.map(lambda spec: replace(spec, memory_kind="pinned_host"), tree)

    return {group: _on_stack(tree, hosted) for group, tree in layout.kept.items()}


def cut(state: Nested, layout: StateLayout) -> Nested:
    """A state of whole stacks, which are in host memory and gone afterwards, in parts.

    Args:
        state: by group.
        layout: of the parts.
    """

    def cut_stack(group: str, tree: Nested) -> list[Nested]:
        specs = layout.specs[group][STACK]
        specs_by_unit = [flatten(part) for part in specs]
        leaves_by_unit: list[dict[str, jax.Array]] = [{} for _ in specs]
        for path, leaf in flatten(tree).items():
            for index, unit_specs in enumerate(specs_by_unit):
                leaves_by_unit[index][path] = _slice(leaf, index, unit_specs[path], layout)
            # A leaf at a time, so that host memory need not hold whole stacks and parts together.
            leaf.delete()
        parts = []
        for part, unit_specs, unit_leaves in zip(specs, specs_by_unit, leaves_by_unit, strict=True):
            leaves = [unit_leaves[path] for path in unit_specs]
            parts.append(jax.tree.unflatten(jax.tree.structure(part), leaves))
        return parts

    return {group: _on_stack(tree, partial(cut_stack, group)) for group, tree in state.items()}


def _slice(
    leaf: jax.Array,
    index: int,
    spec: TensorSpec,
    layout: StateLayout,
) -> jax.Array:
    """One unit's part [1, ...] of a stacked leaf, in the memory that `spec` says."""
    part_shards = []
    for shard in leaf.addressable_shards:
        sharding = jax.sharding.SingleDeviceSharding(shard.device, memory_kind=spec.memory_kind)
        unit_view = np.asarray(shard.data)[index : index + 1]
        # A copy: JAX may use a NumPy array's memory as it is, and this view's is that of the whole stack.
        unit_array = np.array(unit_view)
        part_shards.append(jax.device_put(unit_array, sharding))
    return jax.make_array_from_single_device_arrays(spec.shape, layout.sharding(spec), part_shards)
