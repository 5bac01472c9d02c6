"""A whole unit's hosted state on its way while the backward pass computes: memory.prefetch = unit, of in_backward.

Each turn of the backward loop begins with two transfers: the new state of the unit before goes to the host, and the old
state of this unit comes from there. Both have the unit's whole backward pass to hide behind. The unit is then updated
by arrays that are on the device, and its new state waits for the next turn. This costs the state of two units on the
device, where `pieces` holds two pieces.

May import: framework.layout, framework.learner, framework.schedules.streamed, framework.units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from framework.layout import Nested, StateLayout, fetch_leaf, flatten, store_leaf
from framework.learner import Learner
from framework.schedules.streamed import bundle_specs
from framework.units import Bundle, Decision, Group, UnitUpdate, Update, in_structure, unit_at, with_unit

Flat = dict[str, Any]


class Hosted(NamedTuple):
    """Of one unit and one group of its parameters, by path: what of its state is in host memory between steps."""

    entry: Flat  # optimizer state
    average: Flat


class UnitState(NamedTuple):
    """One unit's hosted state, on the device.

    Attributes:
      groups: by the label of the group of parameters.
      index: int32 scalar, the unit's.
    """

    groups: dict[str, Hosted]
    index: jax.Array


@dataclass(frozen=True)
class StateAhead:
    """Moves the state of a stack's units between the host and the device."""

    learner: Learner
    layout: StateLayout

    def fetched(self, work: Nested, stack: str, index: jax.Array) -> UnitState:
        """A unit's hosted state, on its way to the device."""
        groups = {}
        for group, specs in self._groups(stack):
            stacks = self._stacks(work, group)
            groups[group.label] = Hosted(
                _fetched(specs.entry, stacks.entry, index),
                _fetched(specs.average, stacks.average, index),
            )
        return UnitState(groups, index)

    def stored(self, work: Nested, stack: str, unit: UnitState) -> Nested:
        """The work with a unit's new state on its way to the host."""
        new_stacks = {}
        for group, specs in self._groups(stack):
            stacks, leaving = self._stacks(work, group), unit.groups[group.label]
            new_stacks[group.label] = Hosted(
                _stored(specs.entry, stacks.entry, leaving.entry, unit.index),
                _stored(specs.average, stacks.average, leaving.average, unit.index),
            )
        return _with_stacks(work, stack, new_stacks)

    def exchanged(self, work: Nested, stack: str, unit: UnitState, index: jax.Array) -> tuple[Nested, UnitState]:
        """The work with a unit's new state on its way to the host, and the state of the unit at `index` on its way from
        there."""
        new_stacks, arriving = {}, {}
        for group, specs in self._groups(stack):
            stacks, leaving = self._stacks(work, group), unit.groups[group.label]
            entry_stacks, entry = _exchanged(specs.entry, stacks.entry, leaving.entry, unit.index, index)
            average_stacks, average = _exchanged(specs.average, stacks.average, leaving.average, unit.index, index)
            new_stacks[group.label] = Hosted(entry_stacks, average_stacks)
            arriving[group.label] = Hosted(entry, average)
        return _with_stacks(work, stack, new_stacks), UnitState(arriving, index)

    def update(
        self, group: Group, update: UnitUpdate, bundle: Bundle, decision: Decision, state: UnitState
    ) -> tuple[Update, Hosted]:
        """The update of one unit whose hosted state is on the device, with the numbers of `all_units`.

        Args:
            group: parameters of a stack.
            update: of one unit.
            bundle: stacked weights, the gradients of that unit alone, stacked optimizer state and averages.
            decision: see `Learner.decide`.
            state: the unit's.

        Returns:
            (new stacks of weights, optimizer state and averages, in which hosted state is still the old one; the unit's
            new hosted state).
        """
        weights, unit_grads, entry, average = bundle
        weight_specs, entry_specs, average_specs = self._specs(group)
        arrived, index = state.groups[group.label], state.index
        new_weights, new_entry, new_average = update(
            _unit_of(weight_specs, weights, {}, index),  # weights in host memory come at once
            unit_grads,
            _unit_of(entry_specs, entry, arrived.entry, index),
            _unit_of(average_specs, average, arrived.average, index),
            decision._replace(layer=decision.layer + index),
        )
        new_stacks = (
            _with_staying(weight_specs, weights, new_weights, {}, index),
            _with_staying(entry_specs, entry, new_entry, arrived.entry, index),
            _with_staying(average_specs, average, new_average, arrived.average, index),
        )
        leaving = Hosted(_leaving(new_entry, arrived.entry), _leaving(new_average, arrived.average))
        return new_stacks, leaving

    def _groups(self, stack: str) -> list[tuple[Group, Hosted]]:
        """The groups of a stack's parameters, and the specs of their hosted state."""

        def hosted(specs: Nested) -> Flat:
            return {path: spec for path, spec in flatten(specs).items() if spec.memory_kind != "device"}

        groups = []
        for group in self.learner.groups:
            if group.stage == stack:
                _, entry_specs, average_specs = self._specs(group)
                groups.append((group, Hosted(hosted(entry_specs), hosted(average_specs))))
        return groups

    def _specs(self, group: Group) -> tuple[Nested, Nested, Nested]:
        """Of the stacks of weights, of optimizer state and of averages."""
        weight_specs, _, entry_specs, average_specs = bundle_specs(self.layout, self.learner, group, {})
        return weight_specs, entry_specs, average_specs

    def _stacks(self, work: Nested, group: Group) -> Hosted:
        """All stacks of a group's state, hosted or not."""
        average = self.learner.select(work["ema"], group) if work["ema"] else {}
        return Hosted(flatten(work["optimizer"][group.stage][group.label]), flatten(average))


def _with_stacks(work: Nested, stack: str, stacks: dict[str, Hosted]) -> Nested:
    """The work with these stacks of optimizer state and averages, by the label of the group of parameters."""
    entries = dict(work["optimizer"][stack])
    averages = flatten(work["ema"].get(stack, {}))
    for label, group_stacks in stacks.items():
        entries[label] = in_structure(entries[label], group_stacks.entry)
        averages |= group_stacks.average
    ema = {**work["ema"], stack: in_structure(work["ema"][stack], averages)} if averages else work["ema"]
    return {**work, "optimizer": {**work["optimizer"], stack: entries}, "ema": ema}


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


def _exchanged(
    specs: Flat, stacks: Flat, leaving: Flat, leaving_index: jax.Array, arriving_index: jax.Array
) -> tuple[Flat, Flat]:
    """(the stacks with the leaves of the unit that leaves, the leaves of the unit that arrives).

    A stack is not read while it is written: the compiler does not know that two units lie apart. So half of the bytes
    leave first and the other half arrive first, which keeps the link busy both ways.
    """
    arrives_first = _half(specs)
    arriving = _fetched({path: spec for path, spec in specs.items() if path in arrives_first}, stacks, arriving_index)
    new_stacks = _stored(specs, stacks, leaving, leaving_index)
    leaves_first = {path: spec for path, spec in specs.items() if path not in arrives_first}
    arriving |= _fetched(leaves_first, new_stacks, arriving_index)
    return new_stacks, {path: arriving[path] for path in specs}


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
