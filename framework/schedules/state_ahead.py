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
    """Of one unit and one group of its parameters, by path: what of its weights and their state moves."""

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

    def fetched(self, work: Nested, stack: str, index: jax.Array) -> UnitState:
        """A unit's state, on its way to the device."""
        groups = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(work, group)
            groups[group.label] = Moving(
                _fetched(specs.weights, stacks.weights, index),
                _fetched(specs.entry, stacks.entry, index),
                _fetched(specs.average, stacks.average, index),
            )
        return UnitState(groups, index)

    def stored(self, work: Nested, stack: str, unit: UnitState) -> Nested:
        """The work with a unit's new state on its way to the stacks."""
        new_stacks = {}
        for group, specs in self._groups(stack):
            stacks, leaving = self._stacks(work, group), unit.groups[group.label]
            new_stacks[group.label] = Moving(
                _stored(specs.weights, stacks.weights, leaving.weights, unit.index),
                _stored(specs.entry, stacks.entry, leaving.entry, unit.index),
                _stored(specs.average, stacks.average, leaving.average, unit.index),
            )
        return _with_stacks(work, stack, new_stacks)

    def exchanged(self, work: Nested, stack: str, unit: UnitState, index: jax.Array) -> tuple[Nested, UnitState]:
        """The work with a unit's new state on its way to the stacks, and the state of the unit at `index` on its way
        from there."""
        new_stacks, arriving = {}, {}
        for group, specs in self._groups(stack):
            stacks, leaving = self._stacks(work, group), unit.groups[group.label]
            parts = [self._exchange(*part, unit.index, index) for part in zip(specs, stacks, leaving, strict=True)]
            new_stacks[group.label] = Moving(*(part_stacks for part_stacks, _ in parts))
            arriving[group.label] = Moving(*(part_leaves for _, part_leaves in parts))
        return _with_stacks(work, stack, new_stacks), UnitState(arriving, index)

    def update(
        self, group: Group, update: UnitUpdate, bundle: Bundle, decision: Decision, state: UnitState
    ) -> tuple[Update, Moving]:
        """The update of one unit whose state has arrived, with the numbers of `all_units`.

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
        arrived, index = state.groups[group.label], state.index
        new_weights, new_entry, new_average = update(
            _unit_of(weight_specs, weights, arrived.weights, index),  # weights in host memory come at once
            unit_grads,
            _unit_of(entry_specs, entry, arrived.entry, index),
            _unit_of(average_specs, average, arrived.average, index),
            decision._replace(layer=decision.layer + index),
        )
        new_stacks = (
            _with_staying(weight_specs, weights, new_weights, arrived.weights, index),
            _with_staying(entry_specs, entry, new_entry, arrived.entry, index),
            _with_staying(average_specs, average, new_average, arrived.average, index),
        )
        new_leaves = new_weights, new_entry, new_average
        leaving = Moving(*(_leaving(new, old) for new, old in zip(new_leaves, arrived, strict=True)))
        return new_stacks, leaving

    def _exchange(
        self, specs: Flat, stacks: Flat, leaving: Flat, leaving_index: jax.Array, arriving_index: jax.Array
    ) -> tuple[Flat, Flat]:
        """(the stacks with the leaves of the unit that leaves, the leaves of the unit that arrives).

        A stack is not read while it is written: the compiler does not know that two units lie apart. To and from the
        host half of the bytes leave first and the other half arrive first, which keeps the link busy both ways.
        """
        arrives_first = set[str]() if self.moves_all else _half(specs)
        arriving = _fetched({path: specs[path] for path in specs if path in arrives_first}, stacks, arriving_index)
        new_stacks = _stored(specs, stacks, leaving, leaving_index)
        leaves_first = {path: specs[path] for path in specs if path not in arrives_first}
        arriving |= _fetched(leaves_first, new_stacks, arriving_index)
        return new_stacks, {path: arriving[path] for path in specs}

    def _groups(self, stack: str) -> list[tuple[Group, Moving]]:
        """The groups of a stack's parameters, and the specs of their state that moves."""

        def moving(specs: Nested) -> Flat:
            flat_specs = flatten(specs).items()
            return {path: spec for path, spec in flat_specs if self.moves_all or spec.memory_kind != "device"}

        groups = []
        for group in self.learner.groups:
            if group.stage == stack:
                weight_specs, entry_specs, average_specs = self._specs(group)
                weights = moving(weight_specs) if self.moves_all else {}
                groups.append((group, Moving(weights, moving(entry_specs), moving(average_specs))))
        return groups

    def _specs(self, group: Group) -> tuple[Nested, Nested, Nested]:
        """Of the stacks of weights, of optimizer state and of averages."""
        weight_specs, _, entry_specs, average_specs = bundle_specs(self.layout, self.learner, group, {})
        return weight_specs, entry_specs, average_specs

    def _stacks(self, work: Nested, group: Group) -> Moving:
        """All stacks of a group's weights and state, whether they move or not."""
        weights = self.learner.select(work["parameter"], group)
        average = self.learner.select(work["ema"], group) if work["ema"] else {}
        return Moving(flatten(weights), flatten(work["optimizer"][group.stage][group.label]), flatten(average))


