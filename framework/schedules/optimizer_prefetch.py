"""Prefetches the optimizer state of a whole layer, for updates during the backward pass (memory.prefetch = layer).

On TPU only the offloaded state is moved. On CPU the weights and all their state are moved out of the stacks and back
into them: XLA for CPU copies a stack whenever one operation of a loop reads it and another one writes it, as an
in-place update does (with 256 layers the step took nine times as long).

Each iteration of the backward loop starts with two transfers: the previous layer's new state goes to the host, and
this layer's old state comes from the host. The layer's whole backward pass hides both transfers. The layer is then
updated with arrays that are already on the device, and its new state waits for the next iteration. This keeps the
state of two layers on the device, whereas `memory.prefetch = piece` keeps two chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from plimsoll.framework.layout import Nested, StateLayout, fetch_leaf, flatten, store_leaf
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.state import unflatten_like
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate, LayerUpdateFn, slice_layer, write_layer
from plimsoll.framework.schedules.streamed import train_state_specs

Flat = dict[str, Any]


class MovedLeaves(NamedTuple):
    """The leaves, or specs, of one layer's weights and state that are moved, for one parameter group, by path."""

    weights: Flat
    entry: Flat  # optimizer state
    average: Flat


class PrefetchedState(NamedTuple):
    """The moved state of one layer, on the device.

    Attributes:
        groups: the moved leaves, by the label of the parameter group.
        index: int32 scalar, index of the layer.
    """

    groups: dict[str, MovedLeaves]
    index: jax.Array


