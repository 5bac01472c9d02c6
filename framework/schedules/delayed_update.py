"""Updates layers in the next step, each right before its forward pass (memory.update = streamed, prefetch = layer).

The norm of all gradients, which an exact clip needs, is known only at the end of the backward pass. An update that
starts then has nothing to hide its transfers behind. So a step leaves the gradients of its stacks in host memory,
together with the factor that clips them, and the next step updates each layer while the layer before it runs forward:
its gradients and state arrive, and the new state leaves. The numbers are those of an immediate update.

The scalars of an update that was left are the group "pending" of the state. `complete_update` applies it without a
step: before the state is saved, evaluated or compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, TrainState
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import GroupLeaves, LayerTrainState, LayerUpdate, LayerUpdateFn
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.backward_state import BackwardState, ForwardHooks, StagedLayer
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.optimizer_prefetch import OptimizerPrefetch

# The factor that clips the gradients of the pending update; 0 if there is none.
_FACTOR = "clip_factor"


def pending_specs() -> Nested:
    """Return the specs of the group "pending"."""
    # As wide as the norm of the gradients.
    return {_FACTOR: TensorSpec((), str(jax.dtypes.canonicalize_dtype("float64")))}


def leave_update(decision: Decision) -> Nested:
    """Return the group "pending" after a step; nothing is left of a step that does not count."""
    dtype = pending_specs()[_FACTOR].dtype
    return {_FACTOR: jnp.where(decision.ok, decision.factor, 0).astype(dtype)}


def clear_update(state: TrainState) -> TrainState:
    """Return the state without a pending update."""
    return replace(state, pending={_FACTOR: jnp.zeros_like(state.pending[_FACTOR])})


def recall_decision(learner: Learner, state: TrainState) -> Decision:
    """Return the decision of the step that left an update; it is not ok if there is none."""
    return learner.recall_decision(state.counter, state.pending[_FACTOR])


def find_delayed_stacks(model: Chain, layout: StateLayout, memory: Memory) -> list[str]:
    """Return the names of the stacks whose updates are left to the next step: those with gradients in host memory."""
    if not memory.delays_update:
        return []
    return [stack for stack in model.stacks if stack in layout.specs.gradient]


def build_hooks(learner: Learner, layout: StateLayout, state: TrainState, stacks: list[str]) -> ForwardHooks:
    """Return the hooks of a forward pass that applies a pending update; it needs all groups of the state.

    Args:
        learner, layout: the learner, and the layout of the training state.
        state: the training state before the step.
        stacks: names of the stacks to update.
    """
    # XLA for CPU would copy a stack that one operation of a loop reads and another one writes.
    moves_all = layout.mesh.devices.flat[0].platform == "cpu"
    prefetcher = OptimizerPrefetch(learner, layout, moves_all, layout.specs.gradient)
    update = _DelayedUpdate(learner, prefetcher, recall_decision(learner, state))
    return ForwardHooks(stacks, prefetcher.begin_loop, update, _drop_staged_layer)


@dataclass(frozen=True)
class _DelayedUpdate:
    """A hook that updates a layer before it runs forward.

    Attributes:
        learner: the learner that updates.
        prefetcher: moves gradients and state of whole layers.
        decision: the decision of the step that computed the gradients.
    """

    learner: Learner
    prefetcher: OptimizerPrefetch
    decision: Decision

    def __call__(self, state: BackwardState, stack: str, index: jax.Array, next_index: jax.Array) -> BackwardState:
        """Update a layer whose gradients and state have arrived, and start the transfers for the next layer."""
        staged_layer = state.staged_layer
        assert staged_layer is not None
        leaving: dict[str, GroupLeaves[jax.Array]] = {}

        def run(update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
            label = update.optimizer.group.label
            new_stacks, leaving[label] = self.prefetcher.update(update, train_state, decision, staged_layer)
            return new_stacks

        with jax.named_scope("update"):
            new = self.learner.update(
                state.parameter, state.gradient, state.optimizer, state.ema, self.decision, run, stack
            )
        state = replace(
            state, parameter=new.weights, optimizer=new.entry, ema=new.average, staged_layer=StagedLayer(leaving, index)
        )
        return self.prefetcher.begin_layer(state, stack, next_index)


def _drop_staged_layer(state: BackwardState, stack: str) -> BackwardState:
    """Drop the layer that the last iteration fetched in vain: every iteration of a loop does the same."""
    return replace(state, staged_layer=None)
