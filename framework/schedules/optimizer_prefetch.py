"""Prefetches the optimizer state of a whole layer, for updates during the backward pass (memory.prefetch = layer).

On TPU only the offloaded state is moved. On CPU the weights and all their state are moved out of the stacks and back
into them: XLA for CPU copies a stack whenever one operation of a loop reads it and another one writes it, as an
in-place update does (with 256 layers the step took nine times as long).

Each iteration of the backward loop starts with two transfers: the previous layer's new state goes to the host, and
this layer's old state comes from the host. The layer's whole backward pass hides both transfers. The layer is then
updated with arrays that are already on the device, and its new state waits for the next iteration. This keeps the
state of two layers on the device, whereas `memory.prefetch = chunk` keeps two chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from plimsoll.framework.layout import (
    Nested,
    StateLayout,
    TensorSpec,
    constrain_row_major,
    fetch_leaf,
    flatten,
    store_leaf,
)
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.group_optimizer import unflatten_like
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.update import (
    GroupLeaves,
    LayerTrainState,
    LayerUpdate,
    LayerUpdateFn,
    slice_layer,
    write_layer,
)
from plimsoll.framework.schedules.backward_state import BackwardState, StagedLayer
from plimsoll.framework.schedules.chunked_update import train_state_specs

Arrays = dict[str, jax.Array]  # leaves by path
Specs = dict[str, TensorSpec]


@dataclass(frozen=True)
class OptimizerPrefetch:
    """Moves the state of single layers between the stacks, which may be in host memory, and the device.

    `begin_loop`, `begin_layer` and `end_loop` are hooks, see `BackwardHooks`.

    Attributes:
        learner: the learner whose optimizer state is moved.
        layout: the layout of the training state, which places each stack.
        moves_all: whether weights, and state that is already on the device, are moved too, and no stack is read
            before it is written.
        gradient_specs: specs of the buffers of gradients, by stage, that are fetched as well; {} if each gradient is on
            the device when its layer is updated.
        writes_second_copy: whether a layer's new state is written to other stacks than it is read from, with
            `end_loop`. The second half of a layer's state is then fetched when the first half has arrived: the compiler
            for TPU starts a transfer early only if another one waits for it.
    """

    learner: Learner
    layout: StateLayout
    moves_all: bool = False
    gradient_specs: Nested = field(default_factory=dict)
    writes_second_copy: bool = False

    def begin_loop(self, backward_state: BackwardState, stack: str, index: jax.Array) -> BackwardState:
        """Start fetching the state of the first layer to the device."""
        fetch = self._fetch_in_halves if self.writes_second_copy else _fetch
        groups = {}
        for group, specs in self._list_groups(stack):
            stacks = self._select_stacks(backward_state, group).parts
            arriving = {part: fetch(part_specs, stacks[part], index) for part, part_specs in specs.parts.items()}
            groups[group.label] = GroupLeaves(**arriving)
        return replace(backward_state, staged_layer=StagedLayer(groups, index))

    def begin_layer(self, backward_state: BackwardState, stack: str, index: jax.Array) -> BackwardState:
        """Start writing the new state of the layer that was updated last, and fetching that of the layer at `index`.

        No stack is read and written at the same time, because the compiler does not know that two layers do not
        overlap. For transfers to and from the host, half of the bytes are read first and the other half is written
        first, which keeps the link busy in both directions.
        """
        staged_layer = backward_state.staged_layer
        assert staged_layer is not None
        new_stacks = {}
        groups = {}
        for group, specs in self._list_groups(stack):
            stacks = self._select_stacks(backward_state, group).parts
            leaving = staged_layer.groups[group.label].parts
            changed: dict[str, Arrays] = {}
            arriving: dict[str, Arrays] = {}
            # Weights, optimizer state and averages are exchanged separately; each moves half of its own bytes first.
            for part, part_specs in specs.parts.items():
                # If everything is moved, nothing crosses a link: all leaves are written before any is read.
                arrives_first = set[str]() if self.moves_all else _choose_half(part_specs)
                first_specs = {path: spec for path, spec in part_specs.items() if path in arrives_first}
                last_specs = {path: spec for path, spec in part_specs.items() if path not in arrives_first}
                fetched = _fetch(first_specs, stacks[part], index)
                changed[part] = _store(part_specs, stacks[part], leaving[part], staged_layer.index)
                # Reading from the new stacks forces the compiler to write first.
                fetched |= _fetch(last_specs, changed[part], index)
                # In the order of the specs, whichever was fetched first.
                arriving[part] = {path: fetched[path] for path in part_specs}
            new_stacks[group.label] = GroupLeaves(**changed)
            groups[group.label] = GroupLeaves(**arriving)
        backward_state = _replace_stacks(backward_state, stack, new_stacks)
        return replace(backward_state, staged_layer=StagedLayer(groups, index))

    def end_loop(self, backward_state: BackwardState, stack: str) -> BackwardState:
        """Start writing the last layer's new state to the stacks."""
        staged_layer = backward_state.staged_layer
        assert staged_layer is not None
        new_stacks = {}
        for group, specs in self._list_groups(stack):
            stacks = self._select_stacks(backward_state, group).parts
            leaving = staged_layer.groups[group.label].parts
            changed = {}
            for part, part_specs in specs.parts.items():
                layer_leaves = leaving[part]
                if self.writes_second_copy:
                    layer_leaves = self._constrain(part_specs, layer_leaves)
                changed[part] = _store(part_specs, stacks[part], layer_leaves, staged_layer.index)
            new_stacks[group.label] = GroupLeaves(**changed)
        # The next stack's layers have other shapes, so nothing is staged after the loop.
        return replace(_replace_stacks(backward_state, stack, new_stacks), staged_layer=None)

    def update(
        self, update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision, staged_layer: StagedLayer
    ) -> tuple[LayerUpdate, GroupLeaves[jax.Array]]:
        """Update one layer whose state has arrived, with the same numbers as `update_all_layers`.

        Args:
            update: the update of one layer of a group of the stack.
            train_state: stacked weights, optimizer state and averages, and the gradients of only that layer; if
                gradients were fetched, those are used.
            decision: see `Learner.decide`.
            staged_layer: the layer's moved state.

        Returns:
            (new stacks of weights, optimizer state and averages, in which moved leaves still have their old values;
            the layer's new moved leaves, to be stored later).
        """
        group = update.optimizer.group
        weights = train_state.weights
        entry = train_state.entry
        average = train_state.average
        specs: GroupLeaves[TensorSpec] = GroupLeaves.from_train_state(
            train_state_specs(self.layout, self.learner, group, {})
        )
        arrived = staged_layer.groups[group.label]
        index = staged_layer.index
        layer = LayerTrainState(
            # Offloaded weights are fetched here: they are prefetched only if everything is, on CPU.
            weights=_complete_layer(specs.weights, weights, arrived.weights, index),
            grads=unflatten_like(train_state.grads, arrived.grads) if arrived.grads else train_state.grads,
            entry=_complete_layer(specs.entry, entry, arrived.entry, index),
            average=_complete_layer(specs.average, average, arrived.average, index),
        )
        new = update(layer, replace(decision, layer=decision.layer + index))
        # Leaves that stay on the device are written immediately; moved leaves are written in the next iteration.
        weight_stacks, leaving_weights = _store_resident(specs.weights, weights, new.weights, arrived.weights, index)
        entry_stacks, leaving_entry = _store_resident(specs.entry, entry, new.entry, arrived.entry, index)
        average_stacks, leaving_average = _store_resident(specs.average, average, new.average, arrived.average, index)
        leaving = GroupLeaves(leaving_weights, {}, leaving_entry, leaving_average)
        return LayerUpdate(weight_stacks, entry_stacks, average_stacks), leaving

    def _fetch_in_halves(self, specs: Specs, stacks: Arrays, index: jax.Array) -> Arrays:
        """Start fetching one layer's leaves to the device, in two parts of about the same size."""
        arrives_first = _choose_half(specs)
        first_specs = {path: spec for path, spec in specs.items() if path in arrives_first}
        last_specs = {path: spec for path, spec in specs.items() if path not in arrives_first}
        fetched = _fetch(first_specs, stacks, index)
        if last_specs:
            fetched |= _fetch(last_specs, stacks, self._wait_for(first_specs, fetched, index))
        return {path: fetched[path] for path in specs}

    def _wait_for(self, specs: Specs, layer_leaves: Arrays, index: jax.Array) -> jax.Array:
        """Return the index, but only when the leaves of a layer have arrived.

        A barrier would be removed before the compiler orders transfers. So an element of each leaf takes part in the
        result, which it cannot change.
        """

        def read(index: jax.Array, *shards: jax.Array) -> jax.Array:
            least = index
            for shard in shards:
                least = jnp.minimum(least, shard[(0,) * shard.ndim].astype(index.dtype))
            return jnp.maximum(least, index)

        # Each device reads its own shard. The first axis of a stack's spec is the layer axis.
        axes = [PartitionSpec(*specs[path].mesh_axes[1:]) for path in layer_leaves]
        mesh = self.layout.mesh
        run = jax.shard_map(
            read, mesh=mesh, in_specs=(PartitionSpec(), *axes), out_specs=PartitionSpec(), check_vma=False
        )
        return run(index, *layer_leaves.values())

    def _constrain(self, specs: Specs, layer_leaves: Arrays) -> Arrays:
        """Constrain a layer's leaves to the layout of the stacks, which the loop only writes."""
        # The first axis of a stack's spec is the layer axis.
        return {
            path: constrain_row_major(leaf, specs[path].mesh_axes[1:], self.layout.mesh)
            for path, leaf in layer_leaves.items()
        }

    def _list_groups(self, stack: str) -> list[tuple[ParamGroup, GroupLeaves[TensorSpec]]]:
        """Return the groups of a stack's parameters, with the specs of their moved leaves."""
        groups = []
        for group in self.learner.groups:
            if group.stage != stack:
                continue
            gradient_specs = self.learner.select(self.gradient_specs, group) if self.gradient_specs else {}
            specs: GroupLeaves[TensorSpec] = GroupLeaves.from_train_state(
                train_state_specs(self.layout, self.learner, group, gradient_specs)
            )
            if not self.moves_all:
                specs = GroupLeaves(
                    weights={},
                    grads=specs.grads,
                    entry={path: spec for path, spec in specs.entry.items() if spec.is_offloaded},
                    average={path: spec for path, spec in specs.average.items() if spec.is_offloaded},
                )
            groups.append((group, specs))
        return groups

    def _select_stacks(self, backward_state: BackwardState, group: ParamGroup) -> GroupLeaves[jax.Array]:
        """Return all stacks of a group's weights and state, moved or not."""
        weights = self.learner.select(backward_state.parameter, group)
        entry = backward_state.optimizer[group.stage][group.label]
        average = self.learner.select(backward_state.ema, group) if backward_state.ema else {}
        gradients = self.learner.select(backward_state.gradient, group) if self.gradient_specs else {}
        return GroupLeaves(flatten(weights), flatten(gradients), flatten(entry), flatten(average))


