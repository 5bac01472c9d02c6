"""Updates each layer in the backward pass, as soon as its gradient is ready, and then frees the gradient.

No program holds the gradients of more than one layer, and nothing waits for the global norm. Clipping is per tensor,
by the norm of the previous step, or exact with a second backward pass (`learner.clip_mode`). If a layer's gradient is
not finite, neither this layer nor the ones after it are updated. The layers before it have been updated; the metric
`updated_units` counts them (LOMO, Lv et al. 2023, arXiv 2306.09782; AdaLomo, arXiv 2310.10195).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, StateLayout
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate, LayerUpdateFn
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.backward import forward
from plimsoll.framework.schedules.backward_hooks import BackwardState, GradientHook, LayerHooks
from plimsoll.framework.schedules.chunked_update import update_group
from plimsoll.framework.schedules.gradients import GradStats, add_grad_stats, check_finite, with_grad_stats
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.optimizer_prefetch import MovedLeaves, OptimizerPrefetch, PrefetchedState
from plimsoll.framework.schedules.step import Metrics, State, Step, finish, training_context
from plimsoll.framework.schedules.streamed import check as check_platform
from plimsoll.framework.schedules.streamed import train_state_specs

# Key of the backward state when layer state is prefetched: the PrefetchedState of the layer that was updated last.
_LAYER_STATE = "staged layer state"


def check(learner: Learner, setting: str = "memory.update = in_backward") -> None:
    """Check that the learner works with an update in the backward pass.

    Args:
        learner: the learner to check.
        setting: the setting that requests this update, for error messages.

    Raises:
        ValueError: the learner accumulates gradients, or its clip mode needs the norm of all gradients first.
    """
    if learner.accumulate > 1:
        raise ValueError(
            f"learner.accumulate = {learner.accumulate} with {setting}: each gradient is freed right after "
            "its update, so microbatches cannot be summed; expected 1, or memory.update = streamed with "
            "memory.gradients = pinned_host"
        )
    # With two_pass, the first backward pass provides the norm of all gradients to the second.
    if learner.clipping.needs_all_gradients and learner.clip_mode != "two_pass":
        raise ValueError(
            f"learner.clip_mode = {learner.clip_mode} with {setting}: the norm of all gradients is known only "
            "after the last update; expected two_pass (exact, a second backward pass), previous_norm, update_rms, "
            "norm_growth, or learner.clip = None; or memory.update = streamed with memory.gradients = pinned_host, "
            "which clips exactly in one pass"
        )


def _make_layer_hooks(prefetcher: OptimizerPrefetch) -> LayerHooks:
    """Return loop hooks that fetch and store layer state; the backward state holds that of the layer updated last."""

    def begin_loop(backward_state: BackwardState, stack: str, index: jax.Array) -> BackwardState:
        return {**backward_state, _LAYER_STATE: prefetcher.fetch(backward_state, stack, index)}

    def begin_layer(backward_state: BackwardState, stack: str, index: jax.Array) -> BackwardState:
        backward_state, layer_state = prefetcher.exchange(backward_state, stack, backward_state[_LAYER_STATE], index)
        return {**backward_state, _LAYER_STATE: layer_state}

    def end_loop(backward_state: BackwardState, stack: str) -> BackwardState:
        store = prefetcher.store(backward_state, stack, backward_state[_LAYER_STATE])
        # The next stack's layers have other shapes, so the key is dropped after the loop.
        return {group: tree for group, tree in store.items() if group != _LAYER_STATE}

    return LayerHooks(begin_loop, begin_layer, end_loop)


def build_step(model: Chain, learner: Learner, layout: StateLayout, memory: Memory) -> Step:
    """Return the training step; see `after_backward.build_step`, and `check` and `streamed.check` for the errors."""
    check(learner)
    platform = layout.mesh.devices.flat[0].platform
    check_platform(layout, memory, platform)
    learner.measure_localities()
    prefetcher = _make_prefetcher(learner, layout, memory, platform)
    layer_hooks = LayerHooks() if prefetcher is None else _make_layer_hooks(prefetcher)

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        ctx = training_context(batch, state["counter"], model, layout, memory.remat)
        weights = {group: state[group] for group in ("parameter", "frozen")}
        loss, out, pull = forward(model, layout, memory, weights, ctx, state["buffer"])
        zero = jnp.zeros_like(loss)
        norm = zero
        if learner.clip_mode == "two_pass":
            measured = pull({**weights, "squares": zero}, _make_norm_hook(learner))
            # The backward loop carries the weights and returns them, although nothing changed them.
            weights = {group: measured[group] for group in weights}
            norm = jnp.sqrt(measured["squares"])
        # In a single pass the norm is not known yet: it is set to zero, so that only the loss decides whether the
        # step counts.
        decision = learner.decide(loss, norm, state["counter"])
        backward_state = {
            **weights,
            "optimizer": state["optimizer"],
            "ema": state["ema"],
            **GradStats(ok=decision.ok, squares=zero, updated=jnp.int32(0)),
        }
        backward_state = pull(backward_state, _UpdateHook(learner, layout, prefetcher, decision), layer_hooks)
        grad_stats = _get_grad_stats(backward_state)
        decision = with_grad_stats(decision, grad_stats)
        metrics = {**out.metrics, "updated_units": grad_stats["updated"]}
        update = LayerUpdate(backward_state["parameter"], backward_state["optimizer"], backward_state["ema"])
        return finish(
            learner, state, update, decision, loss, replace(out, metrics=metrics), frozen=backward_state["frozen"]
        )

    return step


def _make_prefetcher(learner: Learner, layout: StateLayout, memory: Memory, platform: str) -> OptimizerPrefetch | None:
    """Return the prefetcher of whole layers' state, or None if each update fetches its state chunk by chunk."""
    # On CPU whole layers are moved because of the loop, not because of a link: XLA would copy a stack that one
    # operation reads and another one writes.
    if platform == "cpu" and (not memory.optimizer_state.uses_host or memory.prefetch == "layer"):
        return OptimizerPrefetch(learner, layout, moves_all=True)
    return OptimizerPrefetch(learner, layout) if memory.prefetch == "layer" else None


