"""The update of one chunk, on leaves by path: for all layers at once, or for one layer or row block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from plimsoll.framework.layout import flatten, unflatten
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate, LayerUpdateFn, update_all_layers
from plimsoll.framework.schedules.update_chunks import is_offloaded

# Leaves, arrays or specs, by path.
Flat = dict[str, Any]


class FlatTrainState(NamedTuple):
    """A `LayerTrainState` whose trees are dicts by path, with arrays or other per-leaf data such as specs."""

    weights: Flat
    grads: Flat
    entry: Flat
    average: Flat


class FlatUpdate(NamedTuple):
    """A `LayerUpdate` whose trees are dicts by path."""

    weights: Flat
    entry: Flat
    average: Flat


@dataclass(frozen=True)
class ChunkUpdate:
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

    update: LayerUpdateFn
    entry_structure: Any
    specs: FlatTrainState
    stacked: bool
    rows: bool
    single: bool
    writes_first: bool

    def select_device_grads(self, grads: Flat) -> Flat:
        """Return the gradients that are not in host memory."""
        return {path: grad for path, grad in grads.items() if not is_offloaded(self.specs.grads[path])}

    def update_at_once(self, group: ParamGroup, flat: FlatTrainState, decision: Decision) -> FlatUpdate:
        """Update all layers at once.

        Args:
            group: the parameter group, restricted to the chunk's parameters.
            flat: the chunk's leaves.
            decision: see `Learner.decide`.
        """

        def update(train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
            return update_all_layers(group, self.update, train_state, decision)

        return self._apply(update, flat, decision)

    def update_step(self, flat: FlatTrainState, decision: Decision) -> FlatUpdate:
        """Update one layer, or one block of its rows."""

        def update(train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
            return self.update(train_state, decision)

        return self._apply(update, flat, decision)

    def _apply(
        self, update: Callable[[LayerTrainState, Decision], LayerUpdate], flat: FlatTrainState, decision: Decision
    ) -> FlatUpdate:
        """Call `update` with nested trees."""
        entry_leaves = [flat.entry[path] for path in self.specs.entry]
        entry = jax.tree.unflatten(self.entry_structure, entry_leaves)
        # Optimizer state keeps its own structure (optax's NamedTuples); the others are nested dicts.
        train_state = LayerTrainState(unflatten(flat.weights), unflatten(flat.grads), entry, unflatten(flat.average))
        new = update(train_state, decision)
        return FlatUpdate(flatten(new.weights), flatten(new.entry), flatten(new.average))
