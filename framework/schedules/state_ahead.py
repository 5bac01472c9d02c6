"""Prefetch of a whole layer's state during the backward pass, for updates in the backward pass.

On TPU, with memory.prefetch = unit, state in host memory is moved. On CPU the weights and all their state are moved,
out of the stacks and back into them: XLA for CPU copies a stack whenever one operation of a loop reads it and another
one writes it, as an in-place update does (with 256 layers the step took nine times as long).

Each iteration of the backward loop starts with two transfers: the previous layer's new state goes to the host, and
this layer's old state comes from the host. The layer's whole backward pass hides both transfers. The layer is then
updated with arrays that are already on the device, and its new state waits for the next iteration. This keeps the
state of two layers on the device, whereas `pieces` keeps two chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from plimsoll.framework.layout import Nested, StateLayout, fetch_leaf, flatten, store_leaf
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.units import (
    Bundle,
    Decision,
    Group,
    UnitUpdate,
    Update,
    in_structure,
    unit_at,
    with_unit,
)
from plimsoll.framework.schedules.streamed import bundle_specs

Flat = dict[str, Any]


class Moving(NamedTuple):
    """The leaves, or specs, of one layer's weights and state that are moved, for one parameter group, by path."""

    weights: Flat
    entry: Flat  # optimizer state
    average: Flat


class UnitState(NamedTuple):
    """The moved state of one layer, on the device.

    Attributes:
        groups: the moved leaves, by the label of the parameter group.
        index: int32 scalar, index of the layer.
    """

    groups: dict[str, Moving]
    index: jax.Array


@dataclass(frozen=True)
class StateAhead:
    """Moves the state of a stack's layers between the stacks, on the host or not, and the device.

    Attributes:
        moves_all: whether weights, and state that is already on the device, are moved too, and no stack is read
            before it is written.
    """

    learner: Learner
    layout: StateLayout
    moves_all: bool = False

    def fetched(
        self,
        work: Nested,
        stack: str,
        index: jax.Array,
    ) -> UnitState:
        """Start fetching the state of the layer at `index` to the device."""
        groups = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(work, group)
            groups[group.label] = Moving(
                _fetched(specs.weights, stacks.weights, index),
                _fetched(specs.entry, stacks.entry, index),
                _fetched(specs.average, stacks.average, index),
            )
        return UnitState(groups, index)

    def stored(
        self,
        work: Nested,
        stack: str,
        unit: UnitState,
    ) -> Nested:
        """Start writing a layer's new state to the stacks; return the new backward state."""
        new_stacks = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(work, group)
            leaving = unit.groups[group.label]
            new_stacks[group.label] = Moving(
                _stored(specs.weights, stacks.weights, leaving.weights, unit.index),
                _stored(specs.entry, stacks.entry, leaving.entry, unit.index),
                _stored(specs.average, stacks.average, leaving.average, unit.index),
            )
        return _with_stacks(work, stack, new_stacks)

    def exchanged(
        self,
        work: Nested,
        stack: str,
        unit: UnitState,
        index: jax.Array,
    ) -> tuple[Nested, UnitState]:
        """Start writing a layer's new state to the stacks, and fetching the state of the layer at `index` from them.

        Returns:
            (new backward state, state of the layer at `index`).
        """
        new_stacks = {}
        arriving = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(work, group)
            leaving = unit.groups[group.label]
            part_stacks: list[Flat] = []
            part_leaves: list[Flat] = []
            # Weights, optimizer state and averages are exchanged separately; each moves half of its own bytes first.
            for part in zip(specs, stacks, leaving, strict=True):
                changed_stacks, arriving_leaves = self._exchange(*part, unit.index, index)
                part_stacks.append(changed_stacks)
                part_leaves.append(arriving_leaves)
            new_stacks[group.label] = Moving(*part_stacks)
            arriving[group.label] = Moving(*part_leaves)
        return _with_stacks(work, stack, new_stacks), UnitState(arriving, index)

    def update(
        self,
        group: Group,
        update: UnitUpdate,
        bundle: Bundle,
        decision: Decision,
        state: UnitState,
    ) -> tuple[Update, Moving]:
        """Update one layer whose state has arrived, with the same numbers as `all_units`.

        Args:
            group: parameters of a stack.
            update: the update of one layer.
            bundle: stacked weights, the gradients of only that layer, stacked optimizer state and averages.
            decision: see `Learner.decide`.
            state: the layer's moved state.

        Returns:
            (new stacks of weights, optimizer state and averages, in which moved leaves still have their old values;
            the layer's new moved leaves, to be stored later).
        """
        weights, unit_grads, entry, average = bundle
        weight_specs, entry_specs, average_specs = self._specs(group)
        arrived = state.groups[group.label]
        index = state.index
        new_weights, new_entry, new_average = update(
            # Offloaded weights are fetched here: they are prefetched only if everything is, on CPU.
            _fetch_layer(weight_specs, weights, arrived.weights, index),
            unit_grads,
            _fetch_layer(entry_specs, entry, arrived.entry, index),
            _fetch_layer(average_specs, average, arrived.average, index),
            decision._replace(layer=decision.layer + index),
        )
        # Leaves that stay on the device are written immediately; moved leaves are written in the next iteration.
        new_stacks = (
            _with_staying(weight_specs, weights, new_weights, arrived.weights, index),
            _with_staying(entry_specs, entry, new_entry, arrived.entry, index),
            _with_staying(average_specs, average, new_average, arrived.average, index),
        )
        leaving = Moving(
            _leaving(new_weights, arrived.weights),
            _leaving(new_entry, arrived.entry),
            _leaving(new_average, arrived.average),
        )
        return new_stacks, leaving

    def _exchange(
        self,
        specs: Flat,
        stacks: Flat,
        leaving: Flat,
        leaving_index: jax.Array,
        arriving_index: jax.Array,
    ) -> tuple[Flat, Flat]:
        """Write the leaving layer's leaves, and fetch the arriving layer's: (new stacks, arriving leaves).

        No stack is read and written at the same time, because the compiler does not know that two layers do not
        overlap. For transfers to and from the host, half of the bytes are read first and the other half is written
        first, which keeps the link busy in both directions.
        """
        # If everything is moved, nothing crosses a link: all leaves are written before any is read.
        arrives_first = set[str]() if self.moves_all else _half(specs)
        first_specs = {path: specs[path] for path in specs if path in arrives_first}
        arriving = _fetched(first_specs, stacks, arriving_index)
        new_stacks = _stored(specs, stacks, leaving, leaving_index)
        # Reading from the new stacks forces the compiler to write first.
        last_specs = {path: specs[path] for path in specs if path not in arrives_first}
        arriving |= _fetched(last_specs, new_stacks, arriving_index)
        # In the order of the specs, whichever was fetched first.
        return new_stacks, {path: arriving[path] for path in specs}

    def _groups(self, stack: str) -> list[tuple[Group, Moving]]:
        """Return the groups of a stack's parameters, with the specs of their moved leaves."""

        def moving(specs: Nested) -> Flat:
            flat_specs = flatten(specs)
            if self.moves_all:
                return flat_specs
            return {path: spec for path, spec in flat_specs.items() if spec.memory_kind != "device"}

        groups = []
        for group in self.learner.groups:
            if group.stage != stack:
                continue
            weight_specs, entry_specs, average_specs = self._specs(group)
            moving_weights = moving(weight_specs) if self.moves_all else {}
            moving_state = Moving(moving_weights, moving(entry_specs), moving(average_specs))
            groups.append((group, moving_state))
        return groups

    def _specs(self, group: Group) -> tuple[Nested, Nested, Nested]:
        """Return the specs of the stacks of weights, of optimizer state and of averages."""
        weight_specs, _, entry_specs, average_specs = bundle_specs(self.layout, self.learner, group, {})
        return weight_specs, entry_specs, average_specs

    def _stacks(self, work: Nested, group: Group) -> Moving:
        """Return all stacks of a group's weights and state, moved or not."""
        weights = self.learner.select(work["parameter"], group)
        entry = work["optimizer"][group.stage][group.label]
        average = self.learner.select(work["ema"], group) if work["ema"] else {}
        return Moving(flatten(weights), flatten(entry), flatten(average))


