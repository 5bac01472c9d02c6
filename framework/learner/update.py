"""The update of one layer or unstacked stage: its weights, optimizer state and moving average after one step.

Every schedule uses this update, whether it updates layers all at once, one after the other or in chunks, so all
schedules compute the same numbers. The update is computed on precise weights: the master copy if there is one,
otherwise the weights in the dtype of the update. Decisions that depend on all gradients arrive as scalars (see
`Decision`).

A "layer" of a stack is one period of its pattern. An "update unit" is a layer, or a stage outside the stacks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from plimsoll.framework.layout import Nested, PyTree, path_name
from plimsoll.framework.learner.decisions import Clipping, Decision
from plimsoll.framework.learner.optimizer_instances import LearningRate
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.state import COMPENSATION, MASTER, NORM, STATE, GroupState
from plimsoll.framework.optimizers.rounding import fold, fold_name, round_weights, upcast


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTrainState:
    """The arrays that an update reads: of one layer, or of all layers of a group, stacked along a first axis.

    The leaves may also be the specs of these arrays. Gradients are stored like the weights, unless the layout has
    buffers for them; the other trees are stored as the layout places their groups "parameter", "optimizer" and "ema".

    Attributes:
        weights: weights in the parameters' shapes and dtypes.
        grads: gradients in the parameters' shapes, in their dtype or in that of sums over microbatches.
        entry: the group's entry of the optimizer state, see `framework.learner.state`.
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


@dataclass(frozen=True, eq=False)
class LayerUpdateFn:
    """The update of one layer of a group, or of a stage that is not stacked.

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

    def __call__(self, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
        """Return the new values of one layer; if the decision is not ok, everything keeps its old value."""
        optimizer = self.state.optimizer
        precision = self.state.precision
        group = self.state.group
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
        updates = self.clipping.clip_updates(updates, self.learning_rate, decision.count)
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


def update_all_layers(
    group: ParamGroup, update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision
) -> LayerUpdate:
    """Update a whole group at once: the update of one layer, vmapped over the layers if there are several.

    Args:
        group: the parameter group.
        update: the update of one layer.
        train_state: weights, gradients, optimizer state and averages, stacked like the group.
        decision: see `Learner.decide`.
    """
    if group.length is None:
        return update(train_state, decision)
    # The layers' update counters, which are equal, are replaced by one number. If vmap mapped over them, the learning
    # rate and Adam's bias corrections would become vectors over the layers, and XLA for TPU would transpose whole
    # stacks of weights to multiply by them: 24 copies, 2.9% of Llama-2-7B's peak on 16 chips.
    counters = update.state.counters()
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
