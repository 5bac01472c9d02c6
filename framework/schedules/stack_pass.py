"""Forward and backward pass of a stack within one program: loops over its layers, or over groups of layers.

A "layer" is one iteration of the loop: one period of the stack's pattern. The forward scan saves the residuals that
the remat policy selects. The backward loop passes each layer's gradients to the hooks, which may store them or update
the layer. The loop carry holds the parameters, because hooks may change them.

The residuals are the leaves of `jax.vjp`'s result that are not arguments of the layer. The arguments (above all the
layer's weights) are put back in the backward loop, so no copies of them are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.layers import grad_accumulation, remat
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, merge
from plimsoll.framework.learner.update import slice_layer
from plimsoll.framework.schedules.backward_hooks import BackwardHooks, BackwardState
from plimsoll.framework.schedules.layer_computation import Carry, Cotangent, LayerComputation
from plimsoll.framework.schedules.layer_pass import Flat, LayerPass, PlacedResiduals, move_leaves, select_stacks
from plimsoll.framework.schedules.stage_pass import StagePass, StageWeights


class StackGradients(NamedTuple):
    """The result of the backward pass over a stack, or over a group of its layers.

    Attributes:
        backward_state: the backward state after the hooks.
        ct: the cotangent of the input.
        shared: sum, over the layers so far, of the gradients of the parameters that all layers share.
    """

    backward_state: BackwardState
    ct: Cotangent
    shared: Nested


# (result of the layers after these, hooks) -> result of these layers.
LayersPull = Callable[[StackGradients, BackwardHooks], StackGradients]
StackPull = Callable[[BackwardState, Cotangent, BackwardHooks], StackGradients]


class StackForward(NamedTuple):
    """The result of a stack's forward pass: its output, its `Out`, and its backward pass."""

    output: Carry
    out: Out
    pull: StackPull


class _LayersForward(NamedTuple):
    """A group of layers, or all layers, after the forward pass.

    Attributes:
        output: output of the last layer.
        outs: the layers' `Out`s, stacked.
        residuals: the layers' residuals, stacked.
    """

    output: Carry
    outs: Out
    residuals: PlacedResiduals


class _ForwardCarry(NamedTuple):
    """The carry of the forward loop: the next layer's input, and its offloaded weights, which are being fetched."""

    x: Carry
    fetched: Flat


class _BackwardCarry(NamedTuple):
    """The carry of the backward loop over layers.

    Attributes:
        backward_state: the weights, and the rest of the state that hooks change.
        ct: the cotangent of the output of the layer that runs next.
        shared_sums: sum of the shared parameters' gradients so far.
        y: output of the layer that runs next, where layers are inverted; else None.
        fetched: that layer's offloaded weights, which are being fetched, by path.
    """

    backward_state: BackwardState
    ct: Cotangent
    shared_sums: Nested
    y: Carry
    fetched: Flat