def _with_stacks(work: Nested, stack: str, stacks: dict[str, Moving]) -> Nested:
    """Replace stacks in the backward state with these, given by the label of the parameter group."""
    # A completely frozen stack has neither trainable weights nor optimizer state.
    if not stacks:
        return work
    # Leaves that do not belong to these groups keep their values.
    weights = flatten(work["parameter"][stack])
    entries = dict(work["optimizer"][stack])
    averages = flatten(work["ema"].get(stack, {}))
    for label, group_stacks in stacks.items():
        weights |= group_stacks.weights
        entries[label] = in_structure(entries[label], group_stacks.entry)
        averages |= group_stacks.average
    ema = work["ema"]
    if averages:
        stack_averages = in_structure(work["ema"][stack], averages)
        ema = {**work["ema"], stack: stack_averages}
    stack_weights = in_structure(work["parameter"][stack], weights)
    return {
        **work,
        "parameter": {**work["parameter"], stack: stack_weights},
        "optimizer": {**work["optimizer"], stack: entries},
        "ema": ema,
    }


def _fetch_layer(
    specs: Nested,
    stacks: Nested,
    arrived: Flat,
    index: jax.Array,
) -> Nested:
    """Return one layer of some stacks: its prefetched leaves as they are, the other leaves fetched now."""
    flat_specs = flatten(specs)

    unit_leaves = {}
    for path, stack in flatten(stacks).items():
        if path in arrived:
            unit_leaves[path] = arrived[path]
        else:
            unit_leaves[path] = fetch_leaf(flat_specs[path], unit_at(stack, index))
    return in_structure(stacks, unit_leaves)


def _with_staying(
    specs: Nested,
    stacks: Nested,
    unit: Nested,
    arrived: Flat,
    index: jax.Array,
) -> Nested:
    """Write a layer's new leaves into the stacks, except prefetched ones, which the next iteration writes."""
    staying = {path: leaf for path, leaf in flatten(unit).items() if path not in arrived}
    new_stacks = _stored(flatten(specs), flatten(stacks), staying, index)
    return in_structure(stacks, new_stacks)


def _leaving(unit: Nested, arrived: Flat) -> Flat:
    """Return the new values of a layer's prefetched leaves."""
    return {path: leaf for path, leaf in flatten(unit).items() if path in arrived}


def _fetched(specs: Flat, stacks: Flat, index: jax.Array) -> Flat:
    """Start fetching one layer's leaves to the device."""
    unit_leaves = {}
    for path, spec in specs.items():
        leaf = unit_at(stacks[path], index)
        unit_leaves[path] = fetch_leaf(spec, leaf)
    return unit_leaves


def _stored(
    specs: Flat,
    stacks: Flat,
    unit: Flat,
    index: jax.Array,
) -> Flat:
    """Write a layer's leaves into the stacks; leaves of offloaded stacks are transferred to the host."""
    new_stacks = dict(stacks)
    for path, leaf in unit.items():
        stored_leaf = store_leaf(specs[path], leaf)
        new_stacks[path] = with_unit(stacks[path], stored_leaf, index)
    return new_stacks


def _half(specs: Flat) -> set[str]:
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
