"""The update of one layer or unstacked stage: its weights, optimizer state and moving average after one step.

Every schedule uses this function, whether it updates layers all at once, one after the other or in chunks, so all
schedules compute the same numbers. The update is computed on precise weights: the master copy if there is one,
otherwise the weights in the dtype of the update. Decisions that depend on all gradients arrive as scalars (see
`Decision`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.clipping import Clipping
from plimsoll.framework.learner.optimizer_instances import LearningRate
from plimsoll.framework.learner.state import COMPENSATION, MASTER, NORM, STATE, GroupState
from plimsoll.framework.learner.update_types import Decision, LayerUpdate, select_updated
from plimsoll.framework.optimizers.rounding import fold, fold_name, round_weights, upcast


class _NewWeights(NamedTuple):
    """A layer's weights after an update.

    Attributes:
        precise: weights in the dtype of the update.
        stored: weights in the parameters' dtype.
        rounding_error: rounding error of the stored weights; {} if it is not stored.
    """

    precise: Nested
    stored: Nested
    rounding_error: Nested


@dataclass(frozen=True, eq=False)
class GroupUpdate:
    """The update of one layer of a group; see `LayerUpdateFn`.

    Attributes:
        state: describes the group's optimizer state.
        learning_rate: the learning rate in the optimizer's config.
        clipping: clipping of gradients and updates.
        ema: decay of the moving averages; None keeps none.
        draws: whether updates of the model draw noise, here or in another group.
    """

    state: GroupState
    learning_rate: LearningRate | None
    clipping: Clipping
    ema: float | None
    draws: bool

    @property
    def counters(self) -> frozenset[str]:
        """Return the paths of update counters; see `LayerUpdateFn`."""
        return self.state.counters()

    def __call__(
        self, weights: Nested, grads: Nested, entry: Nested, average: Nested, decision: Decision
    ) -> LayerUpdate:
        """Update one layer; if the decision is not ok, everything keeps its old value."""
        optimizer = self.state.optimizer
        precision = self.state.precision
        if MASTER in entry:
            precise_weights = entry[MASTER]
        else:
            precise_weights = upcast(precision.rounding, weights, entry.get(COMPENSATION))
        seed = self._derive_seed(decision)
        precise_grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, precise_weights)
        clipped_grads, new_norms = self.clipping.clip_gradients(precise_grads, entry.get(NORM, {}), decision.factor)
        optimizer_state = precision.widen(entry[STATE], precise_weights)
        extra = {"seed": seed} if optimizer.draws else {}
        updates, new_state = optimizer.update(clipped_grads, optimizer_state, precise_weights, **extra)
        updates = self.clipping.clip_updates(updates, self.learning_rate, decision.count)
        updated_weights: Any = optax.apply_updates(precise_weights, updates)
        new_weights = self._compute_new_weights(updated_weights, precise_weights, weights, seed, decision)
        new_state = precision.narrow(new_state, entry[STATE], fold(seed, decision.count), decision.origin)
        new_entry = _make_new_entry(entry, new_state, new_weights.rounding_error, new_norms, decision.ok)
        if MASTER in entry:
            # `_compute_new_weights` has already selected between the old and the new master.
            new_entry[MASTER] = new_weights.precise
        new_average = self._compute_new_average(average, new_weights.precise, decision.ok)
        return new_weights.stored, new_entry, new_average

    def _derive_seed(self, decision: Decision) -> jax.Array:
        """Return the seed of a layer's noise, a uint32 scalar; the same in every step."""
        if not self.draws:
            return decision.seed
        # Layers of a stack share the program, and stages may share layer numbers, but neither may share noise.
        return fold_name(fold(decision.seed, decision.layer), self.state.group.home)

    def _compute_new_weights(
        self, updated_weights: Nested, precise_weights: Nested, weights: Nested, seed: jax.Array, decision: Decision
    ) -> _NewWeights:
        """Return a layer's weights after an update; a skipped step leaves them unchanged.

        Args:
            updated_weights: new weights in the dtype of the update.
            precise_weights: old weights in the dtype of the update.
            weights: old weights in the parameters' dtype.
            seed: uint32 scalar, the layer's seed.
            decision: see `Learner.decide`.
        """
        rounding = self.state.precision.rounding
        if rounding == "nearest":
            # Select between old and new master weights, then cast. If the cast weights were selected separately, XLA
            # would compute the update twice, and read gradients and moments once more.
            chosen_weights = select_updated(decision.ok, updated_weights, precise_weights)
            stored_weights = jax.tree.map(lambda c, w: c.astype(w.dtype), chosen_weights, weights)
            return _NewWeights(chosen_weights, stored_weights, {})
        # A layer's seed is the same in every step; folding in the number of updates makes the noise differ between
        # steps.
        noise_seed = fold(seed, decision.count)
        rounded_weights, rounding_error = round_weights(rounding, updated_weights, weights, noise_seed, decision.origin)
        stored_weights = select_updated(decision.ok, rounded_weights, weights)
        return _NewWeights(updated_weights, stored_weights, rounding_error)

    def _compute_new_average(self, average: Nested, precise_weights: Nested, ok: jax.Array) -> Nested:
        """Return a layer's moving average of the weights after an update; a skipped step leaves it unchanged."""
        if self.ema is None:
            return average
        rate = 1.0 - self.ema
        moved_average = jax.tree.map(lambda a, w: a + rate * (w.astype(a.dtype) - a), average, precise_weights)
        return select_updated(ok, moved_average, average)


def _make_new_entry(
    entry: Nested, new_state: Nested, rounding_error: Nested, new_norms: Nested | None, ok: jax.Array
) -> dict[str, Any]:
    """Return a layer's optimizer state entry after an update, without the master; a skipped step leaves it unchanged.

    Args:
        entry: the entry before the update.
        new_state: the optimizer's new state, in the dtypes of the entry.
        rounding_error: rounding error of the new weights (Kahan).
        new_norms: the gradient norms for clip_mode norm_growth.
        ok: scalar, whether the step counts.
    """
    new_entry = {STATE: new_state}
    if COMPENSATION in entry:
        new_entry[COMPENSATION] = rounding_error
    if new_norms is not None:
        new_entry[NORM] = new_norms
    old_entry = {name: entry[name] for name in new_entry}
    return select_updated(ok, new_entry, old_entry)
