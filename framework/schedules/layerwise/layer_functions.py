"""The functions that layer programs compile: pure functions of one stage or one layer, forward and backward.

All arrays are on the device here. A layer's arrays have a leading axis of size one, because they are parts of a
stack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from plimsoll.framework.layers import grad_accumulation
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layout import Nested, StateLayout, merge
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import slice_layer
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.schedules.backward_state import Weights
from plimsoll.framework.schedules.gradients import GradStats, TiedGradients, add_tied, split_tied
from plimsoll.framework.schedules.layer_vjp import (
    Carry,
    Cotangent,
    LayerArguments,
    LayerComputation,
    LayerConstants,
    LayerResiduals,
    run_stage,
)
from plimsoll.framework.schedules.layerwise.save_policy import ResidualPlan, SavePolicy, carry_specs, residual_specs
from plimsoll.framework.schedules.layerwise.update import UpdateFunctions, replicated_specs
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.stack_layout import FIRST, STACK, policies
from plimsoll.framework.schedules.step import evaluation_context, microbatches, training_context

# --- arguments and results of the programs ---------------------------------------------------------------------------
# The order of the fields is the order of the programs' arguments and results.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Variables:
    """The arrays of a stage or layer that a program reads and does not change.

    Attributes:
        weights: its parameters.
        shared: for a layer of the stack, the parameters that all layers share.
        buffers: its buffers.
    """

    weights: Weights
    shared: Weights
    buffers: Nested


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The other inputs of all programs of a microbatch.

    Attributes:
        batch: arrays of the global batch.
        counter: the state's counters; {} in an evaluation.
        microbatch: int32[], index of the microbatch.
        layer: int32[], index of the layer in its stack; None for a stage.
    """

    batch: Nested
    counter: Nested
    microbatch: jax.Array
    layer: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardResult:
    """The result of a forward program.

    Attributes:
        y: the output of the stage or layer.
        residuals: what a layer of the stack saves for its backward pass; None for a stage.
        out: loss, metrics and new buffers.
    """

    y: Carry
    residuals: LayerResiduals | None
    out: Out


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadResult:
    """The result of the head's forward and backward program.

    Attributes:
        ct: cotangent of the output of the stack.
        grads: the head's gradients, with those of earlier microbatches.
        tie_grads: the gradients of tied weights, to be added to the embedding's, by path.
        out: loss, metrics and new buffers.
    """

    ct: Cotangent
    grads: Nested
    tie_grads: dict[str, jax.Array]
    out: Out


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardInputs:
    """The arrays that a layer's backward program overwrites.

    Attributes:
        ct: the cotangent of the layer's output.
        shared_sums: sums of the shared parameters' gradients over the layers so far; {} at the start.
        grad_sums: the layer's gradients of earlier microbatches; None in the first microbatch.
    """

    ct: Cotangent
    shared_sums: Nested
    grad_sums: Nested | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BackwardResult:
    """The result of the backward program of a stage or layer.

    Attributes:
        ct: the cotangent of its input; None for the embedding.
        grads: its gradients, with those of earlier microbatches.
        shared_sums: `BackwardInputs.shared_sums` including this layer.
        grad_stats: gradient statistics, see `UpdateFunctions.update_stats`.
        previous: where layers are inverted, the residuals of the previous layer, whose output is this layer's input.
    """

    ct: Cotangent
    grads: Nested
    shared_sums: Nested
    grad_stats: GradStats | None
    previous: LayerResiduals | None = None


# --- stages and layers -----------------------------------------------------------------------------------------------


