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
        own = replace(spec, shape=(1, *spec.shape[1:]))
        here = group in ("parameter", "frozen") and hosted_units is not None and index >= hosted_units
        return replace(own, memory_kind="device") if here else own

    def cut(group: str, tree: Nested) -> list[Nested]:
        return [jax.tree.map(partial(part, group, index), tree) for index in range(num_units)]

    return {group: _on_stack(tree, lambda tree, g=group: cut(g, tree)) for group, tree in specs.items()}


def _on_stack(tree: Any, change: Callable[[Any], Any]) -> Any:
    return {**tree, STACK: change(tree[STACK])} if isinstance(tree, dict) and tree.get(STACK) else tree


def part_path(path: str, index: int) -> str:
    """The path of a unit's part of a leaf: stack/block0/... -> stack/3/block0/..."""
    stage, rest = path.split("/", 1)
    return f"{stage}/{index}/{rest}"


def joined(state: Nested, layout: StateLayout) -> Nested:
    """A state in parts as one of whole stacks, which are copies in host memory.

    Args:
        state: by group.
        layout: of the whole stacks.
    """

    def join(spec: TensorSpec, *parts: jax.Array) -> jax.Array:
        sharding = layout.sharding(replace(spec, memory_kind="pinned_host"))
        shards = [[shard.data for shard in part.addressable_shards] for part in parts]
        pieces = []
        for number, shard in enumerate(parts[0].addressable_shards):
            whole = np.concatenate([np.asarray(own[number]) for own in shards])
            kind = jax.sharding.SingleDeviceSharding(shard.device, memory_kind="pinned_host")
            pieces.append(jax.device_put(whole, kind))
        return jax.make_array_from_single_device_arrays(spec.shape, sharding, pieces)

    def whole(group: str, tree: Nested) -> Nested:
        return _on_stack(tree, lambda parts: jax.tree.map(join, layout.specs[group][STACK], *parts))

    return {group: whole(group, tree) for group, tree in state.items()}


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

    def parts(specs: list[Nested], tree: Nested) -> list[Nested]:
        own = [flatten(part) for part in specs]
        found: list[dict[str, jax.Array]] = [{} for _ in specs]
        for path, leaf in flatten(tree).items():
            for index, part in enumerate(own):
                found[index][path] = _slice(leaf, index, part[path], layout)
            leaf.delete()
        return [
            jax.tree.unflatten(jax.tree.structure(one), [new[path] for path in flat])
            for one, new, flat in zip(specs, found, own, strict=True)
        ]

    return {
        group: _on_stack(tree, lambda stack, g=group: parts(layout.specs[g][STACK], stack))
        for group, tree in state.items()
    }


def _slice(leaf: jax.Array, index: int, spec: TensorSpec, layout: StateLayout) -> jax.Array:
    pieces = []
    for shard in leaf.addressable_shards:
        kind = jax.sharding.SingleDeviceSharding(shard.device, memory_kind=spec.memory_kind)
        pieces.append(jax.device_put(np.array(np.asarray(shard.data)[index : index + 1]), kind))
    return jax.make_array_from_single_device_arrays(spec.shape, layout.sharding(spec), pieces)
