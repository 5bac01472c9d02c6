"""One training step by layer programs: microbatches forward and backward, the decision, and the update."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.update import select_updated
from plimsoll.framework.schedules.gradients import GradStats
from plimsoll.framework.schedules.layerwise.backward_pass import BackwardStart, LayerwiseBackward, Purpose
from plimsoll.framework.schedules.layerwise.passes import NO_LAYER, copy_containers
from plimsoll.framework.schedules.layerwise.update_pass import UpdatePass
from plimsoll.framework.schedules.step import Metrics, State


class LayerwiseStep(LayerwiseBackward):
    """A single training step."""

    def __call__(self, state: State, batch: Nested) -> tuple[State, Metrics]:
        """Run the whole step."""
        # The parts of stacks are replaced one by one below, in lists that belong to the step. The caller's dict would
        # keep the old parts alive.
        self.state = {group: copy_containers(tree) for group, tree in state.items()}
        del state
        self.at_once = self.f.memory.updates_at_once
        self.updates = UpdatePass(self.f, self.run, self.numbers, self.state)
        start, total = self._microbatches(batch)
        # Created by a program, because a transfer from Python would make the step wait.
        squares = self.run("zero", jnp.zeros_like, total["loss"], out=self.f.specs.everywhere)
        if self.at_once and self.f.learner.clip_mode == "two_pass":
            _, grad_stats = self.decide(total, squares)
            grad_stats = self.backward(start, grad_stats, Purpose(measures=True))
            assert grad_stats is not None
            squares = grad_stats["squares"]
        decision, grad_stats = self.decide(total, squares)
        purpose = Purpose(decision) if self.at_once else Purpose()
        grad_stats = self.backward(start, grad_stats, purpose)
        assert grad_stats is not None
        if not self.at_once:
            decision, _ = self.decide(total, grad_stats["squares"])
            self.loaded = NO_LAYER
            self.updates.update_all(decision)
        return self.finish_step(decision, total, grad_stats)

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
            x, residuals, parts = self.forward(f.residual_plan.forward_save_policy)
            # Where layers are inverted, only the last layer's output is saved.
            if f.residual_plan.inverts:
                last_residuals = residuals[-1]
                assert last_residuals is not None
                residuals[-1] = last_residuals.with_leaves(jax.tree.leaves(x))
            self.request_residuals(f.residual_plan.groups[-1].first, residuals)
            ct, tie_grads, parts["head"] = self.head_step(x)
            del x
            start = BackwardStart(residuals, ct, tie_grads)
            total = self.run("total", f.updates.total, parts, total, out=f.specs.everywhere)
            # The last microbatch's gradients complete the sum, so its backward pass runs in `__call__`, together with
            # the decision.
            if number + 1 < f.learner.accumulate:
                self.backward(start, None, Purpose())
        return start, total

    def decide(self, total: Nested, squares: jax.Array) -> tuple[Decision, GradStats]:
        """Return (the decision, initial gradient statistics)."""
        f = self.f
        counter = self.state["counter"]
        return self.run("decide", f.updates.decide, total["loss"], squares, counter, out=f.specs.everywhere)

    def finish_step(self, decision: Decision, total: Nested, grad_stats: GradStats) -> tuple[State, Metrics]:
        """Return the new state and the metrics.

        Args:
            decision: the step's decision.
            total: sums of losses and metrics over the microbatches.
            grad_stats: gradient statistics of the last backward pass.
        """
        f = self.f
        finish = partial(f.updates.finish, at_once=self.at_once)
        counter = self.state["counter"]
        counter, metrics = self.run("finish", finish, counter, decision, total, grad_stats, out=f.specs.everywhere)
        self.updates.finalize()
        ok = grad_stats["ok"] if self.at_once else decision.ok
        for stage, new_buffers in self.new_buffers.items():
            finalize = partial(self.run, f"buffer {stage}", select_updated, ok, out=f.specs.everywhere)
            old_buffers = self.state["buffer"][stage]
            if isinstance(new_buffers, list):
                self.state["buffer"][stage] = list(map(finalize, new_buffers, old_buffers))
            else:
                self.state["buffer"][stage] = finalize(new_buffers, old_buffers)
        return {**self.state, "counter": counter}, metrics