class LayerFunctions:
    """The functions of stages and layers.

    Args:
        model, learner, layout, memory: the components of the step; the layout's stacks are in parts.
        training: whether they are part of a training step, not of an evaluation, which has no dropout and returns
            sums instead of means.

    Attributes:
        updates: the functions that process gradients.
    """

    def __init__(self, model: CausalLM, learner: Learner, layout: StateLayout, memory: Memory, *, training: bool):
        self.model = model
        self.learner = learner
        self.memory = memory
        self.training = training
        self.num_repeats = model.stack.num_repeats
        self.residual_plan = ResidualPlan.from_memory(memory, model.stack)
        self.num_first = 0 if model.first is None else model.first.num_repeats
        self.updates = UpdateFunctions(model, learner, layout)
        self._layout = layout
        self._entry_stack = model.first or model.stack
        # The layers before the stack run forward again in any case, and are so few that inverting them would save
        # nothing.
        first_policy = "full" if model.first is None else policies(memory, model.first)[0]
        self._first_policy = "full" if first_policy == "invert" else first_policy

    def _context(self, inputs: Inputs) -> Context:
        """Return the context of a microbatch."""
        if self.training:
            ctx = training_context(inputs.batch, inputs.counter, self.model, self._layout, self.memory.remat)
        else:
            ctx = evaluation_context(inputs.batch, self.model, self._layout)
        count = self.learner.accumulate
        if count == 1:
            return ctx
        parts = microbatches((ctx.batch, ctx.rows), count, ctx)
        micro_batch, rows = slice_layer(parts, inputs.microbatch)
        return replace(ctx, batch=micro_batch, rows=rows)

    # --- specs of the results ----------------------------------------------------------------------------------------

    def forward_specs(self, result: ForwardResult, save_policy: SavePolicy | None = None) -> ForwardResult:
        """Return the specs of a forward program's results; `save_policy` is that of a layer of the stack."""
        residuals = None
        if result.residuals is not None and save_policy is not None:
            residuals = residual_specs(result.residuals, save_policy, result.y)
        return ForwardResult(carry_specs(result.y), residuals, replicated_specs(result.out))

    def head_specs(self, result: HeadResult) -> HeadResult:
        """Return the specs of the results of `head_step`."""
        return HeadResult(
            carry_specs(result.ct),
            self.updates.gradient_specs("head", result.grads),
            self.updates.gradient_specs("embed", result.tie_grads),
            replicated_specs(result.out),
        )

    def backward_specs(self, stage: str, result: BackwardResult) -> BackwardResult:
        """Return the specs of the results of a stage's backward program."""
        return BackwardResult(
            carry_specs(result.ct),
            self.updates.gradient_specs(stage, result.grads),
            self.updates.gradient_specs("shared", result.shared_sums),
            replicated_specs(result.grad_stats),
            carry_specs(result.previous),
        )

    # --- stages outside the stack ------------------------------------------------------------------------------------

    def enter_embedding(self, embedding: Variables, inputs: Inputs) -> ForwardResult:
        """Run the embedding; the output is the stack's input."""
        ctx = self._context(inputs)
        params = merge(embedding.weights.trainable, embedding.weights.frozen)
        y, out = run_stage(self.model, "embed", params, None, ctx, embedding.buffers)
        return ForwardResult(self._entry_stack.enter(y), None, out)

    def head_step(self, head: Variables, x: Carry, grad_sums: Nested | None, inputs: Inputs) -> HeadResult:
        """Run the head forward and backward.

        Args:
            head: the head's weights and buffers.
            x: the output of the stack.
            grad_sums: the head's gradients of earlier microbatches; None in the first microbatch.
            inputs: inputs of the microbatch.
        """
        ctx = self._context(inputs)

        def run(params: Nested, x: Carry) -> tuple[jax.Array, Out]:
            head_input = self.model.stack.leave(x, ctx)
            return run_stage(self.model, "head", merge(params, head.weights.frozen), head_input, ctx, head.buffers)

        loss, pull, out = jax.vjp(run, head.weights.trainable, x, has_aux=True)
        grads, ct = pull(jnp.ones_like(loss))
        # A tied parameter belongs to the embedding, which runs last in the backward pass: its gradient waits until
        # then.
        tied = split_tied(self.model.ties, "head", grads, {})
        tie_grads = {home.removeprefix("embed/"): grad for home, grad in tied.ties.items()}
        grads = self.updates.add_gradients("head", tied.grads, grad_sums)
        return HeadResult(ct, grads, tie_grads, replace(out, loss=loss))

    def score(self, head: Variables, x: Carry, inputs: Inputs) -> dict[str, jax.Array]:
        """Run the head of an evaluation, and return the sums over a microbatch; see `Chain.scores`.

        Args:
            head, x, inputs: as in `head_step`.
        """
        ctx = self._context(inputs)
        head_input = self.model.stack.leave(x, ctx)
        params = merge(head.weights.trainable, head.weights.frozen)
        _, out = run_stage(self.model, "head", params, head_input, ctx, head.buffers)
        return self.model.scores(Out.merge({"head": out}), ctx.batch)

    def leave_embedding(
        self,
        embedding: Variables,
        ct: Cotangent,
        tie_grads: dict[str, jax.Array],
        grad_sums: Nested | None,
        grad_stats: GradStats | None,
        inputs: Inputs,
    ) -> BackwardResult:
        """Run the embedding backward.

        Args:
            embedding: the embedding's weights and buffers.
            ct: the cotangent of the stack's input.
            tie_grads: gradients of tied weights, from `head_step`.
            grad_sums: the embedding's gradients of earlier microbatches; None in the first microbatch.
            grad_stats: see `UpdateFunctions.update_stats`.
            inputs: inputs of the microbatch.
        """

        def run(params: Nested) -> Carry:
            ctx = self._context(inputs)
            params = merge(params, embedding.weights.frozen)
            y, _ = run_stage(self.model, "embed", params, None, ctx, embedding.buffers)
            return self._entry_stack.enter(y)

        # The embedding runs forward again here, so that it needs no residuals.
        _, pull = jax.vjp(run, embedding.weights.trainable)
        (grads,) = pull(ct)
        grads_by_home = {f"embed/{path}": grad for path, grad in tie_grads.items()}
        tied = add_tied("embed", TiedGradients(grads, grads_by_home))
        grads = self.updates.add_gradients("embed", tied.grads, grad_sums)
        return BackwardResult(None, grads, {}, self.updates.update_stats(grad_stats, grads))

    # --- layers ------------------------------------------------------------------------------------------------------

    def _prepare_layer(
        self, name: str, variables: Variables, inputs: Inputs, policy: str
    ) -> tuple[LayerComputation, LayerArguments]:
        """Return a layer, and all its arguments except its input.

        Args:
            name: the stack's stage name.
            variables, inputs: as in `layer_forward`.
            policy: the layer's remat policy.
        """
        weights = variables.weights
        # Without the leading axis: a layer's arrays [1, ...] -> [...].
        params, frozen, buffers = jax.tree.map(lambda x: x[0], (weights.trainable, weights.frozen, variables.buffers))
        assert inputs.layer is not None
        stack = self.model.stacks[name]
        stack_ctx = replace(self._context(inputs).fold(name), remat=policy)
        layer = LayerComputation(name, stack, stack.layer_function(merge(params, frozen), stack_ctx))
        ctx = stack_ctx.fold_index(inputs.layer)
        constants = LayerConstants(frozen, variables.shared.frozen, buffers, ctx)
        return layer, LayerArguments(params, variables.shared.trainable, constants)

    def layer_forward(self, save_policy: SavePolicy, variables: Variables, x: Carry, inputs: Inputs) -> ForwardResult:
        """Run a layer of the stack.

        Args:
            save_policy: which residuals are saved, and where.
            variables: the layer's weights and buffers, and the parameters that all layers share.
            x: the layer's input.
            inputs: inputs of the microbatch, and the index of the layer.
        """
        layer, arguments = self._prepare_layer(STACK, variables, inputs, save_policy.policy)
        if save_policy.what in ("all", "now"):
            result = layer.forward_with_residuals(arguments, x)
        else:
            result = layer.forward(arguments, x)
        leaves = jax.tree.leaves(x) if save_policy.what == "input" else result.residuals.leaves
        host = jax.memory.Space.Host
        leaves = [jax.device_put(leaf, host) if save_policy.goes_to_host(leaf) else leaf for leaf in leaves]
        out = replace(result.out, layer_state=_with_axis(result.out.layer_state))
        return ForwardResult(result.output, result.residuals.with_leaves(leaves), out)

    def layer_backward(
        self,
        policy: str,
        variables: Variables,
        residuals: LayerResiduals,
        backward_inputs: BackwardInputs,
        grad_stats: GradStats | None,
        inputs: Inputs,
    ) -> BackwardResult:
        """Run a layer of the stack backward.

        Args:
            policy: the layer's remat policy.
            variables, inputs: as in `layer_forward`.
            residuals: the residuals of `layer_forward`; where layers are inverted, their leaves are the layer's
                output.
            backward_inputs: the cotangent and the sums of gradients.
            grad_stats: see `UpdateFunctions.update_stats`.
        """
        layer, arguments = self._prepare_layer(STACK, variables, inputs, policy)
        ct = backward_inputs.ct
        previous: LayerResiduals | None = None
        if self.residual_plan.inverts:
            y = jax.tree.unflatten(jax.tree.structure(ct), residuals.leaves)
            result = layer.invert(arguments, y, residuals.loss, ct)
            previous = residuals.with_leaves(jax.tree.leaves(result.x))
        else:
            result = layer.backward(arguments, residuals, ct)
        shared_sums = backward_inputs.shared_sums or grad_accumulation.zeros(result.shared_grads)
        shared_sums = grad_accumulation.add(shared_sums, result.shared_grads)
        grads = self.updates.add_gradients(STACK, _with_axis(result.grads), backward_inputs.grad_sums)
        grad_stats = self.updates.update_stats(grad_stats, grads)
        return BackwardResult(result.ct, grads, shared_sums, grad_stats, previous)

    # --- layers before the stack -------------------------------------------------------------------------------------

    def first_forward(self, is_last: bool, variables: Variables, x: Carry, inputs: Inputs) -> ForwardResult:
        """Run one of the layers before the stack.

        Args:
            is_last: whether the stack comes next; the output is then the input of the stack's first layer.
            variables, x, inputs: as in `layer_forward`.
        """
        layer, arguments = self._prepare_layer(FIRST, variables, inputs, self._first_policy)
        result = layer.forward(arguments, x)
        y = self._between_stacks(result.output, inputs) if is_last else result.output
        return ForwardResult(y, None, replace(result.out, layer_state=_with_axis(result.out.layer_state)))

    def first_backward(
        self,
        is_last: bool,
        variables: Variables,
        x: Carry,
        backward_inputs: BackwardInputs,
        grad_stats: GradStats | None,
        inputs: Inputs,
    ) -> BackwardResult:
        """Run one of the layers before the stack backward.

        The layer runs forward again, so that only its input needs to be saved.

        Args:
            is_last, variables, x, inputs: as in `first_forward`.
            backward_inputs, grad_stats: as in `layer_backward`.
        """
        layer, arguments = self._prepare_layer(FIRST, variables, inputs, self._first_policy)
        forward = layer.forward_with_residuals(arguments, x)
        ct = backward_inputs.ct
        if is_last:
            _, pull = jax.vjp(lambda y: self._between_stacks(y, inputs), forward.output)
            (ct,) = pull(ct)
        result = layer.backward(arguments, forward.residuals, ct)
        grads = self.updates.add_gradients(FIRST, _with_axis(result.grads), backward_inputs.grad_sums)
        return BackwardResult(result.ct, grads, {}, self.updates.update_stats(grad_stats, grads))

    def _between_stacks(self, y: Carry, inputs: Inputs) -> Carry:
        """Convert the output of the last layer before the stack to the input of the stack's first layer."""
        assert self.model.first is not None
        return self.model.stack.enter(self.model.first.leave(y, self._context(inputs)))


def _with_axis(tree: Nested) -> Nested:
    """Add the leading axis of a stack in parts: a layer's arrays [...] -> [1, ...]."""
    return jax.tree.map(lambda x: x[None], tree)