@dataclass(frozen=True)
class OptimizerPrefetch:
    """Moves the state of single layers between the stacks, which may be in host memory, and the device.

    Attributes:
        learner: the learner whose optimizer state is moved.
        layout: the layout of the training state, which places each stack.
        moves_all: whether weights, and state that is already on the device, are moved too, and no stack is read
            before it is written.
    """

    learner: Learner
    layout: StateLayout
    moves_all: bool = False

    def fetch(self, backward_state: Nested, stack: str, index: jax.Array) -> PrefetchedState:
        """Start fetching the state of the layer at `index` to the device.

        Args:
            backward_state: the state of the backward pass, which holds the stacks.
            stack: name of the stack.
            index: index of the layer, int32.
        """
        groups = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(backward_state, group)
            groups[group.label] = MovedLeaves(
                _fetch_leaves(specs.weights, stacks.weights, index),
                _fetch_leaves(specs.entry, stacks.entry, index),
                _fetch_leaves(specs.average, stacks.average, index),
            )
        return PrefetchedState(groups, index)

    def store(self, backward_state: Nested, stack: str, layer_state: PrefetchedState) -> Nested:
        """Start writing a layer's new state to the stacks; return the new backward state.

        Args:
            backward_state: the state of the backward pass, which holds the stacks.
            stack: name of the stack.
            layer_state: the layer's new state, on the device.
        """
        new_stacks = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(backward_state, group)
            leaving = layer_state.groups[group.label]
            new_stacks[group.label] = MovedLeaves(
                _store_leaves(specs.weights, stacks.weights, leaving.weights, layer_state.index),
                _store_leaves(specs.entry, stacks.entry, leaving.entry, layer_state.index),
                _store_leaves(specs.average, stacks.average, leaving.average, layer_state.index),
            )
        return _with_stacks(backward_state, stack, new_stacks)

    def exchange(
        self, backward_state: Nested, stack: str, layer_state: PrefetchedState, index: jax.Array
    ) -> tuple[Nested, PrefetchedState]:
        """Start writing one layer's new state to the stacks, and fetching another layer's state from them.

        Args:
            backward_state: the state of the backward pass, which holds the stacks.
            stack: name of the stack.
            layer_state: new state of the layer that was updated last.
            index: index of the layer whose state is fetched, int32.

        Returns:
            (new backward state, state of the layer at `index`).
        """
        new_stacks = {}
        arriving = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(backward_state, group)
            leaving = layer_state.groups[group.label]
            part_stacks: list[Flat] = []
            part_leaves: list[Flat] = []
            # Weights, optimizer state and averages are exchanged separately; each moves half of its own bytes first.
            for part in zip(specs, stacks, leaving, strict=True):
                changed_stacks, arriving_leaves = self._exchange(*part, layer_state.index, index)
                part_stacks.append(changed_stacks)
                part_leaves.append(arriving_leaves)
            new_stacks[group.label] = MovedLeaves(*part_stacks)
            arriving[group.label] = MovedLeaves(*part_leaves)
        return _with_stacks(backward_state, stack, new_stacks), PrefetchedState(arriving, index)

    def update(
        self,
        group: ParamGroup,
        update: LayerUpdateFn,
        train_state: LayerTrainState,
        decision: Decision,
        state: PrefetchedState,
    ) -> tuple[LayerUpdate, MovedLeaves]:
        """Update one layer whose state has arrived, with the same numbers as `update_all_layers`.

        Args:
            group: parameters of a stack.
            update: the update of one layer.
            train_state: stacked weights, the gradients of only that layer, stacked optimizer state and averages.
            decision: see `Learner.decide`.
            state: the layer's moved state.

        Returns:
            (new stacks of weights, optimizer state and averages, in which moved leaves still have their old values;
            the layer's new moved leaves, to be stored later).
        """
        weight_specs, entry_specs, average_specs = self._specs(group)
        arrived = state.groups[group.label]
        index = state.index
        layer_state = LayerTrainState(
            # Offloaded weights are fetched here: they are prefetched only if everything is, on CPU.
            weights=_fetch_layer(weight_specs, train_state.weights, arrived.weights, index),
            grads=train_state.grads,
            entry=_fetch_layer(entry_specs, train_state.entry, arrived.entry, index),
            average=_fetch_layer(average_specs, train_state.average, arrived.average, index),
        )
        new = update(layer_state, replace(decision, layer=decision.layer + index))
        # Leaves that stay on the device are written immediately; moved leaves are written in the next iteration.
        new_stacks = LayerUpdate(
            _write_resident(weight_specs, train_state.weights, new.weights, arrived.weights, index),
            _write_resident(entry_specs, train_state.entry, new.entry, arrived.entry, index),
            _write_resident(average_specs, train_state.average, new.average, arrived.average, index),
        )
        leaving = MovedLeaves(
            _select_moved(new.weights, arrived.weights),
            _select_moved(new.entry, arrived.entry),
            _select_moved(new.average, arrived.average),
        )
        return new_stacks, leaving

    def _exchange(
        self, specs: Flat, stacks: Flat, leaving: Flat, leaving_index: jax.Array, arriving_index: jax.Array
    ) -> tuple[Flat, Flat]:
        """Write the leaving layer's leaves, and fetch the arriving layer's: (new stacks, arriving leaves).

        No stack is read and written at the same time, because the compiler does not know that two layers do not
        overlap. For transfers to and from the host, half of the bytes are read first and the other half is written
        first, which keeps the link busy in both directions.
        """
        # If everything is moved, nothing crosses a link: all leaves are written before any is read.
        arrives_first = set[str]() if self.moves_all else _choose_half(specs)
        first_specs = {path: specs[path] for path in specs if path in arrives_first}
        arriving = _fetch_leaves(first_specs, stacks, arriving_index)
        new_stacks = _store_leaves(specs, stacks, leaving, leaving_index)
        # Reading from the new stacks forces the compiler to write first.
        last_specs = {path: specs[path] for path in specs if path not in arrives_first}
        arriving |= _fetch_leaves(last_specs, new_stacks, arriving_index)
        # In the order of the specs, whichever was fetched first.
        return new_stacks, {path: arriving[path] for path in specs}

    def _groups(self, stack: str) -> list[tuple[ParamGroup, MovedLeaves]]:
        """Return the groups of a stack's parameters, with the specs of their moved leaves."""

        def select_moving(specs: Nested) -> Flat:
            flat_specs = flatten(specs)
            if self.moves_all:
                return flat_specs
            return {path: spec for path, spec in flat_specs.items() if spec.memory_kind != "device"}

        groups = []
        for group in self.learner.groups:
            if group.stage != stack:
                continue
            weight_specs, entry_specs, average_specs = self._specs(group)
            moving_weights = select_moving(weight_specs) if self.moves_all else {}
            moving_state = MovedLeaves(moving_weights, select_moving(entry_specs), select_moving(average_specs))
            groups.append((group, moving_state))
        return groups

    def _specs(self, group: ParamGroup) -> tuple[Nested, Nested, Nested]:
        """Return the specs of the stacks of weights, of optimizer state and of averages."""
        specs = train_state_specs(self.layout, self.learner, group, {})
        return specs.weights, specs.entry, specs.average

    def _stacks(self, backward_state: Nested, group: ParamGroup) -> MovedLeaves:
        """Return all stacks of a group's weights and state, moved or not."""
        weights = self.learner.select(backward_state["parameter"], group)
        entry = backward_state["optimizer"][group.stage][group.label]
        average = self.learner.select(backward_state["ema"], group) if backward_state["ema"] else {}
        return MovedLeaves(flatten(weights), flatten(entry), flatten(average))


