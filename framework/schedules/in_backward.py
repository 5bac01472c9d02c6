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
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.units import Bundle, Decision, Group, UnitUpdate, Update
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.backward import forward
from plimsoll.framework.schedules.gradients import Tally, counted, judge, with_tally
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.pieces import update_group
from plimsoll.framework.schedules.state_ahead import Moving, StateAhead, UnitState
from plimsoll.framework.schedules.step import Metrics, State, Step, finish, training_context
from plimsoll.framework.schedules.streamed import bundle_specs
from plimsoll.framework.schedules.streamed import check as check_platform
from plimsoll.framework.schedules.visits import Turns, Visit, Work

# Key of the backward state when layer state is prefetched: the UnitState of the layer that was updated last.
_UNIT = "unit state"


def check(learner: Learner, setting: str = "memory.update = in_backward") -> None:
    """Check that the learner works with an update in the backward pass.

    Raises:
        ValueError: the learner accumulates gradients, or its clip mode needs the norm of all gradients first.
    """
    if learner.accumulate > 1:
        raise ValueError(
            f"learner.accumulate = {learner.accumulate} with {setting}: the first microbatch's "
            "gradients are gone when the second comes; expected 1, or memory.update = streamed with memory.gradients = "
            "pinned_host"
        )
    # With two_pass, the first backward pass provides the norm of all gradients to the second.
    if learner.clipping.needs_all_gradients and learner.clip_mode != "two_pass":
        raise ValueError(
            f"learner.clip_mode = {learner.clip_mode} with {setting}: the norm of all gradients is known only "
            "when all units are updated; expected two_pass (exact, a second backward pass), previous_norm, update_rms, "
            "norm_growth, or learner.clip = None; or memory.update = streamed with memory.gradients = pinned_host, "
            "which clips exactly in one pass"
        )


def _turns(ahead: StateAhead) -> Turns:
    """Return loop hooks that fetch and store layer state; the backward state holds that of the layer updated last."""

    def begin_loop(work: Work, stack: str, index: jax.Array) -> Work:
        return {**work, _UNIT: ahead.fetched(work, stack, index)}

    def begin_unit(work: Work, stack: str, index: jax.Array) -> Work:
        work, unit = ahead.exchanged(work, stack, work[_UNIT], index)
        return {**work, _UNIT: unit}

    def end_loop(work: Work, stack: str) -> Work:
        stored = ahead.stored(work, stack, work[_UNIT])
        # The next stack's layers have other shapes, so the key is dropped after the loop.
        return {group: tree for group, tree in stored.items() if group != _UNIT}

    return Turns(begin_loop, begin_unit, end_loop)


def build_step(
    model: Chain,
    learner: Learner,
    layout: StateLayout,
    memory: Memory,
) -> Step:
    """Return the training step; see `after_backward.build_step`, and `check` and `streamed.check` for the errors."""
    check(learner)
    platform = layout.mesh.devices.flat[0].platform
    check_platform(layout, memory, platform)
    learner.try_reach()
    ahead = _state_ahead(learner, layout, memory, platform)
    turns = Turns() if ahead is None else _turns(ahead)

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        ctx = training_context(batch, state["counter"], model, layout, memory.remat)
        weights = {group: state[group] for group in ("parameter", "frozen")}
        loss, out, pull = forward(model, layout, memory, weights, ctx, state["buffer"])
        zero = jnp.zeros_like(loss)
        norm = zero
        if learner.clip_mode == "two_pass":
            measured = pull({**weights, "squares": zero}, _measuring(learner))
            # The backward loop carries the weights and returns them, although nothing changed them.
            weights = {group: measured[group] for group in weights}
            norm = jnp.sqrt(measured["squares"])
        # In a single pass the norm is not known yet: it is set to zero, so that only the loss decides whether the
        # step counts.
        decision = learner.decide(loss, norm, state["counter"])
        work = {
            **weights,
            "optimizer": state["optimizer"],
            "ema": state["ema"],
            **Tally(ok=decision.ok, squares=zero, updated=jnp.int32(0)),
        }
        work = pull(work, _Updating(learner, layout, ahead, decision), turns)
        tally = _tally(work)
        decision = with_tally(decision, tally)
        metrics = {**out.metrics, "updated_units": tally["updated"]}
        update = work["parameter"], work["optimizer"], work["ema"]
        return finish(
            learner,
            state,
            update,
            decision,
            loss,
            replace(out, metrics=metrics),
            frozen=work["frozen"],
        )

    return step


def _state_ahead(
    learner: Learner,
    layout: StateLayout,
    memory: Memory,
    platform: str,
) -> StateAhead | None:
    """Return the prefetcher of whole layers' state, or None if each update fetches its state chunk by chunk."""
    # On CPU whole layers are moved because of the loop, not because of a link: XLA would copy a stack that one
    # operation reads and another one writes.
    if platform == "cpu" and (not memory.optimizer_state.uses_host or memory.prefetch == "unit"):
        return StateAhead(learner, layout, moves_all=True)
    return StateAhead(learner, layout) if memory.prefetch == "unit" else None


def _tally(work: Work) -> Tally:
    """Return the gradient statistics in the state of a backward pass that updates."""
    return Tally(ok=work["ok"], squares=work["squares"], updated=work["updated"])


def _measuring(learner: Learner) -> Visit:
    """Return a hook that adds a layer's squared gradient norm to the backward state, and drops the gradients."""

    def visit(
        work: Work,
        stage: str,
        grads: Nested,
        index: jax.Array | None,
    ) -> Work:
        # The squared norms of the layers add up to the square of the global norm.
        squares = work["squares"] + jnp.square(learner.norm(grads))
        return {**work, "squares": squares}

    return visit


@dataclass(frozen=True)
class _Updating:
    """A hook that updates a layer by its gradients, unless these, or those of a layer before it, are not finite."""

    learner: Learner
    layout: StateLayout
    ahead: StateAhead | None
    decision: Decision

    def __call__(self, work: Work, stage: str, grads: Nested, index: jax.Array | None) -> Work:
        """Update the stage or layer; see `Visit`."""
        learner = self.learner
        judged = judge(learner, work["ok"], grads)
        leaving: dict[str, Moving] = {}

        def run(group: Group, update: UnitUpdate, bundle: Bundle, decision: Decision) -> Update:
            # Stages outside stacks have no layer whose state could be prefetched.
            if self.ahead is not None and index is not None:
                unit_state = work[_UNIT]
                new_stacks, leaving[group.label] = self.ahead.update(group, update, bundle, decision, unit_state)
                return new_stacks
            specs = bundle_specs(self.layout, learner, group, learner.unit_specs(group))
            return update_group(learner, self.layout.mesh, group, bundle, specs, decision, index)

        with jax.named_scope("update"):
            params, optimizer, ema = learner.update(
                work["parameter"],
                {stage: grads},
                work["optimizer"],
                work["ema"],
                self.decision._replace(ok=judged.ok),
                run,
                stage,
            )
        updated = {
            **work,
            "parameter": params,
            "optimizer": optimizer,
            "ema": ema,
            **counted(_tally(work), judged),
        }
        # The new state waits here until the next layer's turn stores it.
        if leaving and index is not None:
            updated[_UNIT] = UnitState(leaving, index)
        return updated
