"""Updates layers in the backward pass, before the norm is known (memory.update = streamed, prefetch = speculative).

Speculation and validation (SuperOffload, arXiv 2509.21271): each layer is updated during the backward pass as if
nothing were clipped or skipped, while other layers compute. The new state goes to a second copy in host memory, so the
old one is still there at the end of the backward pass, when the norm of all gradients is known. If it clips, or the
step does not count, the layers are updated again from the old state and the gradients in host memory, one after the
other. The numbers are those of an immediate update.

The copies are the groups "optimizer" and "spare" of the state, and "ema" and "spare_ema". A compiled step leaves the
new values in the spares, because each of its results uses the memory of the argument of the same name.
`exchange_spares` then exchanges the names.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, StateLayout, TrainState, flatten, unflatten
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.group_optimizer import unflatten_like
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import GroupLeaves, LayerTrainState, LayerUpdate, LayerUpdateFn
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.backward_state import BackwardState, StagedLayer
from plimsoll.framework.schedules.optimizer_prefetch import OptimizerPrefetch

State = TypeVar("State", TrainState, BackwardState)


def select_spare_specs(specs: Nested, model: Chain) -> Nested:
    """Return the specs of the second copies: those of the leaves of stacks that are in host memory.

    Args:
        specs: specs of optimizer state or averages, by stage, each in its memory.
        model: the model with the stacks.
    """
    spares = {}
    for stack in model.stacks:
        offloaded = {path: spec for path, spec in flatten(specs.get(stack, {})).items() if spec.is_offloaded}
        if offloaded:
            spares[stack] = unflatten(offloaded)
    return spares


def exchange_spares(state: State) -> State:
    """Exchange each second copy with the leaf that it copies; no array moves."""
    optimizer, spare = _exchange(state.optimizer, state.spare)
    ema, spare_ema = _exchange(state.ema, state.spare_ema)
    return replace(state, optimizer=optimizer, spare=spare, ema=ema, spare_ema=spare_ema)


def _exchange(tree: Nested, spares: Nested) -> tuple[Nested, Nested]:
    exchanged = dict(tree)
    exchanged_spares = {}
    for stage, spare_tree in spares.items():
        leaves = flatten(tree[stage])
        spare_leaves = flatten(spare_tree)
        exchanged[stage] = unflatten_like(tree[stage], leaves | spare_leaves)
        exchanged_spares[stage] = unflatten({path: leaves[path] for path in spare_leaves})
    return exchanged, exchanged_spares


@dataclass(frozen=True)
class SpeculativeUpdate:
    """The updates of a step's stacks, before and after the norm of all gradients is known.

    `begin_loop`, `begin_layer` and `end_loop` are hooks, see `BackwardHooks`.

    Attributes:
        learner: the learner that updates.
        layout: the layout of the training state.
        stacks: names of the stacks that are updated; nothing happens to others.
        decision: the decision of a step that clips nothing, and whose gradients are finite.
    """

    learner: Learner
    layout: StateLayout
    stacks: Collection[str]
    decision: Decision

    @property
    def _prefetcher(self) -> OptimizerPrefetch:
        return OptimizerPrefetch(self.learner, self.layout, writes_second_copy=True)

    def begin_loop(self, state: BackwardState, stack: str, index: jax.Array) -> BackwardState:
        """Start fetching the state of the first layer to the device."""
        if stack not in self.stacks:
            return state
        return self._prefetcher.begin_loop(state, stack, index)

    def begin_layer(self, state: BackwardState, stack: str, index: jax.Array) -> BackwardState:
        """Start writing the new state of the layer that was updated last, and fetching that of the layer at `index`.

        Other arrays are written than read, so both directions of the link are busy at the same time.
        """
        return self.begin_loop(self.end_loop(state, stack), stack, index)

    def end_loop(self, state: BackwardState, stack: str) -> BackwardState:
        """Start writing the new state of the layer that was updated last."""
        if stack not in self.stacks:
            return state
        return exchange_spares(self._prefetcher.end_loop(exchange_spares(state), stack))

    def update_layer(self, state: BackwardState, stage: str, grads: Nested) -> BackwardState:
        """Update a layer whose state has arrived.

        Args:
            state: the state of the backward pass.
            stage: name of the stack; stages outside the stacks are updated when the norm is known.
            grads: the layer's gradients, on the device.
        """
        if stage not in self.stacks:
            return state
        arrived = state.staged_layer
        assert arrived is not None
        leaving: dict[str, GroupLeaves[jax.Array]] = {}

        def run(update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
            label = update.optimizer.group.label
            new_stacks, leaving[label] = self._prefetcher.update(update, train_state, decision, arrived)
            return new_stacks

        with jax.named_scope("update"):
            new = self.learner.update(
                state.parameter, {stage: grads}, state.optimizer, state.ema, self.decision, run, stage
            )
        left = StagedLayer(leaving, arrived.index)
        return replace(state, parameter=new.weights, optimizer=new.entry, ema=new.average, staged_layer=left)

    def correct(self, old: TrainState, new: BackwardState, decision: Decision) -> BackwardState:
        """Update the stacks again if the speculation was wrong.

        Args:
            old: the training state before the step.
            new: the state after the backward pass, with all gradients of the stacks.
            decision: the decision of the step.
        """
        is_unclipped = self.decision.ok & (decision.factor == self.decision.factor)
        is_right = jnp.where(decision.ok, is_unclipped, ~self.decision.ok)
        for stack in self.stacks:
            num_layers = jax.tree.leaves(old.parameter[stack])[0].shape[0]
            # No iteration if the speculation was right.
            num_wrong = jnp.where(is_right, 0, num_layers)
            with jax.named_scope("update"):
                new = jax.lax.fori_loop(0, num_wrong, partial(self._correct_layer, old, decision, stack), new)
        return new

    def _correct_layer(
        self, old: TrainState, decision: Decision, stack: str, index: jax.Array, new: BackwardState
    ) -> BackwardState:
        """Update a layer from its old state, and write the result over that of the speculation."""
        # Moves every leaf: also those on the device have been overwritten in `new`.
        prefetcher = OptimizerPrefetch(self.learner, self.layout, True, self.layout.specs.gradient)
        source = BackwardState(parameter=old.parameter, optimizer=old.optimizer, ema=old.ema, gradient=new.gradient)
        staged_layer = prefetcher.begin_loop(source, stack, index).staged_layer
        assert staged_layer is not None
        leaving: dict[str, GroupLeaves[jax.Array]] = {}

        def run(update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
            label = update.optimizer.group.label
            unchanged, leaving[label] = prefetcher.update(update, train_state, decision, staged_layer)
            return unchanged

        self.learner.update(old.parameter, new.gradient, old.optimizer, old.ema, decision, run, stack)
        new = replace(exchange_spares(new), staged_layer=StagedLayer(leaving, index))
        return exchange_spares(prefetcher.end_loop(new, stack))
