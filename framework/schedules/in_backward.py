"""Updates each layer in the backward pass, as soon as its gradient is ready, and then frees the gradient.

No program holds the gradients of more than one layer, and nothing waits for the global norm. Clipping is per tensor,
by the norm of the previous step, or exact with a second backward pass (`learner.clip_mode`). If a layer's gradient is
not finite, neither this layer nor the ones after it are updated. The layers before it have been updated; the metric
`updated_units` counts them (LOMO, Lv et al. 2023, arXiv 2306.09782; AdaLomo, arXiv 2310.10195).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, StateLayout, TrainState
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import GroupLeaves, LayerTrainState, LayerUpdate, LayerUpdateFn
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.backward import forward
from plimsoll.framework.schedules.backward_state import BackwardHooks, BackwardState, StagedLayer
from plimsoll.framework.schedules.chunked_update import train_state_specs, update_group
from plimsoll.framework.schedules.gradients import GradStats, add_grad_stats, check_finite, with_grad_stats
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.optimizer_prefetch import OptimizerPrefetch
from plimsoll.framework.schedules.step import Metrics, Step, finish, stack_microbatches, training_context
from plimsoll.framework.schedules.streamed import check as check_platform


def check(learner: Learner, setting: str = "memory.update = in_backward", *, accumulates: bool = False) -> None:
    """Check that the learner works with an update in the backward pass.

    Args:
        learner: the learner to check.
        setting: the setting that requests this update, for error messages.
        accumulates: whether the schedule can sum the gradients of microbatches.

    Raises:
        ValueError: the learner accumulates gradients, or its clip mode needs the norm of all gradients first.
    """
    if learner.accumulate > 1 and not accumulates:
        raise ValueError(
            f"learner.accumulate = {learner.accumulate} with {setting}: each gradient is freed right after "
            "its update, so microbatches cannot be summed one after the other; expected memory.accumulate_by = layer, "
            "or learner.accumulate = 1"
        )
    # With two_pass, the first backward pass provides the norm of all gradients to the second.
    if learner.clipping.needs_all_gradients and learner.clip_mode != "two_pass":
        raise ValueError(
            f"learner.clip_mode = {learner.clip_mode} with {setting}: the norm of all gradients is known only "
            "after the last update; expected two_pass (exact, a second backward pass), previous_norm, update_rms, "
            "norm_growth, or learner.clip = None; or memory.update = streamed with memory.gradients = pinned_host, "
            "which clips exactly in one pass"
        )


def build_step(model: Chain, learner: Learner, layout: StateLayout, memory: Memory) -> Step:
    """Return the training step; see `after_backward.build_step`, and `check` and `streamed.check` for the errors."""
    check(learner, accumulates=memory.accumulate_by == "layer")
    platform = layout.mesh.devices.flat[0].platform
    check_platform(layout, memory, platform)
    learner.measure_localities()
    # On CPU whole layers are moved because of the loop, not because of a link: XLA would copy a stack that one
    # operation reads and another one writes.
    moves_all = platform == "cpu" and (not memory.optimizer_state.uses_host or memory.prefetch == "layer")
    # Without it, each update fetches its state chunk by chunk.
    prefetcher = None
    if moves_all or memory.prefetch == "layer":
        prefetcher = OptimizerPrefetch(learner, layout, moves_all=moves_all)

    def step(state: TrainState, batch: Nested) -> tuple[TrainState, Metrics]:
        ctx = training_context(batch, state.counter, model, layout, memory.remat)
        ctx = stack_microbatches(ctx, learner.accumulate)
        weights = BackwardState(parameter=state.parameter, frozen=state.frozen)
        result = forward(model, layout, memory, weights, ctx, state.buffer, num_microbatches=learner.accumulate)
        loss = result.loss
        zero = jnp.zeros_like(loss)
        norm = zero
        if learner.clip_mode == "two_pass":
            measured = result.pull(replace(weights, squares=zero), BackwardHooks(partial(_add_squares, learner)))
            assert measured.squares is not None
            # The backward loop carries the weights and returns them, although nothing changed them.
            weights = BackwardState(parameter=measured.parameter, frozen=measured.frozen)
            norm = jnp.sqrt(measured.squares)
        # In a single pass the norm is not known yet: it is set to zero, so that only the loss decides whether the
        # step counts.
        decision = learner.decide(loss, norm, state.counter)
        backward_state = replace(
            weights, optimizer=state.optimizer, ema=state.ema, ok=decision.ok, squares=zero, updated=jnp.int32(0)
        )
        hooks = BackwardHooks(_UpdateHook(learner, layout, prefetcher, decision))
        if prefetcher is not None:
            hooks = replace(
                hooks,
                begin_loop=prefetcher.begin_loop,
                begin_layer=prefetcher.begin_layer,
                end_loop=prefetcher.end_loop,
            )
        backward_state = result.pull(backward_state, hooks)
        grad_stats = _get_grad_stats(backward_state)
        decision = with_grad_stats(decision, grad_stats)
        metrics = {**result.out.metrics, "updated_units": grad_stats.updated}
        update = LayerUpdate(backward_state.parameter, backward_state.optimizer, backward_state.ema)
        out = replace(result.out, metrics=metrics)
        return finish(learner, state, update, decision, loss, out, frozen=backward_state.frozen)

    return step


def _get_grad_stats(backward_state: BackwardState) -> GradStats:
    """Return the gradient statistics in the state of a backward pass that updates."""
    assert backward_state.ok is not None
    assert backward_state.squares is not None
    assert backward_state.updated is not None
    return GradStats(ok=backward_state.ok, squares=backward_state.squares, updated=backward_state.updated)


def _add_squares(
    learner: Learner, backward_state: BackwardState, stage: str, grads: Nested, index: jax.Array | None
) -> BackwardState:
    """Add a layer's squared gradient norm to the backward state, and drop the gradients: a gradient hook."""
    assert backward_state.squares is not None
    # The squared norms of the layers add up to the square of the global norm.
    return replace(backward_state, squares=backward_state.squares + jnp.square(learner.norm(grads)))


