"""A training step by layer programs: microbatches forward and backward, the decision, and the update."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.units import Decision, chosen
from plimsoll.framework.schedules.gradients import Tally
from plimsoll.framework.schedules.layerwise.backward_pass import BackwardPass, BackwardStart, Purpose
from plimsoll.framework.schedules.layerwise.passes import NO_UNIT, copied
from plimsoll.framework.schedules.layerwise.update_pass import UpdatePass
from plimsoll.framework.schedules.step import Metrics, State


class LayerwiseStep(BackwardPass):
    """A single training step."""

    def __call__(self, state: State, batch: Nested) -> tuple[State, Metrics]:
        """Run the whole step."""
        # The parts of stacks are replaced one by one below, in lists that belong to the step. The caller's dict would
        # keep the old parts alive.
        self.state = {group: copied(tree) for group, tree in state.items()}
        del state
        self.at_once = self.f.memory.updates_at_once
        self.updates = UpdatePass(self.f, self.run, self.numbers, self.state)
        start, total = self._microbatches(batch)
        # Created by a program, because a transfer from Python would make the step wait.
        squares = self.run("zero", jnp.zeros_like, total["loss"], out=self.f.specs.everywhere)
        if self.at_once and self.f.learner.clip_mode == "two_pass":
            _, tally = self.decide(total, squares)
            tally = self.backward(start, tally, Purpose(measures=True))
            assert tally is not None
            squares = tally["squares"]
        decision, tally = self.decide(total, squares)
        purpose = Purpose(decision) if self.at_once else Purpose()
        tally = self.backward(start, tally, purpose)
        assert tally is not None
        if not self.at_once:
            decision, _ = self.decide(total, tally["squares"])
            self.loaded = NO_UNIT
            self.updates.update_all(decision)
        return self.finished(decision, total, tally)

    def _microbatches(self, batch: Nested) -> tuple[BackwardStart, Nested]:
        """Run all microbatches forward, and all but the last one backward.

        Returns:
            (the start of the last microbatch's backward pass, the sum of losses and metrics).
        """
        f = self.f
        total: Any = None
        self.new_buffers = self.state["buffer"]
        for number in range(f.learner.accumulate):
            self.begin(self.new_buffers, (batch, self.state["counter"], self.numbers[number]))
            x, residuals, parts = self.forward(f.units.kept_in_forward)
            # Where layers are inverted, only the last layer's output is saved.
            if f.units.inverts:
                last_unit = residuals[-1]
                assert last_unit is not None
                residuals[-1] = last_unit.with_leaves(jax.tree.leaves(x))
            self.want_residuals(f.units.groups[-1].first, residuals)
            ct, tie_grads, parts["head"] = self.head_step(x)
            del x
            start = BackwardStart(residuals, ct, tie_grads)
            total = self.run("total", f.updates.total, parts, total, out=f.specs.everywhere)
            # The last microbatch's gradients complete the sum, so its backward pass runs in `__call__`, together with
            # the decision.
            if number + 1 < f.learner.accumulate:
                self.backward(start, None, Purpose())
        return start, total

    def decide(self, total: Nested, squares: jax.Array) -> tuple[Decision, Tally]:
        """Return (the decision, initial gradient statistics)."""
        f = self.f
        counter = self.state["counter"]
        return self.run("decide", f.updates.decide, total["loss"], squares, counter, out=f.specs.everywhere)

    def finished(
        self,
        decision: Decision,
        total: Nested,
        tally: Tally,
    ) -> tuple[State, Metrics]:
        """Return the new state and the metrics."""
        f = self.f
        finish = partial(f.updates.finish, at_once=self.at_once)
        counter = self.state["counter"]
        counter, metrics = self.run("finish", finish, counter, decision, total, tally, out=f.specs.everywhere)
        self.updates.settle()
        ok = tally["ok"] if self.at_once else decision.ok
        for stage, new_buffers in self.new_buffers.items():
            settle = partial(self.run, f"buffer {stage}", chosen, ok, out=f.specs.everywhere)
            old_buffers = self.state["buffer"][stage]
            if isinstance(new_buffers, list):
                self.state["buffer"][stage] = list(map(settle, new_buffers, old_buffers))
            else:
                self.state["buffer"][stage] = settle(new_buffers, old_buffers)
        return {**self.state, "counter": counter}, metrics
