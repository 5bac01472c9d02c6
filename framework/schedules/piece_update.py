"""The update of one chunk, on leaves by path: for all layers at once, or for one layer or row block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from plimsoll.framework.layout import flatten, unflatten
from plimsoll.framework.learner.units import (
    Bundle,
    Decision,
    Group,
    UnitUpdate,
    Update,
    all_units,
)
from plimsoll.framework.schedules.division import is_hosted

# Leaves, arrays or specs, by path.
Flat = dict[str, Any]


class FlatBundle(NamedTuple):
    """A `Bundle` whose trees are dicts by path; also holds per-leaf data, such as specs, in the same structure."""

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
    """The update of one chunk.

    Attributes:
        update: the update of one layer.
        entry_structure: the treedef of the chunk's optimizer state.
        specs: TensorSpecs of the chunk's leaves.
        stacked: whether leaves have a leading layer axis.
        rows: whether the chunk is updated in row blocks.
        single: whether only one layer is updated; its gradients then have no layer axis.
        writes_first: whether a step's results are written before the next step's leaves are read. XLA for CPU would
            copy a stack that is read while it is written.
    """

    update: UnitUpdate
    entry_structure: Any
    specs: FlatBundle
    stacked: bool
    rows: bool
    single: bool
    writes_first: bool

    def unhosted(self, grads: Flat) -> Flat:
        """Return the gradients that are not in host memory."""
        return {path: grad for path, grad in grads.items() if not is_hosted(self.specs.grads[path])}

    def at_once(
        self,
        group: Group,
        flat: FlatBundle,
        decision: Decision,
    ) -> FlatUpdate:
        """Update all layers at once; `group` holds only the chunk's parameters."""

        def update(bundle: Bundle, decision: Decision) -> Update:
            return all_units(group, self.update, bundle, decision)

        return self._apply(update, flat, decision)

    def unit(self, flat: FlatBundle, decision: Decision) -> FlatUpdate:
        """Update one layer, or one block of its rows."""

        def update(bundle: Bundle, decision: Decision) -> Update:
            return self.update(*bundle, decision)

        return self._apply(update, flat, decision)

    def _apply(
        self,
        update: Callable[[Bundle, Decision], Update],
        flat: FlatBundle,
        decision: Decision,
    ) -> FlatUpdate:
        """Call `update` with nested trees."""
        entry_leaves = [flat.entry[path] for path in self.specs.entry]
        entry = jax.tree.unflatten(self.entry_structure, entry_leaves)
        # Optimizer state keeps its own structure (optax's NamedTuples); the others are nested dicts.
        bundle = unflatten(flat.weights), unflatten(flat.grads), entry, unflatten(flat.average)
        new_weights, new_entry, new_average = update(bundle, decision)
        return FlatUpdate(flatten(new_weights), flatten(new_entry), flatten(new_average))