@dataclass(frozen=True)
class StackPass:
    """Layer-by-layer forward and backward pass of one stack.

    Attributes:
        stages: the pass through the model that contains this one.
        name: the stack's stage name.
        stack: the stack.
        ctx: the stack's context.
        layers: the pass of any one of its layers.
        group_size: number of layers per group; without groups, all layers form one group.
    """

    stages: StagePass
    name: str
    stack: Stack
    ctx: Context
    layers: LayerPass
    group_size: int

    @staticmethod
    def build(stages: StagePass, name: str, carry: Carry) -> StackPass:
        """Create the pass of a stack.

        Args:
            stages: the pass through the model.
            name: the stack's stage name.
            carry: output of the previous stage; shared parameters are fetched when it is ready.
        """
        stack = stages.model.stacks[name]
        ctx = stack.context(name, stages.ctx)
        # Shared parameters are fetched once, before the loop: every layer needs all of them.
        shared = stages.inputs("shared", carry) if stack.shared else StageWeights({}, {})
        stacks = select_stacks(stages.weights, name)
        function = stack.layer_function(merge(stacks["parameter"], stacks["frozen"]), ctx)
        group_size = remat.group_size(ctx.remat, stack.num_repeats) or stack.num_repeats
        layers = LayerPass(
            layer=LayerComputation(name, stack, function),
            ctx=ctx,
            buffers=stages.buffers.get(name, {}),
            shared=shared,
            specs=stages.specs[name],
            mesh=stages.mesh,
            offloads=stages.offloads if stack.layer_range is None else stack.layer_range.offloads,
            in_groups=group_size < stack.num_repeats,
        )
        return StackPass(stages, name, stack, ctx, layers, group_size)

    # --- the stack ---------------------------------------------------------------------------------------------------

    def forward(self, carry: Carry) -> StackForward:
        """Run the stack on the output of the previous stage."""
        x, pull_enter = jax.vjp(self.stack.enter, carry)
        # Without groups nothing reads `group_starts`, and the compiler drops it.
        group_starts = jnp.arange(0, self.stack.num_repeats, self.group_size)
        stacks = select_stacks(self.stages.weights, self.name)
        if self.layers.in_groups:
            x, outs, pull_layers = self._run_groups_forward(x, stacks, group_starts)
        else:
            layers = self._run_layers_forward(x, stacks, jnp.int32(0))
            x = layers.output
            outs = layers.outs
            pull_layers = partial(self._run_layers_backward, layers, jnp.int32(0))
        x, pull_leave = jax.vjp(lambda x: self.stack.leave(x, self.ctx), x)

        def pull(backward_state: BackwardState, ct: Cotangent, hooks: BackwardHooks) -> StackGradients:
            (ct,) = pull_leave(ct)
            # At least float32: in bfloat16 each addition would lose up to 1/512 of the sum.
            shared_sums = grad_accumulation.zeros(self.layers.shared.trainable)
            gradients = pull_layers(StackGradients(backward_state, ct, shared_sums), hooks)
            (ct,) = pull_enter(gradients.ct)
            return gradients._replace(ct=ct)

        return StackForward(x, self.stack.combine(outs), pull)

    # --- groups of layers --------------------------------------------------------------------------------------------

    def _run_groups_forward(self, x: Carry, stacks: Nested, group_starts: jax.Array) -> tuple[Carry, Out, LayersPull]:
        """Run the stack group by group, saving only each group's input: (output, stacked Outs, backward pass)."""
        offloaded = jax.tree.map(self.layers.goes_to_host, x)

        def group(x: Carry, first: jax.Array) -> tuple[Carry, tuple[Out, Carry]]:
            layers = self._run_layers_forward(x, stacks, first)
            return layers.output, (layers.outs, move_leaves(offloaded, x, jax.memory.Space.Host))

        x, (outs, group_inputs) = jax.lax.scan(group, x, group_starts)
        # The scan over groups stacks the layers' results as [groups, layers per group, ...].
        num_repeats = self.stack.num_repeats
        outs = jax.tree.map(lambda leaf: leaf.reshape(num_repeats, *leaf.shape[2:]), outs)

        def fetch_input(index: jax.Array) -> Carry:
            return move_leaves(offloaded, slice_layer(group_inputs, index), jax.memory.Space.Device)

        return x, outs, partial(self._run_groups_backward, group_starts, fetch_input)

    def _run_groups_backward(
        self,
        group_starts: jax.Array,
        fetch_input: Callable[[jax.Array], Carry],
        gradients: StackGradients,
        hooks: BackwardHooks,
    ) -> StackGradients:
        """Run the stack backward group by group; each group first runs its layers forward again.

        Args:
            group_starts: index of each group's first layer.
            fetch_input: returns the input of the group with the given number, on the device.
            gradients, hooks: see `LayersPull`.
        """

        def body(step: jax.Array, gradients: StackGradients) -> StackGradients:
            index = group_starts.size - 1 - step
            x = fetch_input(index)
            x, ct = jax.lax.optimization_barrier((x, gradients.ct))
            # Weights come from the loop carry: hooks have not changed this group's weights yet, and using the forward
            # pass's stacks would keep a second copy of them alive.
            stacks = select_stacks(gradients.backward_state, self.name)
            layers = self._run_layers_forward(x, stacks, group_starts[index])
            return self._run_layers_backward(layers, group_starts[index], gradients._replace(ct=ct), hooks)

        return jax.lax.fori_loop(0, group_starts.size, body, gradients)

    # --- the layers of a group, or all of them -----------------------------------------------------------------------

    def _run_layers_forward(self, x: Carry, stacks: Nested, first: jax.Array) -> _LayersForward:
        """Run a group's layers forward.

        Args:
            x: input of the first layer.
            stacks: "parameter" and "frozen" of all layers, stacked.
            first: index of the first layer.
        """
        last_step = self.group_size - 1

        def body(carry: _ForwardCarry, i: jax.Array) -> tuple[_ForwardCarry, tuple[Out, PlacedResiduals]]:
            # The next layer's offloaded weights are fetched while this layer computes. The last layer's weights are
            # fetched a second time, as every iteration of a loop does the same.
            next_fetched = self.layers.prefetch(stacks, first + jnp.minimum(i + 1, last_step))
            index = first + i
            layer_params, x = self.layers.take_weights(stacks, index, carry.fetched, carry.x)
            y, out, residuals = self.layers.forward(layer_params, index, x)
            return _ForwardCarry(y, next_fetched), (out, residuals)

        first, x = jax.lax.optimization_barrier((first, x))
        carry = _ForwardCarry(x, self.layers.prefetch(stacks, first))
        carry, (outs, residuals) = jax.lax.scan(body, carry, jnp.arange(self.group_size))
        return _LayersForward(carry.x, outs, residuals)

    def _run_layers_backward(
        self, layers: _LayersForward, first: jax.Array, gradients: StackGradients, hooks: BackwardHooks
    ) -> StackGradients:
        """Run a group's layers backward, and call the hooks for each.

        Args:
            layers: the group's forward pass.
            first: index of the first layer.
            gradients: result of the layers after these.
            hooks: hooks that are called for each layer.
        """
        name = self.name
        backward_state, ct, shared_sums = gradients
        first, ct = jax.lax.optimization_barrier((first, ct))
        fetched = self.layers.prefetch(select_stacks(backward_state, name), first + self.group_size - 1)
        backward_state = hooks.layer_hooks.begin_loop(backward_state, name, first + self.group_size - 1)
        output = layers.output if self.layers.inverts else None
        carry = _BackwardCarry(backward_state, ct, shared_sums, output, fetched)
        body = partial(self._run_layer_backward, first, layers.residuals, hooks)
        carry = jax.lax.fori_loop(0, self.group_size, body, carry)
        backward_state = hooks.layer_hooks.end_loop(carry.backward_state, name)
        return StackGradients(backward_state, carry.ct, carry.shared_sums)

    def _run_layer_backward(
        self, first: jax.Array, residuals: PlacedResiduals, hooks: BackwardHooks, step: jax.Array, carry: _BackwardCarry
    ) -> _BackwardCarry:
        """Run one iteration of the loop of `_run_layers_backward`; step 0 is the last layer."""
        name = self.name
        backward_state = carry.backward_state
        i = self.group_size - 1 - step
        # Offloaded weights of the layer below are fetched while this layer computes, as in the forward pass.
        next_fetched = self.layers.prefetch(select_stacks(backward_state, name), first + jnp.maximum(i - 1, 0))
        # The hook runs first: it may write to the stacks from which this layer's weights are sliced.
        backward_state = hooks.layer_hooks.begin_layer(backward_state, name, first + i)
        ready = (carry.ct, carry.y)
        layer_params, (ct, y) = self.layers.take_weights(
            select_stacks(backward_state, name), first + i, carry.fetched, ready
        )
        result = self.layers.backward(layer_params, slice_layer(residuals, i), first + i, y, ct)
        shared_sums = grad_accumulation.add(carry.shared_sums, result.shared_grads)
        # A completely frozen stack has no gradients.
        if result.grads:
            grads = self.stages.shard_gradients(name, result.grads)
            backward_state = hooks.on_grads(backward_state, name, grads, first + i)
        return _BackwardCarry(backward_state, result.ct, shared_sums, result.x, next_fetched)