def _with_stacks(work: Nested, stack: str, stacks: dict[str, Moving]) -> Nested:
    """The work with these stacks, by the label of the group of parameters."""
    if not stacks:  # a stack that is frozen as a whole has neither trainable weights nor optimizer state
        return work
    weights = flatten(work["parameter"][stack])
    entries = dict(work["optimizer"][stack])
    averages = flatten(work["ema"].get(stack, {}))
    for label, group_stacks in stacks.items():
        weights |= group_stacks.weights
        entries[label] = in_structure(entries[label], group_stacks.entry)
        averages |= group_stacks.average
    ema = {**work["ema"], stack: in_structure(work["ema"][stack], averages)} if averages else work["ema"]
    parameter = {**work["parameter"], stack: in_structure(work["parameter"][stack], weights)}
    return {**work, "parameter": parameter, "optimizer": {**work["optimizer"], stack: entries}, "ema": ema}


def _unit_of(specs: Nested, stacks: Nested, arrived: Flat, index: jax.Array) -> Nested:
    """One unit of some stacks: what has arrived as it is, the other leaves fetched."""
    flat_specs = flatten(specs)

    def unit_leaf(path: str, stack: jax.Array) -> jax.Array:
        return arrived[path] if path in arrived else fetch_leaf(flat_specs[path], unit_at(stack, index))

    return in_structure(stacks, {path: unit_leaf(path, stack) for path, stack in flatten(stacks).items()})


def _with_staying(specs: Nested, stacks: Nested, unit: Nested, arrived: Flat, index: jax.Array) -> Nested:
    """The stacks with a unit's new leaves, but for those that had arrived: they leave for the host in the next turn."""
    staying = {path: leaf for path, leaf in flatten(unit).items() if path not in arrived}
    return in_structure(stacks, _stored(flatten(specs), flatten(stacks), staying, index))


def _leaving(unit: Nested, arrived: Flat) -> Flat:
    """The new leaves of those that had arrived."""
    return {path: leaf for path, leaf in flatten(unit).items() if path in arrived}


def _fetched(specs: Flat, stacks: Flat, index: jax.Array) -> Flat:
    """One unit's leaves, on their way to the device."""
    return {path: fetch_leaf(spec, unit_at(stacks[path], index)) for path, spec in specs.items()}


def _stored(specs: Flat, stacks: Flat, unit: Flat, index: jax.Array) -> Flat:
    """The stacks with a unit's leaves, those of hosted stacks on their way to the host."""
    return stacks | {path: with_unit(stacks[path], store_leaf(specs[path], leaf), index) for path, leaf in unit.items()}


def _half(specs: Flat) -> set[str]:
    """Paths of about half of the bytes, the largest leaf among them."""
    taken_bytes, other_bytes, paths = 0, 0, set()
    for path, spec in sorted(specs.items(), key=lambda item: -item[1].num_bytes):
        if taken_bytes <= other_bytes:
            taken_bytes += spec.num_bytes
            paths.add(path)
        else:
            other_bytes += spec.num_bytes
    return paths