@dataclass(frozen=True)
class _UpdateHook:
    """A gradient hook that updates a layer, unless its gradients, or those of a layer before it, are not finite.

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
        """Update the stage or layer; see `BackwardHooks`."""
        learner = self.learner
        grad_stats = _get_grad_stats(backward_state)
        finite_check = check_finite(learner, grad_stats.ok, grads)
        staged_layer = backward_state.staged_layer
        leaving: dict[str, GroupLeaves[jax.Array]] = {}

        def run(update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
            group = update.optimizer.group
            # Stages outside stacks have no layer whose state could be prefetched.
            if self.prefetcher is not None and staged_layer is not None:
                new_stacks, leaving[group.label] = self.prefetcher.update(update, train_state, decision, staged_layer)
                return new_stacks
            specs = train_state_specs(self.layout, learner, group, update.optimizer.layer_specs)
            return update_group(update, self.layout.mesh, train_state, specs, decision, index)

        with jax.named_scope("update"):
            new = learner.update(
                backward_state.parameter,
                {stage: grads},
                backward_state.optimizer,
                backward_state.ema,
                replace(self.decision, ok=finite_check.ok),
                run,
                stage,
            )
        # The new state waits here until the next iteration of the loop stores it.
        if leaving and index is not None:
            staged_layer = StagedLayer(leaving, index)
        grad_stats = add_grad_stats(grad_stats, finite_check)
        return replace(
            backward_state,
            parameter=new.weights,
            optimizer=new.entry,
            ema=new.average,
            staged_layer=staged_layer,
            ok=grad_stats.ok,
            squares=grad_stats.squares,
            updated=grad_stats.updated,
        )
