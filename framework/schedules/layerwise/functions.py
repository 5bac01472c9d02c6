"""The computations of the programs of `memory.update = layer_programs`: pure functions of one stage or one layer.

All arrays are on the device here. A layer's arrays have a leading axis of size one, because they are parts of a
stack.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from plimsoll.framework.layers import grad_accumulation
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layout import Nested, StateLayout, merge
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import slice_layer
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.schedules.gradients import GradStats, TiedGradients, add_tied, split_tied
from plimsoll.framework.schedules.layer_computation import (
    Carry,
    Cotangent,
    LayerArguments,
    LayerComputation,
    LayerConstants,
    LayerResiduals,
    run_stage,
)
from plimsoll.framework.schedules.layer_ranges import policies
from plimsoll.framework.schedules.layerwise.result_specs import ResultSpecs
from plimsoll.framework.schedules.layerwise.save_policy import ResidualPlan, SavePolicy
from plimsoll.framework.schedules.layerwise.update_functions import LossAndMetrics, UpdateFunctions
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.stack_parts import FIRST, STACK
from plimsoll.framework.schedules.step import evaluation_context, microbatches, training_context

Weights = dict[str, Nested]  # "parameter" and "frozen", of one stage or of one layer
Inputs = tuple[Nested, Nested, jax.Array]  # batch, counters, index of the microbatch
_NO_WEIGHTS: Weights = {"parameter": {}, "frozen": {}}


class LayerFunctions:
    """The functions of stages and layers.

    Args:
        model, learner, layout, memory: the components of the step; the layout's stacks are in parts.

    Attributes:
        specs: specs of the results.
        updates: the functions that process gradients.
    """

    def __init__(self, model: CausalLM, learner: Learner, layout: StateLayout, memory: Memory):
        self.model = model
        self.learner = learner
        self.layout = layout
        self.memory = memory
        self.num_repeats = model.stack.num_repeats
        self.residual_plan = ResidualPlan.from_memory(memory, model.stack)
        self.num_first = 0 if model.first is None else model.first.num_repeats
        self.specs = ResultSpecs(layout)
        self.updates = UpdateFunctions(model, learner, layout, self.specs)

    def context(self, inputs: Inputs) -> Context:
        """Return the context of a microbatch."""
        batch, counter, number = inputs
        ctx = training_context(batch, counter, self.model, self.layout, self.memory.remat)
        count = self.learner.accumulate
        if count == 1:
            return ctx
        parts = microbatches((ctx.batch, ctx.rows), count, ctx)
        micro_batch, rows = slice_layer(parts, number)
        return replace(ctx, batch=micro_batch, rows=rows)

    # --- stages outside the stack ------------------------------------------------------------------------------------

    def stage(self, name: str, weights: Weights, carry: Carry, buffers: Nested, ctx: Context) -> tuple[Carry, Out]:
        """Run a stage outside the stack; see `run_stage`."""
        params = merge(weights["parameter"], weights["frozen"])
        return run_stage(self.model, name, params, carry, ctx, buffers)

    def enter_embedding(
        self, weights: Weights, buffers: Nested, inputs: Inputs
    ) -> tuple[Carry, LossAndMetrics, Nested]:
        """Run the embedding: (the stack's input; loss and metrics; buffers of the embedding).

        Args:
            weights, buffers: the embedding's weights and buffers.
            inputs: inputs of the microbatch.
        """
        ctx = self.context(inputs)
        y, out = self.stage("embed", weights, None, buffers, ctx)
        return self._enter_stack(y), (out.loss, out.metrics), out.layer_state

    def _enter_stack(self, y: Carry) -> Carry:
        """Convert the embedding's output to the first layer's input."""
        first_stack = self.model.first or self.model.stack
        return first_stack.enter(y)

    def head_step(
        self, weights: Weights, buffers: Nested, x: Carry, grad_sums: Nested | None, inputs: Inputs
    ) -> tuple[Cotangent, Nested, dict[str, jax.Array], LossAndMetrics, Nested]:
        """Run the head forward and backward.

        Args:
            weights: the head's weights, tied ones included.
            buffers: the head's buffers.
            x: the output of the stack.
            grad_sums: the head's gradients of earlier microbatches; None in the first microbatch.
            inputs: inputs of the microbatch.

        Returns:
            (cotangent of x; the head's gradients; the gradients of tied weights, to be added to the embedding's, by
            path; loss and metrics; buffers).
        """
        ctx = self.context(inputs)

        def run(params: Nested, x: Carry) -> tuple[jax.Array, Out]:
            stage_weights = {**weights, "parameter": params}
            return self.stage("head", stage_weights, self.model.stack.leave(x, ctx), buffers, ctx)

        loss, pull, out = jax.vjp(run, weights["parameter"], x, has_aux=True)
        grads, ct = pull(jnp.ones_like(loss))
        # A tied parameter belongs to the embedding, which runs last in the backward pass: its gradient waits until
        # then.
        tied = split_tied(self.model.ties, "head", grads, {})
        tie_grads = {home.removeprefix("embed/"): grad for home, grad in tied.ties.items()}
        grads = self.updates.add_gradients("head", tied.grads, grad_sums)
        return ct, grads, tie_grads, (loss, out.metrics), out.layer_state

    def leave_embedding(
        self,
        weights: Weights,
        buffers: Nested,
        ct: Cotangent,
        tie_grads: dict[str, jax.Array],
        grad_sums: Nested | None,
        grad_stats: GradStats | None,
        inputs: Inputs,
    ) -> tuple[Nested, GradStats | None]:
        """Run the embedding backward: (its gradients, gradient statistics).

        Args:
            weights, buffers: the embedding's weights and buffers.
            ct: the cotangent of the stack's input.
            tie_grads: gradients of tied weights, from `head_step`.
            grad_sums: the embedding's gradients of earlier microbatches; None in the first microbatch.
            grad_stats: see `UpdateFunctions.update_stats`.
            inputs: inputs of the microbatch.
        """

        def run(params: Nested) -> Carry:
            stage_weights = {**weights, "parameter": params}
            y, _ = self.stage("embed", stage_weights, None, buffers, self.context(inputs))
            return self._enter_stack(y)

        # The embedding runs forward again here, so that it needs no residuals.
        _, pull = jax.vjp(run, weights["parameter"])
        (grads,) = pull(ct)
        grads_by_home = {f"embed/{path}": grad for path, grad in tie_grads.items()}
        tied = add_tied("embed", TiedGradients(grads, grads_by_home))
        grads = self.updates.add_gradients("embed", tied.grads, grad_sums)
        return grads, self.updates.update_stats(grad_stats, grads)

    # --- layers ------------------------------------------------------------------------------------------------------

    def _prepare_layer(
        self,
        name: str,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        inputs: Inputs,
        index: jax.Array,
        policy: str,
    ) -> tuple[LayerComputation, LayerArguments]:
        """Return a layer, and all its arguments except its input.

        Args:
            name: the stack's stage name.
            weights, shared, buffers, inputs, index: as in `layer_forward`.
            policy: the layer's remat policy.
        """
        params = _without_axis(weights["parameter"])
        frozen = _without_axis(weights["frozen"])
        layer_buffers = _without_axis(buffers)
        stack = self.model.stacks[name]
        stack_ctx = replace(self.context(inputs).fold(name), remat=policy)
        layer = LayerComputation(name, stack, stack.layer_function(merge(params, frozen), stack_ctx))
        ctx = stack_ctx.fold_index(index)
        constants = LayerConstants(frozen, shared["frozen"], layer_buffers, ctx)
        return layer, LayerArguments(params, shared["parameter"], constants)

    def layer_forward(
        self,
        save_policy: SavePolicy,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        x: Carry,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Carry, LayerResiduals, LossAndMetrics, Nested]:
        """Run a layer: (y, residuals, loss and metrics, buffers).

        Args:
            save_policy: which residuals are saved, and where.
            weights, shared, buffers: the layer's weights and buffers, and the parameters that all layers share.
            x: the layer's input.
            inputs: inputs of the microbatch.
            index: index of the layer.
        """
        layer, arguments = self._prepare_layer(STACK, weights, shared, buffers, inputs, index, save_policy.policy)
        if save_policy.what in ("all", "now"):
            y, out, residuals = layer.forward_with_residuals(arguments, x)
        else:
            y, out, residuals = layer.forward(arguments, x)
        if save_policy.what == "input":
            residuals = residuals.with_leaves(jax.tree.leaves(x))
        moved_leaves = []
        for leaf in residuals.leaves:
            if save_policy.goes_to_host(leaf):
                leaf = jax.device_put(leaf, jax.memory.Space.Host)
            moved_leaves.append(leaf)
        new_buffers = _with_axis(out.layer_state)
        return y, residuals.with_leaves(moved_leaves), (out.loss, out.metrics), new_buffers

    def layer_backward(
        self,
        policy: str,
        weights: Weights,
        shared: Weights,
        buffers: Nested,
        residuals: LayerResiduals,
        ct: Cotangent,
        shared_sums: Nested,
        grad_sums: Nested | None,
        grad_stats: GradStats | None,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Cotangent, Nested, Nested, GradStats | None, LayerResiduals | None]:
        """Run a layer backward.

        Args:
            policy: the layer's remat policy.
            weights, shared, buffers: the layer's weights and buffers, and the parameters that all layers share.
            residuals: the residuals of `layer_forward`; where layers are inverted, their leaves are the layer's
                output.
            ct: the cotangent of the layer's output.
            shared_sums: sums of the shared parameters' gradients; {} at the start.
            grad_sums: the layer's gradients of earlier microbatches; None in the first microbatch.
            grad_stats: see `UpdateFunctions.update_stats`.
            inputs: inputs of the microbatch.
            index: index of the layer.

        Returns:
            (cotangent of the layer's input; its gradients; `shared_sums` including this layer; gradient statistics;
            where layers are inverted, the residuals of the previous layer, whose output is this layer's input).
        """
        layer, arguments = self._prepare_layer(STACK, weights, shared, buffers, inputs, index, policy)
        residuals_before: LayerResiduals | None = None
        if self.residual_plan.inverts:
            y = jax.tree.unflatten(jax.tree.structure(ct), residuals.leaves)
            result = layer.invert(arguments, y, residuals.loss, ct)
            residuals_before = residuals.with_leaves(jax.tree.leaves(result.x))
        else:
            result = layer.backward(arguments, residuals, ct)
        shared_sums = grad_accumulation.add(
            shared_sums or grad_accumulation.zeros(result.shared_grads), result.shared_grads
        )
        grads = self.updates.add_gradients(STACK, _with_axis(result.grads), grad_sums)
        grad_stats = self.updates.update_stats(grad_stats, grads)
        return result.ct, grads, shared_sums, grad_stats, residuals_before

    # --- layers before the stack -------------------------------------------------------------------------------------

    def first_forward(
        self, is_last: bool, weights: Weights, buffers: Nested, x: Carry, inputs: Inputs, index: jax.Array
    ) -> tuple[Carry, LossAndMetrics, Nested]:
        """Run one of the layers before the stack: (y, loss and metrics, buffers).

        Args:
            is_last: whether the stack comes next; y is then the input of the stack's first layer.
            weights, buffers, x, inputs, index: as in `layer_forward`.
        """
        layer, arguments = self._prepare_layer(FIRST, weights, _NO_WEIGHTS, buffers, inputs, index, self._first_policy)
        y, out, _ = layer.forward(arguments, x)
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
        grad_stats: GradStats | None,
        inputs: Inputs,
        index: jax.Array,
    ) -> tuple[Cotangent, Nested, GradStats | None]:
        """Run one of the layers before the stack backward: (cotangent of its input, gradients, gradient statistics).

        The layer runs forward again, so that only its input needs to be saved.

        Args:
            is_last, weights, buffers, x, inputs, index: as in `first_forward`.
            ct, grad_sums, grad_stats: as in `layer_backward`.
        """
        layer, arguments = self._prepare_layer(FIRST, weights, _NO_WEIGHTS, buffers, inputs, index, self._first_policy)
        y, _, residuals = layer.forward_with_residuals(arguments, x)
        if is_last:
            _, pull = jax.vjp(lambda y: self._between_stacks(y, inputs), y)
            (ct,) = pull(ct)
        result = layer.backward(arguments, residuals, ct)
        grads = self.updates.add_gradients(FIRST, _with_axis(result.grads), grad_sums)
        return result.ct, grads, self.updates.update_stats(grad_stats, grads)

    @property
    def _first_policy(self) -> str:
        """Return the remat policy of the layers before the stack, which run forward again in any case."""
        assert self.model.first is not None
        policy = policies(self.memory, self.model.first)[0]
        # These layers are so few that inverting them would save nothing.
        return "full" if policy == "invert" else policy

    def _between_stacks(self, y: Carry, inputs: Inputs) -> Carry:
        """Convert the output of the last layer before the stack to the input of the stack's first layer."""
        assert self.model.first is not None
        return self.model.stack.enter(self.model.first.leave(y, self.context(inputs)))


class EvaluationFunctions(LayerFunctions):
    """The functions of stages and layers for evaluation, and the sums over a batch."""

    def context(self, inputs: Inputs) -> Context:
        """Return the context of a microbatch: no dropout, sums instead of means."""
        batch, _, number = inputs
        ctx = evaluation_context(batch, self.model, self.layout)
        count = self.learner.accumulate
        if count == 1:
            return ctx
        parts = microbatches(batch, count, ctx)
        return replace(ctx, batch=slice_layer(parts, number))

    def score(self, weights: Weights, buffers: Nested, x: Carry, inputs: Inputs) -> dict[str, jax.Array]:
        """Return the sums over a microbatch; see `Chain.scores`.

        Args:
            weights, buffers: the head's weights, tied ones included, and its buffers.
            x: the output of the stack.
            inputs: inputs of the microbatch.
        """
        ctx = self.context(inputs)
        head_input = self.model.stack.leave(x, ctx)
        _, out = self.stage("head", weights, head_input, buffers, ctx)
        return self.model.scores(Out.merge({"head": out}), ctx.batch)


def _without_axis(tree: Nested) -> Nested:
    """Remove the leading axis: a layer's arrays [1, ...] -> [...]."""
    return jax.tree.map(lambda x: x[0], tree)


def _with_axis(tree: Nested) -> Nested:
    """Add the leading axis of a stack in parts: a layer's arrays [...] -> [1, ...]."""
    return jax.tree.map(lambda x: x[None], tree)
