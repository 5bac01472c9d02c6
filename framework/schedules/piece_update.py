"""The update of one piece of a group, on leaves by path: of all its units at once, or of one unit or block of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from framework.layout import flatten, unflatten
from framework.learner.units import (
    Bundle,
    Decision,
    Group,
    UnitUpdate,
    Update,
    all_units,
)
from framework.schedules.division import is_hosted

# Leaves, arrays or specs, by path.
Flat = dict[str, Any]


class FlatBundle(NamedTuple):
    """A `Bundle` whose trees are dicts by path, or what belongs to each of its leaves."""

    weights: Flat
    grads: Flat
    entry: Flat
    average: Flat


class FlatUpdate(NamedTuple):
    """An `Update` whose trees are dicts by path."""

    weights: Flat
    entry: Flat
    average: Flat


@dataclass(frozen=True)
class PieceUpdate:
    """The update of one piece.

    Attributes:
      update: of one unit.
      entry_structure: the treedef of the piece's optimizer state.
      specs: TensorSpecs of the piece's leaves.
      stacked: whether leaves have a leading axis of units.
      rows: whether the piece is updated by blocks of rows.
      single: whether one unit alone is updated: gradients are its own, without an axis of units.
      writes_first: whether the next step's leaves are read after those of one were written: XLA for CPU would copy a
        stack that is read beside.
    """

    update: UnitUpdate
    entry_structure: Any
    specs: FlatBundle
    stacked: bool
    rows: bool
    single: bool
    writes_first: bool

    def unhosted(self, grads: Flat) -> Flat:
        """The gradients that are not in host memory."""
        return {path: grad for path, grad in grads.items() if not is_hosted(self.specs.grads[path])}

    def at_once(
        self,
        group: Group,
        flat: FlatBundle,
        decision: Decision,
    ) -> FlatUpdate:
        """Updates all units at once; `group` has the piece's parameters alone."""

        def update(bundle: Bundle, decision: Decision) -> Update:
            return all_units(group, self.update, bundle, decision)

        return self._apply(update, flat, decision)

    def unit(self, flat: FlatBundle, decision: Decision) -> FlatUpdate:
        """Updates one unit, or one block of its rows."""

        def update(bundle: Bundle, decision: Decision) -> Update:
            return self.update(*bundle, decision)

        return self._apply(update, flat, decision)

    def _apply(
        self,
        update: Callable[[Bundle, Decision], Update],
        flat: FlatBundle,
        decision: Decision,
    ) -> FlatUpdate:
        """Calls `update` with nested trees."""
        entry_leaves = [flat.entry[path] for path in self.specs.entry]
        entry = jax.tree.unflatten(self.entry_structure, entry_leaves)
        # Optimizer state has a structure of its own (optax's NamedTuples); the others are nested dicts.
        bundle = unflatten(flat.weights), unflatten(flat.grads), entry, unflatten(flat.average)
        new_weights, new_entry, new_average = update(bundle, decision)
        return FlatUpdate(flatten(new_weights), flatten(new_entry), flatten(new_average))