def _with_stacks(backward_state: Nested, stack: str, stacks: dict[str, MovedLeaves]) -> Nested:
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
    weights = flatten(backward_state["parameter"][stack])
    entries = dict(backward_state["optimizer"][stack])
    averages = flatten(backward_state["ema"].get(stack, {}))
    for label, group_stacks in stacks.items():
        weights |= group_stacks.weights
        entries[label] = unflatten_like(entries[label], group_stacks.entry)
        averages |= group_stacks.average
    ema = backward_state["ema"]
    if averages:
        stack_averages = unflatten_like(backward_state["ema"][stack], averages)
        ema = {**backward_state["ema"], stack: stack_averages}
    stack_weights = unflatten_like(backward_state["parameter"][stack], weights)
    return {
        **backward_state,
        "parameter": {**backward_state["parameter"], stack: stack_weights},
        "optimizer": {**backward_state["optimizer"], stack: entries},
        "ema": ema,
    }


def _fetch_layer(specs: Nested, stacks: Nested, arrived: Flat, index: jax.Array) -> Nested:
    """Return one layer of some stacks: its prefetched leaves as they are, the other leaves fetched now."""
    flat_specs = flatten(specs)

    layer_leaves = {}
    for path, stack in flatten(stacks).items():
        if path in arrived:
            layer_leaves[path] = arrived[path]
        else:
            layer_leaves[path] = fetch_leaf(flat_specs[path], slice_layer(stack, index))
    return unflatten_like(stacks, layer_leaves)


def _write_resident(specs: Nested, stacks: Nested, layer_state: Nested, arrived: Flat, index: jax.Array) -> Nested:
    """Write a layer's new leaves into the stacks, except prefetched ones, which the next iteration writes."""
    staying = {path: leaf for path, leaf in flatten(layer_state).items() if path not in arrived}
    new_stacks = _store_leaves(flatten(specs), flatten(stacks), staying, index)
    return unflatten_like(stacks, new_stacks)


def _select_moved(layer_state: Nested, arrived: Flat) -> Flat:
    """Return the new values of a layer's prefetched leaves."""
    return {path: leaf for path, leaf in flatten(layer_state).items() if path in arrived}


def _fetch_leaves(specs: Flat, stacks: Flat, index: jax.Array) -> Flat:
    """Start fetching one layer's leaves to the device."""
    layer_leaves = {}
    for path, spec in specs.items():
        leaf = slice_layer(stacks[path], index)
        layer_leaves[path] = fetch_leaf(spec, leaf)
    return layer_leaves


def _store_leaves(specs: Flat, stacks: Flat, layer_state: Flat, index: jax.Array) -> Flat:
    """Write a layer's leaves into the stacks; leaves of offloaded stacks are transferred to the host."""
    new_stacks = dict(stacks)
    for path, leaf in layer_state.items():
        stored_leaf = store_leaf(specs[path], leaf)
        new_stacks[path] = write_layer(stacks[path], stored_leaf, index)
    return new_stacks


def _choose_half(specs: Flat) -> set[str]:
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