def _replace_stacks(
    backward_state: BackwardState, stack: str, stacks: dict[str, GroupLeaves[jax.Array]]
) -> BackwardState:
    """Return the backward state with other values for one stack.

    Args:
        backward_state: the state of the backward pass.
        stack: name of the stack.
        stacks: the new stacked leaves, by the label of their parameter group.
    """
    # A completely frozen stack has neither trainable weights nor optimizer state.
    if not stacks:
        return backward_state
    # Leaves that do not belong to these groups keep their values.
    weights = flatten(backward_state.parameter[stack])
    entries = dict(backward_state.optimizer[stack])
    averages = flatten(backward_state.ema.get(stack, {}))
    for label, group_stacks in stacks.items():
        weights |= group_stacks.weights
        entries[label] = unflatten_like(entries[label], group_stacks.entry)
        averages |= group_stacks.average
    ema = backward_state.ema
    if averages:
        ema = {**ema, stack: unflatten_like(ema[stack], averages)}
    stack_weights = unflatten_like(backward_state.parameter[stack], weights)
    return replace(
        backward_state,
        parameter={**backward_state.parameter, stack: stack_weights},
        optimizer={**backward_state.optimizer, stack: entries},
        ema=ema,
    )


def _complete_layer(specs: Specs, stacks: Nested, arrived: Arrays, index: jax.Array) -> Nested:
    """Return one layer of some stacks: its prefetched leaves as they are, the other leaves fetched now."""
    flat_stacks = flatten(stacks)
    late_specs = {path: specs[path] for path in flat_stacks if path not in arrived}
    return unflatten_like(stacks, _fetch(late_specs, flat_stacks, index) | arrived)


