"""What the programs of `memory.update = layer_programs` compute: each a pure function of one stage or one unit.

All arrays are on the device here. A unit's arrays have a leading axis of one, as they are parts of a stack.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from framework.layers import sums as sums_of_uses
from framework.layers.base import Context, Out
from framework.layout import Nested, StateLayout, merge
from framework.learner.learner import Learner
from framework.learner.units import unit_at
from framework.models.causal_lm import CausalLM
from framework.schedules.gradients import Tally, TiedGradients, add_tied, split_tied
from framework.schedules.layerwise.keeping import Keeping, UnitPlan
from framework.schedules.layerwise.result_specs import ResultSpecs
from framework.schedules.layerwise.update_functions import LossAndMetrics, UpdateFunctions
from framework.schedules.memory import Memory
from framework.schedules.sections import policies
from framework.schedules.step import evaluation_context, microbatches, training_context
from framework.schedules.storage import FIRST, STACK
from framework.schedules.unit import (
    Carry,
    Cotangent,
    UnitArguments,
    UnitConstants,
    UnitFunctions,
    UnitResiduals,
    run_stage,
)

Weights = dict[str, Nested]  # "parameter" and "frozen", of one stage or of one unit
Inputs = tuple[Nested, Nested, jax.Array]  # batch, counters, number of the microbatch
_NO_WEIGHTS: Weights = {"parameter": {}, "frozen": {}}


class LayerFunctions:
    """The functions of stages and units.

    Args:
        model, learner, layout, memory: whose step; the layout's stacks are in parts.

    Attributes:
        specs: where the results are.
        updates: what becomes of gradients.
    """

    def __init__(
        self,
        model: CausalLM,
        learner: Learner,
        layout: StateLayout,
        memory: Memory,
    ):
        self.model = model
        self.learner = learner
        self.layout = layout
        self.memory = memory
        self.num_units = model.stack.num_units
        self.units = UnitPlan.of(memory, model.stack)
        self.num_first = 0 if model.first is None else model.first.num_units
        self.specs = ResultSpecs(layout)
        self.updates = UpdateFunctions(model, learner, layout, self.specs)

    def context(self, inputs: Inputs) -> Context:
        """The context of a microbatch."""
        batch, counter, number = inputs
        ctx = training_context(batch, counter, self.model, self.layout, self.memory.remat)
        count = self.learner.accumulate
        if count == 1:
            return ctx
        parts = microbatches((ctx.batch, ctx.rows), count, ctx)
        micro_batch, rows = unit_at(parts, number)
        return replace(ctx, batch=micro_batch, rows=rows)

    # --- stages outside of the stack ---------------------------------------------------------------------------------

    def stage(
        self,
        name: str,
        weights: Weights,
        carry: Carry,
        buffers: Nested,
        ctx: Context,
    ) -> tuple[Carry, Out]:
        """Runs a stage outside of the stack, see `run_stage`."""
        params = merge(weights["parameter"], weights["frozen"])
        return run_stage(self.model, name, params, carry, ctx, buffers)

    def enter_embedding(
        self,
        weights: Weights,
        buffers: Nested,
        inputs: Inputs,
    ) -> tuple[Carry, LossAndMetrics, Nested]:
        """Runs the embedding: (what flows through the stack; its loss and metrics; its buffers)."""
        ctx = self.context(inputs)
        y, out = self.stage("embed", weights, None, buffers, ctx)
        return self._entered(y), (out.loss, out.metrics), out.layer_state

    def _entered(self, y: Carry) -> Carry:
        """What the first unit takes, from the embedding's output."""
        first_stack = self.model.first or self.model.stack
        return first_stack.enter(y)

    def head_step(
        self,
        weights: Weights,
        buffers: Nested,
        x: Carry,
        grad_sums: Nested | None,
        inputs: Inputs,
    ) -> tuple[Cotangent, Nested, dict[str, jax.Array], LossAndMetrics, Nested]:
        """Runs the head, forward and backward.

        Args:
            weights: the head's, tied ones included.
            buffers: the head's.
            x: what comes out of the stack.
            grad_sums: the head's gradients of earlier microbatches; None for none.
            inputs: of the microbatch.

        Returns:
            (cotangent of x; its gradients; what ties add to the embedding's gradients, by path; loss and metrics;
            buffers).
        """
        ctx = self.context(inputs)

        def run(params: Nested, x: Carry) -> tuple[jax.Array, Out]:
            stage_weights = {**weights, "parameter": params}
            return self.stage("head", stage_weights, self.model.stack.leave(x, ctx), buffers, ctx)

        loss, pull, out = jax.vjp(run, weights["parameter"], x, has_aux=True)
        grads, ct = pull(jnp.ones_like(loss))
        # A tied parameter lives in the embedding, whose turn comes last: its gradient waits until then.
        tied = split_tied(self.model.ties, "head", grads, {})
        tie_grads = {home.removeprefix("embed/"): grad for home, grad in tied.ties.items()}
        grads = self.updates.added("head", tied.grads, grad_sums)
        return ct, grads, tie_grads, (loss, out.metrics), out.layer_state

    def leave_embedding(
        self,
        weights: Weights,
        buffers: Nested,
        ct: Cotangent,
        tie_grads: dict[str, jax.Array],
        grad_sums: Nested | None,
        tally: Tally | None,
        inputs: Inputs,
    ) -> tuple[Nested, Tally | None]:
        """Runs the embedding backward: (its gradients, the tally); `tie_grads`: see `head_step`."""

        def run(params: Nested) -> Carry:
            stage_weights = {**weights, "parameter": params}
            y, _ = self.stage("embed", stage_weights, None, buffers, self.context(inputs))
            return self._entered(y)

        # The embedding runs forward once more, so that nothing is kept of it meanwhile.
        _, pull = jax.vjp(run, weights["parameter"])
        (grads,) = pull(ct)
        grads_by_home = {f"embed/{path}": grad for path, grad in tie_grads.items()}
        tied = add_tied("embed", TiedGradients(grads, grads_by_home))
        grads = self.updates.added("embed", tied.grads, grad_sums)
        return grads, self.updates.judged(tally, grads)

    # --- units -------------------------------------------------------------------------------------------------------

    def _unit(
        self,
        name: str,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        inputs: Inputs,
        index: jax.Array,
        policy: str,
    ) -> tuple[UnitFunctions, UnitArguments]:
        """A unit, and what it is a function of but its input.

        Args:
            name: of the stack, as a stage.
            weights, shared, buffers, inputs, index: as those of `unit_forward`.
            policy: what the backward pass recomputes of the unit.
        """
        params = _without_axis(weights["parameter"])
        frozen = _without_axis(weights["frozen"])
        unit_buffers = _without_axis(buffers)
        stack = self.model.stacks[name]
        stack_ctx = replace(self.context(inputs).fold(name), remat=policy)
        unit = UnitFunctions(name, stack, stack.unit_function(merge(params, frozen), stack_ctx))
        ctx = stack_ctx.fold_index(index)
        constants = UnitConstants(frozen, shared["frozen"], unit_buffers, ctx)
        return unit, UnitArguments(params, shared["parameter"], constants)

    def unit_forward(
        self,
        keeping: Keeping,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        x: Carry,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Carry, UnitResiduals, LossAndMetrics, Nested]:
        """Runs a unit: (y, what is kept, loss and metrics, buffers).

        Args:
            keeping: what is kept of it, and where.
            weights, shared, buffers: the unit's, and the parameters that all units share.
            x: its input.
            inputs: of the microbatch.
            index: the unit's.
        """
        unit, arguments = self._unit(STACK, weights, shared, buffers, inputs, index, keeping.policy)
        if keeping.what in ("all", "now"):
            y, out, residuals = unit.forward_with_residuals(arguments, x)
        else:
            y, out, residuals = unit.forward(arguments, x)
        if keeping.what == "input":
            residuals = residuals.with_leaves(jax.tree.leaves(x))
        moved_leaves = []
        for leaf in residuals.leaves:
            if keeping.goes_to_host(leaf):
                leaf = jax.device_put(leaf, jax.memory.Space.Host)
            moved_leaves.append(leaf)
        new_buffers = _with_axis(out.layer_state)
        return y, residuals.with_leaves(moved_leaves), (out.loss, out.metrics), new_buffers

    def unit_backward(
        self,
        policy: str,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        residuals: UnitResiduals,
        ct: Cotangent,
        shared_sums: Nested,
        grad_sums: Nested | None,
        tally: Tally | None,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Cotangent, Nested, Nested, Tally | None, UnitResiduals | None]:
        """Runs a unit backward.

        Args:
            policy: what the backward pass recomputes of the unit.
            weights, shared, buffers: the unit's, and the parameters that all units share.
            residuals: what `unit_forward` kept of it; where units are inverted, with its output for leaves.
            ct: the cotangent of its output.
            shared_sums: of the shared parameters' gradients; {} to begin with.
            grad_sums: its gradients of earlier microbatches; None for none.
            tally: see `UpdateFunctions.judged`.
            inputs: of the microbatch.
            index: the unit's.

        Returns:
            (cotangent of its input; its gradients; `shared_sums` with its part; the tally; where units are inverted,
            the residuals of the unit before it, whose output this one's input is).
        """
        unit, arguments = self._unit(STACK, weights, shared, buffers, inputs, index, policy)
        residuals_before: UnitResiduals | None = None
        if self.units.inverts:
            y = jax.tree.unflatten(jax.tree.structure(ct), residuals.leaves)
            result = unit.invert(arguments, y, residuals.loss, ct)
            residuals_before = residuals.with_leaves(jax.tree.leaves(result.x))
        else:
            result = unit.backward(arguments, residuals, ct)
        shared_sums = sums_of_uses.add(shared_sums or sums_of_uses.zeros(result.shared_grads), result.shared_grads)
        grads = self.updates.added(STACK, _with_axis(result.grads), grad_sums)
        tally = self.updates.judged(tally, grads)
        return result.ct, grads, shared_sums, tally, residuals_before

    # --- units before the stack --------------------------------------------------------------------------------------

    def first_forward(
        self,
        is_last: bool,
        weights: Weights,
        buffers: Nested,
        x: Carry,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Carry, LossAndMetrics, Nested]:
        """Runs a unit of the layers before the stack: (y, loss and metrics, buffers).

        Args:
            is_last: whether the stack comes next, whose first unit takes y.
            weights, buffers, x, inputs, index: as those of `unit_forward`.
        """
        unit, arguments = self._unit(FIRST, weights, _NO_WEIGHTS, buffers, inputs, index, self._first_policy)
        y, out, _ = unit.forward(arguments, x)
        if is_last:
            y = self._between_stacks(y, inputs)
        return y, (out.loss, out.metrics), _with_axis(out.layer_state)

    def first_backward(
        self,
        is_last: bool,
        weights: Weights,
        buffers: Nested,
        x: Carry,
        ct: Cotangent,
        grad_sums: Nested | None,
        tally: Tally | None,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Cotangent, Nested, Tally | None]:
        """Runs a unit of the layers before the stack backward: (cotangent of its input, its gradients, the tally).

        The unit runs forward once more, so that nothing but its input is kept of it.

        Args:
            is_last, weights, buffers, x, inputs, index: as those of `first_forward`.
            ct, grad_sums, tally: as those of `unit_backward`.
        """
        unit, arguments = self._unit(FIRST, weights, _NO_WEIGHTS, buffers, inputs, index, self._first_policy)
        y, _, residuals = unit.forward_with_residuals(arguments, x)
        if is_last:
            _, pull = jax.vjp(lambda y: self._between_stacks(y, inputs), y)
            (ct,) = pull(ct)
        result = unit.backward(arguments, residuals, ct)
        grads = self.updates.added(FIRST, _with_axis(result.grads), grad_sums)
        return result.ct, grads, self.updates.judged(tally, grads)

    @property
    def _first_policy(self) -> str:
        """What the backward pass recomputes of a unit before the stack, beside running it forward once more."""
        assert self.model.first is not None
        policy = policies(self.memory, self.model.first)[0]
        # There are so few that inverting them would save nothing.
        return "full" if policy == "invert" else policy

    def _between_stacks(self, y: Carry, inputs: Inputs) -> Carry:
        """What the stack's first unit takes, from what the last unit before the stack gives."""
        assert self.model.first is not None
        return self.model.stack.enter(self.model.first.leave(y, self.context(inputs)))


