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

from framework.layout import Nested, StateLayout, TensorSpec, fetch_leaf, flatten, store_leaf
from framework.learner import Learner
from framework.schedules.streamed import bundle_specs
from framework.units import Bundle, Decision, Group, UnitUpdate, Update, in_structure

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
            entry, average = self._stacks(work, group)
            groups[group.label] = Hosted(_fetched(specs.entry, entry, index), _fetched(specs.average, average, index))
        return UnitState(groups, index)

    def stored(self, work: Nested, stack: str, unit: UnitState) -> Nested:
        """The work with a unit's new state on its way to the host."""
        stacks = self._all_stacks(work, stack)
        for group, specs in self._groups(stack):
            for part, new in enumerate(unit.groups[group.label]):
                stacks[group.label][part].update(_stored(specs[part], stacks[group.label][part], new, unit.index))
        return self._with_stacks(work, stack, stacks)

    def exchanged(self, work: Nested, stack: str, unit: UnitState, index: jax.Array) -> tuple[Nested, UnitState]:
        """A unit's new state on its way to the host, and another one's on its way from there.

        A stack is not read while it is written: the compiler does not know that two units lie apart. So half of the
        bytes go first and the other half come first, which keeps the link busy both ways.
        """
        stacks, arriving = self._all_stacks(work, stack), {}
        for group, specs in self._groups(stack):
            arrived = Hosted({}, {})
            for part, leaves in enumerate(unit.groups[group.label]):
                part_specs, part_stacks = specs[part], stacks[group.label][part]
                comes_first = _half(part_specs)
                for path, leaf in leaves.items():
                    spec = {path: part_specs[path]}
                    if path in comes_first:
                        arrived[part].update(_fetched(spec, part_stacks, index))
                    part_stacks.update(_stored(spec, part_stacks, {path: leaf}, unit.index))
                    if path not in comes_first:
                        arrived[part].update(_fetched(spec, part_stacks, index))
            arriving[group.label] = arrived
        return self._with_stacks(work, stack, stacks), UnitState(arriving, index)

    def _all_stacks(self, work: Nested, stack: str) -> dict[str, Hosted]:
        """All leaves of a stack's state, by the label of the group of parameters."""
        return {group.label: self._stacks(work, group) for group, _ in self._groups(stack)}

    def _with_stacks(self, work: Nested, stack: str, stacks: dict[str, Hosted]) -> Nested:
        entries = dict(work["optimizer"][stack])
        averages = flatten(work["ema"].get(stack, {}))
        for label, of_group in stacks.items():
            entries[label] = in_structure(entries[label], of_group.entry)
            averages |= of_group.average
        ema = {**work["ema"], stack: in_structure(work["ema"][stack], averages)} if averages else work["ema"]
        return {**work, "optimizer": {**work["optimizer"], stack: entries}, "ema": ema}

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
        stacks = [flatten(bundle[part]) for part in (0, 2, 3)]
        places = [flatten(specs) for specs in self._specs(group)]
        arrived = [{}, *state.groups[group.label]]

        def of_unit(stack: Flat, place: Flat, here: Flat) -> Flat:
            """Weights in host memory come at once; state that has arrived is taken as it is."""
            waiting = {path: x for path, x in stack.items() if path not in here}
            return here | {path: fetch_leaf(place[path], _take(x, state.index)) for path, x in waiting.items()}

        unit = [of_unit(*one) for one in zip(stacks, places, arrived, strict=True)]
        weights, entry, average = (in_structure(bundle[part], own) for part, own in zip((0, 2, 3), unit, strict=True))
        own_decision = decision._replace(layer=decision.layer + state.index)
        new_unit = [flatten(tree) for tree in update(weights, bundle[1], entry, average, own_decision)]
        new_stacks = []
        for part, s, place, here, new in zip((0, 2, 3), stacks, places, arrived, new_unit, strict=True):
            staying = {path: x for path, x in new.items() if path not in here}
            new_stacks.append(in_structure(bundle[part], s | _stored(place, s, staying, state.index)))
        leaving = Hosted(*({p: new[p] for p in here} for here, new in zip(arrived[1:], new_unit[1:], strict=True)))
        return (new_stacks[0], new_stacks[1], new_stacks[2]), leaving

    def _groups(self, stack: str) -> list[tuple[Group, Hosted]]:
        """The groups of a stack's parameters, and the specs of their hosted state."""

        def hosted(specs: Nested) -> Flat:
            return {path: spec for path, spec in flatten(specs).items() if spec.memory_kind != "device"}

        found = []
        for group in self.learner.groups:
            if group.stage == stack:
                _, entry, average = self._specs(group)
                found.append((group, Hosted(hosted(entry), hosted(average))))
        return found

    def _specs(self, group: Group) -> tuple[Nested, Nested, Nested]:
        weights, _, entry, average = bundle_specs(self.layout, self.learner, group, {})
        return weights, entry, average

    def _stacks(self, work: Nested, group: Group) -> Hosted:
        average = self.learner.select(work["ema"], group) if work["ema"] else {}
        return Hosted(flatten(work["optimizer"][group.stage][group.label]), flatten(average))


def _half(specs: Flat) -> set[str]:
    """Paths of about half of the bytes."""
    sizes, paths = {True: 0, False: 0}, set()
    for path, spec in sorted(specs.items(), key=lambda item: -item[1].num_bytes):
        is_taken = sizes[True] <= sizes[False]
        sizes[is_taken] += spec.num_bytes
        paths |= {path} if is_taken else set()
    return paths


def _fetched(specs: Flat, stacks: Flat, index: jax.Array) -> Flat:
    return {path: fetch_leaf(spec, _take(stacks[path], index)) for path, spec in specs.items()}


def _stored(specs: Flat, stacks: Flat, unit: Flat, index: jax.Array) -> Flat:
    """The stacks of a unit's leaves, with these in their place."""

    def put(spec: TensorSpec, stack: jax.Array, leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, store_leaf(spec, leaf), index, 0)

    return {path: put(specs[path], stacks[path], leaf) for path, leaf in unit.items()}


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