def _store_resident(
    specs: Specs, stacks: Nested, new: Nested, arrived: Arrays, index: jax.Array
) -> tuple[Nested, Arrays]:
    """Write a layer's new leaves into the stacks, except prefetched ones: (new stacks, those new leaves)."""
    new_leaves = flatten(new)
    staying = {path: leaf for path, leaf in new_leaves.items() if path not in arrived}
    leaving = {path: leaf for path, leaf in new_leaves.items() if path in arrived}
    return unflatten_like(stacks, _store(specs, flatten(stacks), staying, index)), leaving


def _fetch(specs: Specs, stacks: Arrays, index: jax.Array) -> Arrays:
    """Start fetching one layer's leaves to the device."""
    return {path: fetch_leaf(spec, slice_layer(stacks[path], index)) for path, spec in specs.items()}


def _store(specs: Specs, stacks: Arrays, layer_leaves: Arrays, index: jax.Array) -> Arrays:
    """Write a layer's leaves into the stacks; leaves of offloaded stacks are transferred to the host."""
    new_stacks = dict(stacks)
    for path, leaf in layer_leaves.items():
        new_stacks[path] = write_layer(stacks[path], store_leaf(specs[path], leaf), index)
    return new_stacks


def _choose_half(specs: Specs) -> set[str]:
    """Choose paths that make up about half of the bytes, including the largest leaf."""
    taken_bytes = 0
    left_bytes = 0
    paths = set()
    # Each leaf goes to the half with fewer bytes so far.
    largest_first = sorted(specs.items(), key=lambda item: -item[1].num_bytes)
    for path, spec in largest_first:
        if taken_bytes <= left_bytes:
            taken_bytes += spec.num_bytes
            paths.add(path)
        else:
            left_bytes += spec.num_bytes
    return paths