class EvaluationFunctions(LayerFunctions):
    """The same stages and units without training, and the sums of a batch."""

    def context(self, inputs: Inputs) -> Context:
        """The context of a microbatch: no dropout, sums instead of means."""
        batch, _, number = inputs
        ctx = evaluation_context(batch, self.model, self.layout)
        count = self.learner.accumulate
        if count == 1:
            return ctx
        parts = microbatches(batch, count, ctx)
        return replace(ctx, batch=unit_at(parts, number))

    def score(
        self,
        weights: Weights,
        buffers: Nested,
        x: Carry,
        inputs: Inputs,
    ) -> dict[str, jax.Array]:
        """The sums over a microbatch; see `Chain.scores`."""
        ctx = self.context(inputs)
        head_input = self.model.stack.leave(x, ctx)
        _, out = self.stage("head", weights, head_input, buffers, ctx)
        return self.model.scores(Out.merge({"head": out}), ctx.batch)


def _without_axis(tree: Nested) -> Nested:
    """A unit's arrays [1, ...] as [...]."""
    return jax.tree.map(lambda x: x[0], tree)


def _with_axis(tree: Nested) -> Nested:
    """A unit's arrays [...] as [1, ...], as the stack in parts has them."""
    return jax.tree.map(lambda x: x[None], tree)
