"""A whole unit's state on its way while the backward pass computes, for updates in the backward pass.

On TPU it is the state in host memory that moves, where memory.prefetch = unit. On CPU weights and all their state move,
out of the stacks and back into them: XLA for CPU copies a stack whenever one operation of a loop reads it and another
one writes it, which an update in place comes to (with 256 layers the step took nine times as long).

Each turn of the backward loop begins with two transfers: the new state of the unit before goes to the host, and the old
state of this unit comes from there. Both have the unit's whole backward pass to hide behind. The unit is then updated
by arrays that are on the device, and its new state waits for the next turn. This costs the state of two units on the
device, where `pieces` holds two pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from framework.layout import Nested, StateLayout, fetch_leaf, flatten, store_leaf
from framework.learner.learner import Learner
from framework.learner.units import Bundle, Decision, Group, UnitUpdate, Update, in_structure, unit_at, with_unit
from framework.schedules.streamed import bundle_specs

Flat = dict[str, Any]


class Moving(NamedTuple):
    """What moves of one unit's weights and their state, or its specs, for one group of parameters, by path."""

    weights: Flat
    entry: Flat  # optimizer state
    average: Flat


class UnitState(NamedTuple):
    """One unit's state that moves, on the device.

    Attributes:
      groups: by the label of the group of parameters.
      index: int32 scalar, the unit's.
    """

    groups: dict[str, Moving]
    index: jax.Array


@dataclass(frozen=True)
class StateAhead:
    """Moves the state of a stack's units between the stacks, on the host or not, and the device.

    Attributes:
      moves_all: whether weights, and state that is on the device already, move too, and no stack is read before it is
        written.
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
        """The state of the unit at `index`, on its way to the device."""
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
        """The work with a unit's new state on its way to the stacks."""
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
        """The work with a unit's new state on its way to the stacks, and the state of the unit at `index` on its way
        from there."""
        new_stacks = {}
        arriving = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(work, group)
            leaving = unit.groups[group.label]
            part_stacks: list[Flat] = []
            part_leaves: list[Flat] = []
            # Weights, optimizer state and averages are exchanged apart, each with half of its own bytes first.
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
        """Updates one unit whose state has arrived, with the numbers of `all_units`.

        Args:
            group: parameters of a stack.
            update: of one unit.
            bundle: stacked weights, the gradients of that unit alone, stacked optimizer state and averages.
            decision: see `Learner.decide`.
            state: the unit's.

        Returns:
            (new stacks of weights, optimizer state and averages, in which what moves is still the old one; what of the
            unit leaves).
        """
        weights, unit_grads, entry, average = bundle
        weight_specs, entry_specs, average_specs = self._specs(group)
        arrived = state.groups[group.label]
        index = state.index
        new_weights, new_entry, new_average = update(
            # Weights in host memory are fetched here: they move ahead only where all does, on CPU.
            _unit_of(weight_specs, weights, arrived.weights, index),
            unit_grads,
            _unit_of(entry_specs, entry, arrived.entry, index),
            _unit_of(average_specs, average, arrived.average, index),
            decision._replace(layer=decision.layer + index),
        )
        # What stays on the device is written at once, what moves at the next turn.
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
        """(the stacks with the leaves of the unit that leaves, the leaves of the unit that arrives).

        A stack is not read while it is written: the compiler does not know that two units lie apart. To and from the
        host half of the bytes leave first and the other half arrive first, which keeps the link busy both ways.
        """
        # Where all moves nothing crosses a link: everything is written before anything is read.
        arrives_first = set[str]() if self.moves_all else _half(specs)
        first_specs = {path: specs[path] for path in specs if path in arrives_first}
        arriving = _fetched(first_specs, stacks, arriving_index)
        new_stacks = _stored(specs, stacks, leaving, leaving_index)
        # Read from the new stacks, so that the compiler has to write first.
        last_specs = {path: specs[path] for path in specs if path not in arrives_first}
        arriving |= _fetched(last_specs, new_stacks, arriving_index)
        # In the order of the specs, whichever came first.
        return new_stacks, {path: arriving[path] for path in specs}

    def _groups(self, stack: str) -> list[tuple[Group, Moving]]:
        """The groups of a stack's parameters, and the specs of their state that moves."""

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
        """The specs of the stacks of weights, of optimizer state and of averages."""
        weight_specs, _, entry_specs, average_specs = bundle_specs(self.layout, self.learner, group, {})
        return weight_specs, entry_specs, average_specs

    def _stacks(self, work: Nested, group: Group) -> Moving:
        """All stacks of a group's weights and state, whether they move or not."""
        weights = self.learner.select(work["parameter"], group)
        entry = work["optimizer"][group.stage][group.label]
        average = self.learner.select(work["ema"], group) if work["ema"] else {}
        return Moving(flatten(weights), flatten(entry), flatten(average))


def _with_stacks(work: Nested, stack: str, stacks: dict[str, Moving]) -> Nested:
    """The work with these stacks, by the label of the group of parameters."""
    # A stack that is frozen as a whole has neither trainable weights nor optimizer state.
    if not stacks:
        return work
    # Leaves that do not belong to these groups stay as they are.
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


def _unit_of(
    specs: Nested,
    stacks: Nested,
    arrived: Flat,
    index: jax.Array,
) -> Nested:
    """One unit of some stacks: what has arrived as it is, the other leaves fetched."""
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
    """The stacks with a unit's new leaves, but for those that had arrived: they leave for the host in the next turn."""
    staying = {path: leaf for path, leaf in flatten(unit).items() if path not in arrived}
    new_stacks = _stored(flatten(specs), flatten(stacks), staying, index)
    return in_structure(stacks, new_stacks)


def _leaving(unit: Nested, arrived: Flat) -> Flat:
    """The new leaves of a unit whose old ones had arrived."""
    return {path: leaf for path, leaf in flatten(unit).items() if path in arrived}


def _fetched(specs: Flat, stacks: Flat, index: jax.Array) -> Flat:
    """One unit's leaves, on their way to the device."""
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
    """The stacks with a unit's leaves, those of hosted stacks on their way to the host."""
    new_stacks = dict(stacks)
    for path, leaf in unit.items():
        stored_leaf = store_leaf(specs[path], leaf)
        new_stacks[path] = with_unit(stacks[path], stored_leaf, index)
    return new_stacks


def _half(specs: Flat) -> set[str]:
    """Paths of about half of the bytes, the largest leaf among them."""
    taken_bytes = 0
    left_bytes = 0
    paths = set()
    # Each leaf goes to the side that has less so far.
    largest_first = sorted(specs.items(), key=lambda item: -item[1].num_bytes)
    for path, spec in largest_first:
        if taken_bytes <= left_bytes:
            taken_bytes += spec.num_bytes
            paths.add(path)
        else:
            left_bytes += spec.num_bytes
    return paths
