"""The update of one layer or unstacked stage: its weights, optimizer state and moving average after one step.

Every schedule uses this update, whether it updates layers all at once, one after the other or in chunks, so all
schedules compute the same numbers. The update is computed on precise weights: the master copy if there is one,
otherwise the weights in the dtype of the update. Decisions that depend on all gradients arrive as scalars (see
`Decision`).

A "layer" of a stack is one period of its pattern. An "update unit" is a layer, or a stage outside the stacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from plimsoll.framework.layout import Nested, PyTree, flatten, path_name
from plimsoll.framework.learner.decisions import Clipping, Decision
from plimsoll.framework.learner.group_optimizer import COMPENSATION, MASTER, NORM, STATE, GroupOptimizer
from plimsoll.framework.optimizers.rounding import fold, fold_name, round_weights, upcast
from plimsoll.framework.optimizers.update_locality import UpdateLocality

Leaf = TypeVar("Leaf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTrainState:
    """The arrays that an update reads: of one layer, or of all layers of a group, stacked along a first axis.

    The leaves may also be the specs of these arrays. Gradients are stored like the weights, unless the layout has
    buffers for them; the other trees are stored as the layout places their groups "parameter", "optimizer" and "ema".

    Attributes:
        weights: weights in the parameters' shapes and dtypes.
        grads: gradients in the parameters' shapes, in their dtype or in that of sums over microbatches.
        entry: the group's entry of the optimizer state, see `framework.learner.group_optimizer`.
        average: moving averages of the weights, float32 or wider; {} if the learner keeps none.
    """

    weights: Nested
    grads: Nested
    entry: Nested
    average: Nested


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerUpdate:
    """The arrays that an update writes: of one layer, of a group's stacked layers, or by stage of the whole model.

    Attributes:
        weights: new weights, like `LayerTrainState.weights`.
        entry: new optimizer state, like `LayerTrainState.entry`; of the whole model, {stage: {label: entry}}.
        average: new moving averages of the weights; {} if the learner keeps none.
    """

    weights: Nested
    entry: Nested
    average: Nested


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupLeaves(Generic[Leaf]):
    """The four parts of a `LayerTrainState`, or some of their leaves, by path: arrays or specs.

    Attributes:
        weights: trainable parameters.
        grads: their gradients; {} where gradients take no part.
        entry: optimizer state.
        average: moving averages of the parameters.
    """

    weights: dict[str, Leaf]
    grads: dict[str, Leaf] = field(default_factory=dict)
    entry: dict[str, Leaf] = field(default_factory=dict)
    average: dict[str, Leaf] = field(default_factory=dict)

    @staticmethod
    def from_train_state(train_state: LayerTrainState) -> GroupLeaves[Leaf]:
        """Return the leaves of a train state, or of its specs."""
        return GroupLeaves(
            flatten(train_state.weights),
            flatten(train_state.grads),
            flatten(train_state.entry),
            flatten(train_state.average),
        )

    @property
    def parts(self) -> dict[str, dict[str, Leaf]]:
        """Return the four parts by name."""
        return {"weights": self.weights, "grads": self.grads, "entry": self.entry, "average": self.average}


@dataclass(frozen=True, eq=False)
class LayerUpdateFn:
    """The update of one layer of a group, or of a stage that is not stacked.

    Attributes:
        optimizer: the group's optimizer.
        clipping: clipping of gradients and updates.
        ema: decay of the moving averages; None keeps none.
        draws: whether updates of the model draw noise, here or in another group.
    """

    optimizer: GroupOptimizer
    clipping: Clipping
    ema: float | None
    draws: bool

    def measure_locality(self) -> UpdateLocality:
        """Return the smallest part of a layer that can be updated independently; measured on first use."""
        return self.clipping.adjust_locality(self.optimizer.measure_locality())

    def __call__(self, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
        """Return the new values of one layer; if the decision is not ok, everything keeps its old value."""
        optimizer = self.optimizer.transformation
        precision = self.optimizer.precision
        group = self.optimizer.group
        weights = train_state.weights
        entry = train_state.entry
        ok = decision.ok
        if MASTER in entry:
            precise_weights = entry[MASTER]
        else:
            precise_weights = upcast(precision.rounding, weights, entry.get(COMPENSATION))
        # The layer's seed, which is the same in every step.
        seed = decision.seed
        if self.draws:
            # Layers of a stack share the program, and stages may share layer numbers, but neither may share noise.
            home = group.stage if group.layer_range is None else group.layer_range.home
            seed = fold_name(fold(seed, decision.layer), home)

        # The update, clipped before or after the optimizer.
        precise_grads = jax.tree.map(lambda g, w: g.astype(w.dtype), train_state.grads, precise_weights)
        clipped_grads, new_norms = self.clipping.clip_gradients(precise_grads, entry.get(NORM, {}), decision.factor)
        optimizer_state = precision.widen(entry[STATE], precise_weights)
        extra = {"seed": seed} if optimizer.draws else {}
        updates, new_state = optimizer.update(clipped_grads, optimizer_state, precise_weights, **extra)
        updates = self.clipping.clip_updates(updates, self.optimizer.learning_rate, decision.count)
        updated_weights: PyTree = optax.apply_updates(precise_weights, updates)

        # New weights.
        rounding_error: Nested = {}
        if precision.rounding == "nearest":
            # Select between old and new master weights, then cast. If the cast weights were selected separately, XLA
            # would compute the update twice, and read gradients and moments once more.
            updated_weights = select_updated(ok, updated_weights, precise_weights)
            new_weights = jax.tree.map(lambda new, old: new.astype(old.dtype), updated_weights, weights)
        else:
            # Folding in the number of updates makes the noise differ between steps.
            noise_seed = fold(seed, decision.count)
            rounded_weights, rounding_error = round_weights(
                precision.rounding, updated_weights, weights, noise_seed, decision.origin
            )
            new_weights = select_updated(ok, rounded_weights, weights)

        # New optimizer state.
        new_state = precision.narrow(new_state, entry[STATE], fold(seed, decision.count), decision.origin)
        new_entry: Nested = {STATE: new_state}
        if COMPENSATION in entry:
            new_entry[COMPENSATION] = rounding_error
        if new_norms is not None:
            new_entry[NORM] = new_norms
        new_entry = select_updated(ok, new_entry, {name: entry[name] for name in new_entry})
        if MASTER in entry:
            # A master copy is rounded to nearest, so old and new one were selected between above.
            new_entry[MASTER] = updated_weights

        # New moving average.
        new_average = train_state.average
        if self.ema is not None:
            rate = 1.0 - self.ema
            moved_average = jax.tree.map(lambda a, w: a + rate * (w.astype(a.dtype) - a), new_average, updated_weights)
            new_average = select_updated(ok, moved_average, new_average)
        return LayerUpdate(new_weights, new_entry, new_average)


def update_all_layers(update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
    """Update a whole group at once: the update of one layer, vmapped over the layers if there are several.

    Args:
        update: the update of one layer.
        train_state: weights, gradients, optimizer state and averages, stacked like the group.
        decision: see `Learner.decide`.
    """
    if update.optimizer.group.length is None:
        return update(train_state, decision)
    # The layers' update counters, which are equal, are replaced by one number. If vmap mapped over them, the learning
    # rate and Adam's bias corrections would become vectors over the layers, and XLA for TPU would transpose whole
    # stacks of weights to multiply by them: 24 copies, 2.9% of Llama-2-7B's peak on 16 chips.
    counters = update.optimizer.counters()
    entry_axes = tree_map_with_path(lambda path, _: None if path_name(path) in counters else 0, train_state.entry)
    entry = tree_map_with_path(lambda path, leaf: leaf[0] if path_name(path) in counters else leaf, train_state.entry)
    axes = LayerTrainState(weights=0, grads=0, entry=entry_axes, average=0)  # pyright: ignore[reportArgumentType]
    # `train_state` may hold only some layers of the stage, so the leaves' shape gives their number.
    num_layers = jax.tree.leaves(train_state.weights)[0].shape[0]
    layers = decision.layer + jnp.arange(num_layers)
    update_layers = jax.vmap(lambda state, layer: update(state, replace(decision, layer=layer)), in_axes=(axes, 0))
    return update_layers(replace(train_state, entry=entry), layers)


def slice_layer(stacks: PyTree, index: jax.typing.ArrayLike) -> PyTree:
    """Return one layer of stacked leaves: [N, ...] -> [...]; `index` may be traced."""
    return jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), stacks)


def write_layer(stacks: PyTree, layer_leaves: PyTree, index: jax.typing.ArrayLike) -> PyTree:
    """Write a layer's leaves [...] into stacked leaves [N, ...] at `index`, which may be traced."""
    return jax.tree.map(lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, index, 0), stacks, layer_leaves)


def select_updated(ok: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Select the new leaves if the step counts, else the old ones."""
    return jax.tree.map(lambda new_leaf, old_leaf: jnp.where(ok, new_leaf, old_leaf), new, old)