def _get_grad_stats(backward_state: BackwardState) -> GradStats:
    """Return the gradient statistics in the state of a backward pass that updates."""
    return GradStats(ok=backward_state["ok"], squares=backward_state["squares"], updated=backward_state["updated"])


def _make_norm_hook(learner: Learner) -> GradientHook:
    """Return a hook that adds a layer's squared gradient norm to the backward state, and drops the gradients."""

    def on_grads(backward_state: BackwardState, stage: str, grads: Nested, index: jax.Array | None) -> BackwardState:
        # The squared norms of the layers add up to the square of the global norm.
        squares = backward_state["squares"] + jnp.square(learner.norm(grads))
        return {**backward_state, "squares": squares}

    return on_grads


@dataclass(frozen=True)
class _UpdateHook:
    """A hook that updates a layer by its gradients, unless these, or those of a layer before it, are not finite.

    Attributes:
        learner: the learner that updates.
        layout: the layout of the training state.
        prefetcher: moves the state of whole layers; None if each update fetches its own state.
        decision: the decision of the step, made before its gradients were known.
    """

    learner: Learner
    layout: StateLayout
    prefetcher: OptimizerPrefetch | None
    decision: Decision

    def __call__(
        self, backward_state: BackwardState, stage: str, grads: Nested, index: jax.Array | None
    ) -> BackwardState:
        """Update the stage or layer; see `GradientHook`."""
        learner = self.learner
        finite_check = check_finite(learner, backward_state["ok"], grads)
        leaving: dict[str, MovedLeaves] = {}

        def run(
            group: ParamGroup, update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision
        ) -> LayerUpdate:
            # Stages outside stacks have no layer whose state could be prefetched.
            if self.prefetcher is not None and index is not None:
                layer_state = backward_state[_LAYER_STATE]
                new_stacks, leaving[group.label] = self.prefetcher.update(
                    group, update, train_state, decision, layer_state
                )
                return new_stacks
            specs = train_state_specs(self.layout, learner, group, learner.layer_specs(group))
            return update_group(learner, self.layout.mesh, group, train_state, specs, decision, index)

        with jax.named_scope("update"):
            new = learner.update(
                backward_state["parameter"],
                {stage: grads},
                backward_state["optimizer"],
                backward_state["ema"],
                replace(self.decision, ok=finite_check.ok),
                run,
                stage,
            )
        updated = {
            **backward_state,
            "parameter": new.weights,
            "optimizer": new.entry,
            "ema": new.average,
            **add_grad_stats(_get_grad_stats(backward_state), finite_check),
        }
        # The new state waits here until the next iteration of the loop stores it.
        if leaving and index is not None:
            updated[_LAYER_STATE] = PrefetchedState(leaving, index)
        return updated
