"""The update is part of the backward pass: a unit is updated as soon as its gradient is there, which is then gone.

No program holds more than one unit's gradients, and nothing waits for their norm: clipping is by tensor, by the norm of
the step before, or exact by a second backward pass (`learner.clip_mode`). A unit whose gradient is not finite is not
updated, nor are those after it; the units before it were, and the metric `updated_units` says how many (LOMO, Lv et al.
2023, arXiv 2306.09782; AdaLomo, arXiv 2310.10195).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from framework.layout import Nested, StateLayout
from framework.learner.learner import Learner
from framework.learner.units import Bundle, Decision, Group, UnitUpdate, Update
from framework.models.chain import Chain
from framework.schedules.backward import forward
from framework.schedules.gradients import Tally, counted, judge, with_tally
from framework.schedules.memory import Memory
from framework.schedules.pieces import update_group
from framework.schedules.state_ahead import Moving, StateAhead, UnitState
from framework.schedules.step import Metrics, State, Step, finish, training_context
from framework.schedules.streamed import bundle_specs
from framework.schedules.streamed import check as check_platform
from framework.schedules.visits import Turns, Visit, Work

# A key of the work of a backward pass whose units' state moves ahead: the UnitState of the unit that was
# updated last.
_UNIT = "unit state"


def check(learner: Learner, setting: str = "memory.update = in_backward") -> None:
    """Raises ValueError when the learner wants what an update in the backward pass cannot give."""
    if learner.accumulate > 1:
        raise ValueError(
            f"learner.accumulate = {learner.accumulate} with {setting}: the first microbatch's "
            "gradients are gone when the second comes; expected 1, or memory.update = streamed with memory.gradients = "
            "pinned_host"
        )
    # A second backward pass has the norm of all gradients from the first.
    if learner.clipping.needs_all_gradients and learner.clip_mode != "two_pass":
        raise ValueError(
            f"learner.clip_mode = {learner.clip_mode} with {setting}: the norm of all gradients is known only "
            "when all units are updated; expected two_pass (exact, a second backward pass), previous_norm, update_rms, "
            "norm_growth, or learner.clip = None; or memory.update = streamed with memory.gradients = pinned_host, "
            "which clips exactly in one pass"
        )


def _turns(ahead: StateAhead) -> Turns:
    """Fetches and stores the state of a stack's units: the work has that of the unit that was updated last."""

    def begin_loop(work: Work, stack: str, index: jax.Array) -> Work:
        return {**work, _UNIT: ahead.fetched(work, stack, index)}

    def begin_unit(work: Work, stack: str, index: jax.Array) -> Work:
        work, unit = ahead.exchanged(work, stack, work[_UNIT], index)
        return {**work, _UNIT: unit}

    def end_loop(work: Work, stack: str) -> Work:
        stored = ahead.stored(work, stack, work[_UNIT])
        # The next stack's units have other shapes, so the key goes with the loop.
        return {group: tree for group, tree in stored.items() if group != _UNIT}

    return Turns(begin_loop, begin_unit, end_loop)


def build_step(
    model: Chain,
    learner: Learner,
    layout: StateLayout,
    memory: Memory,
) -> Step:
    """The training step; see `after_backward.build_step`, and `check` and `streamed.check` for what is raised."""
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
            # A backward loop carries the weights and gives them back, though nothing changed them.
            weights = {group: measured[group] for group in weights}
            norm = jnp.sqrt(measured["squares"])
        # In one pass the norm is not known yet: with zero for it, the loss alone decides whether the step counts.
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
    """What moves the state of whole units; None: each unit's update takes its state from the stacks, piece by piece."""
    # On CPU moving whole units is not for the link but for the loop: XLA would copy a stack that one
    # operation reads and another one writes.
    if platform == "cpu" and (not memory.optimizer_state.uses_host or memory.prefetch == "unit"):
        return StateAhead(learner, layout, moves_all=True)
    return StateAhead(learner, layout) if memory.prefetch == "unit" else None


def _tally(work: Work) -> Tally:
    """The tally of a work that updates go with."""
    return Tally(ok=work["ok"], squares=work["squares"], updated=work["updated"])


def _measuring(learner: Learner) -> Visit:
    """Adds the square of a unit's gradient norm to the work, and lets the gradients go."""

    def visit(
        work: Work,
        stage: str,
        grads: Nested,
        index: jax.Array | None,
    ) -> Work:
        # The squares of units' norms add up to that of the whole norm.
        squares = work["squares"] + jnp.square(learner.norm(grads))
        return {**work, "squares": squares}

    return visit


@dataclass(frozen=True)
class _Updating:
    """A visit that updates a unit by its gradients, unless these, or those of a unit before it, are not finite."""

    learner: Learner
    layout: StateLayout
    ahead: StateAhead | None
    decision: Decision

    def __call__(self, work: Work, stage: str, grads: Nested, index: jax.Array | None) -> Work:
        """See `Visit`."""
        learner = self.learner
        judged = judge(learner, work["ok"], grads)
        leaving: dict[str, Moving] = {}

        def run(group: Group, update: UnitUpdate, bundle: Bundle, decision: Decision) -> Update:
            # Stages outside of stacks have no unit whose state could come ahead.
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
        # The new state waits here for the next unit's turn, when it is stored.
        if leaving and index is not None:
            updated[_UNIT] = UnitState(leaving, index)
        return updated
