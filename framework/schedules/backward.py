"""A stage-by-stage and layer-by-layer backward pass that passes each gradient to a hook as soon as it is computed.

`jax.value_and_grad` returns all gradients together. Here stages run forward one after the other, and then backward,
head first. A stack runs in loops over its layers, or over groups of layers: `StackPass`, which runs one layer with
`layer_vjp.LayerPass`. Each gradient goes to the `on_grads` hook, which may store it or update the layer.

A "layer" is one iteration of the loop: one period of the stack's pattern. The forward scan saves the residuals that
the remat policy selects. The carry of the backward loop holds the parameters, because hooks may change them.

The residuals are the leaves of `jax.vjp`'s result that are not arguments of the layer. The arguments (above all the
layer's weights) are put back in the backward loop, so no copies of them are stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from plimsoll.framework.layers import grad_accumulation, remat
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, PyTree, StateLayout, fetch_leaf, flatten, merge, unflatten
from plimsoll.framework.learner.update import slice_layer
from plimsoll.framework.models.chain import Chain, StageSpecs
from plimsoll.framework.schedules.backward_state import BackwardHooks, BackwardState, ForwardHooks, Weights
from plimsoll.framework.schedules.gradients import add_tied, shard_gradients, split_tied, with_tied_weights
from plimsoll.framework.schedules.layer_vjp import (
    Carry,
    Cotangent,
    LayerComputation,
    LayerPass,
    LayerResiduals,
    add_outs,
    move_leaves,
    run_stage,
)
from plimsoll.framework.schedules.memory import Memory

# --- the whole model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainForward:
    """The result of the forward pass.

    Attributes:
        loss: the objective without the losses of layers, f32 scalar.
        out: everything else that the model returns.
        state: the weights, and the rest of the state that the hooks of the forward pass changed.
        pull: `pull(backward_state, hooks)` runs backward, head first, and returns the backward state after all hooks;
            before, it holds the weights, and everything else that the hooks need. The gradient of a tied parameter is
            passed to the hook together with its home stage's, as the sum over all stages that read it.
    """

    loss: jax.Array
    out: Out
    state: BackwardState
    pull: Callable[[BackwardState, BackwardHooks], BackwardState]


def forward(
    model: Chain,
    layout: StateLayout,
    memory: Memory,
    weights: BackwardState,
    ctx: Context,
    buffers: Nested,
    hooks: ForwardHooks = ForwardHooks(),
    num_microbatches: int = 1,
) -> ChainForward:
    """Compute the objective, and prepare the backward pass.

    Several microbatches run through each stage and each layer before the next one (layered gradient accumulation, arXiv
    2106.02679). The backward pass of the last stage runs together with its forward pass then.

    Args:
        model: a chain of stages.
        layout: placement and sharding of the weights.
        memory: where residuals of an unsplit stack go; a range of layers has its own setting. The remat policy
            decides which residuals are saved.
        weights: a state with the groups "parameter" and "frozen".
        ctx: the context of the batch, or of several microbatches: see `step.stack_microbatches`.
        buffers: the model's buffers, by stage.
        hooks: hooks that change the weights of stacks, and other groups of that state.
        num_microbatches: number of microbatches in the context.
    """
    specs = model.stage_specs(layout.specs.parameter, layout.specs.frozen)
    offloads = memory.activations.offloads_everything
    stages = StagePass(model, layout.mesh, specs, offloads, weights, ctx, buffers, num_microbatches)
    carry: Carry = None
    outs: dict[str, Out] = {}
    stage_pulls: dict[str, StagePull] = {}
    stack_pulls: dict[str, StackPull] = {}
    state = weights
    for name in model.stages:
        if name in model.stacks:
            stack_result, state = StackPass.build(stages, name, carry).forward(carry, state, hooks)
            carry = stack_result.output
            outs[name] = stack_result.out
            stack_pulls[name] = stack_result.pull
        else:
            stage_result = stages.forward(name, carry)
            carry = stage_result.output
            outs[name] = stage_result.out
            stage_pulls[name] = stage_result.pull
    out = model.merge_outs(outs)
    assert out.loss is not None
    # The last carry is the last stage's loss, where cotangents start. The objective also has the losses of the
    # stack's layers, which join the backward pass at their layers.
    loss: jax.Array = carry

    def pull(backward_state: BackwardState, hooks: BackwardHooks) -> BackwardState:
        first_stage = next(iter(model.stages))
        first_stack = next(iter(model.stacks), None)
        tie_grads: dict[str, jax.Array] = {}
        shared_sums: Nested = {}
        ct: Cotangent = jnp.ones_like(loss)
        for name in reversed(model.stages):
            if name in model.stacks:
                result = stack_pulls[name](backward_state, ct, hooks)
                backward_state = result.backward_state
                ct = result.ct
                # Layer ranges of one stack share these parameters, so their update waits for the first range.
                shared_sums = grad_accumulation.add(shared_sums, result.shared) if shared_sums else result.shared
                if shared_sums and name == first_stack:
                    shared_grads = stages.shard_gradients("shared", shared_sums)
                    backward_state = hooks.on_grads(backward_state, "shared", shared_grads, None)
                continue
            stage_grads, ct = stage_pulls[name](ct)
            # The backward pass runs head first, and a home stage precedes the stages that read its tied weights, so
            # all gradients for this stage are complete.
            tied = add_tied(name, split_tied(model.ties, name, stage_grads, tie_grads))
            tie_grads = tied.ties
            grads = stages.shard_gradients(name, tied.grads)
            if not grads:
                continue
            backward_state = hooks.on_grads(backward_state, name, grads, None)
            if name != first_stage:
                # The barrier makes the hook finish before the stack's loop starts: the head's update holds as much
                # memory as its table.
                stage_params, ct = jax.lax.optimization_barrier((backward_state.parameter[name], ct))
                backward_state = replace(backward_state, parameter={**backward_state.parameter, name: stage_params})
        return backward_state

    return ChainForward(out.loss, out, state, pull)


# --- stages outside the stacks ---------------------------------------------------------------------------------------

# cotangent of the stage's output -> (gradients of its parameters, cotangent of its input).
StagePull = Callable[[Cotangent], tuple[Nested, Cotangent]]
Pull = TypeVar("Pull")


@dataclass(frozen=True)
class StageForward(Generic[Pull]):
    """The result of a stage's forward pass.

    Attributes:
        output: output of the stage; for the last stage, the loss.
        out: metrics and buffers.
        pull: the stage's backward pass: a `StagePull`, or a `StackPull` for a stack.
    """

    output: Carry
    out: Out
    pull: Pull


@dataclass(frozen=True)
class StagePass:
    """One pass through a model's stages.

    Attributes:
        model: a chain of stages.
        mesh: the device mesh of the layout.
        specs: specs of the parameters that each stage reads, by stage and path.
        offloads: whether residuals of layers go to host memory, for stacks that are not split into ranges.
        weights: the groups "parameter" and "frozen".
        ctx: the context of the batch.
        buffers: the model's buffers, by stage.
        num_microbatches: see `LayerPass`.
    """

    model: Chain
    mesh: Mesh
    specs: StageSpecs
    offloads: bool
    weights: BackwardState
    ctx: Context
    buffers: Nested
    num_microbatches: int = 1

    def fetch_weights(self, name: str, carry: Carry) -> Weights:
        """Fetch a stage's parameters, tied ones included, to the device once `carry` is ready."""
        # The compiler would fetch offloaded weights as early as possible. So each is read at an index that is not
        # known before `carry` is ready.
        first, _ = jax.lax.optimization_barrier((jnp.int32(0), carry))
        fetched = []
        for params in (self.weights.parameter, self.weights.frozen):
            weights = with_tied_weights(self.model.ties, name, params.get(name, {}), flatten(params))
            device_leaves = {}
            for path, leaf in flatten(weights).items():
                spec = self.specs[name][path]
                if spec.is_offloaded:
                    # Viewed as a stack of one and indexed: a plain copy would not depend on the index.
                    leaf = fetch_leaf(spec, slice_layer(leaf[None], first))
                device_leaves[path] = leaf
            fetched.append(unflatten(device_leaves))
        trainable, frozen = fetched
        return Weights(frozen, trainable)

    def forward(self, name: str, carry: Carry) -> StageForward[StagePull]:
        """Run a stage outside the stacks."""
        weights = self.fetch_weights(name, carry)
        if self.num_microbatches > 1:
            if name == list(self.model.stages)[-1]:
                return self._run_last_each(name, weights, carry)
            return self._forward_each(name, weights, carry)
        run = partial(self._run, name, weights.frozen, self.ctx, self.buffers.get(name, {}))
        y, pull, out = jax.vjp(run, weights.trainable, carry, has_aux=True)
        return StageForward(y, out, pull)

    def _run(
        self, name: str, frozen: Nested, ctx: Context, buffers: Nested, params: Nested, carry: Carry
    ) -> tuple[Carry, Out]:
        return run_stage(self.model, name, merge(params, frozen), carry, ctx, buffers)

    def _forward_each(self, name: str, weights: Weights, carry: Carry) -> StageForward[StagePull]:
        """Run a stage on each microbatch; its backward pass runs it forward again."""
        batch, rows = self.ctx.batch, self.ctx.rows

        def forward(
            buffers: Nested, micro: tuple[Carry, Nested, jax.Array | None]
        ) -> tuple[Nested, tuple[Carry, Out, Nested]]:
            x, batch, rows = micro
            ctx = replace(self.ctx, batch=batch, rows=rows)
            y, out = self._run(name, weights.frozen, ctx, buffers, weights.trainable, x)
            return out.layer_state, (y, replace(out, layer_state={}), buffers)

        new_buffers, (y, outs, buffers) = jax.lax.scan(forward, self.buffers.get(name, {}), (carry, batch, rows))

        def pull(ct: Cotangent) -> tuple[Nested, Cotangent]:
            def backward(
                sums: Nested, micro: tuple[Carry, Cotangent, Nested, Nested, jax.Array | None]
            ) -> tuple[Nested, Cotangent]:
                x, ct, buffers, batch, rows = micro
                run = partial(self._run, name, weights.frozen, replace(self.ctx, batch=batch, rows=rows), buffers)
                _, pull, _ = jax.vjp(run, weights.trainable, x, has_aux=True)
                grads, ct = pull(ct)
                return grad_accumulation.add(sums, self.shard_gradients(name, grads)), ct

            return jax.lax.scan(backward, grad_accumulation.zeros(weights.trainable), (carry, ct, buffers, batch, rows))

        return StageForward(y, add_outs(outs, new_buffers), pull)

    def _run_last_each(self, name: str, weights: Weights, carry: Carry) -> StageForward[StagePull]:
        """Run the last stage forward and backward on each microbatch: its residuals are larger than its gradients."""

        def body(
            buffers_and_sums: tuple[Nested, Nested], micro: tuple[Carry, Nested, jax.Array | None]
        ) -> tuple[tuple[Nested, Nested], tuple[jax.Array, Out, Cotangent]]:
            buffers, sums = buffers_and_sums
            x, batch, rows = micro
            run = partial(self._run, name, weights.frozen, replace(self.ctx, batch=batch, rows=rows), buffers)
            loss, pull, out = jax.vjp(run, weights.trainable, x, has_aux=True)
            grads, ct = pull(jnp.ones_like(loss))
            sums = grad_accumulation.add(sums, self.shard_gradients(name, grads))
            return (out.layer_state, sums), (loss, replace(out, layer_state={}), ct)

        start = (self.buffers.get(name, {}), grad_accumulation.zeros(weights.trainable))
        (buffers, sums), (losses, outs, cts) = jax.lax.scan(body, start, (carry, self.ctx.batch, self.ctx.rows))
        # The cotangent of the loss is one.
        return StageForward(jnp.sum(losses, axis=0), add_outs(outs, buffers), lambda ct: (sums, cts))

    def shard_gradients(self, name: str, grads: Nested) -> Nested:
        """Constrain gradients of a stage, or of one layer of a stack, to the shardings of their parameters."""
        return shard_gradients(grads, self.specs[name], self.mesh)


# --- stacks ----------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackGradients:
    """The result of the backward pass over a stack, or over a group of its layers.

    Attributes:
        backward_state: the backward state after the hooks.
        ct: the cotangent of the input.
        shared: sum, over the layers so far, of the gradients of the parameters that all layers share.
    """

    backward_state: BackwardState
    ct: Cotangent
    shared: Nested


# (backward state, cotangent of the stack's output, hooks) -> result.
StackPull = Callable[[BackwardState, Cotangent, BackwardHooks], StackGradients]


@dataclass(frozen=True)
class _LayersForward:
    """A group of layers, or all layers, after the forward pass.

    Attributes:
        output: output of the last layer.
        outs: the layers' `Out`s, stacked.
        residuals: the layers' residuals, stacked.
    """

    output: Carry
    outs: Out
    residuals: LayerResiduals


@dataclass(frozen=True)
class _GroupsForward:
    """All layers after the forward pass in groups.

    Attributes:
        output: output of the last layer.
        outs: the layers' `Out`s, stacked.
        inputs: inputs of the groups, stacked.
        offloaded: for each leaf of an input, whether it was moved to host memory.
    """

    output: Carry
    outs: Out
    inputs: Carry
    offloaded: PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _ForwardCarry:
    """The carry of the forward loop over layers.

    Attributes:
        x: input of the layer that runs next.
        fetched: that layer's offloaded weights, which are being fetched, by path.
        changed: the state, if hooks change it; else None, so that the loop only reads the stacks.
    """

    x: Carry
    fetched: dict[str, jax.Array]
    changed: BackwardState | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _BackwardCarry:
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
    fetched: dict[str, jax.Array]


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
        shared = stages.fetch_weights("shared", carry) if stack.shared else Weights({}, {})
        stacks = stages.weights.select_weights(name)
        function = stack.layer_function(merge(stacks.trainable, stacks.frozen), ctx)
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
            num_microbatches=stages.num_microbatches,
        )
        return StackPass(stages, name, stack, ctx, layers, group_size)

    def forward(
        self, carry: Carry, state: BackwardState, hooks: ForwardHooks
    ) -> tuple[StageForward[StackPull], BackwardState]:
        """Run the stack on the output of the previous stage: (result, the state after the hooks).

        Args:
            carry: the output of the previous stage.
            state: the weights, and what the hooks need.
            hooks: hooks that are called for each layer, if they are for this stack.
        """
        x, pull_enter = jax.vjp(self._map_microbatches(self.stack.enter), carry)
        # Without groups nothing reads `group_starts`, and the compiler drops it.
        group_starts = jnp.arange(0, self.stack.num_repeats, self.group_size)
        if self.name not in hooks.stacks:
            hooks = ForwardHooks()
        if self.layers.in_groups:
            result, state = self._run_groups_forward(x, state, group_starts, hooks)
            pull_layers = partial(self._run_groups_backward, result, group_starts)
        else:
            result, state = self._run_layers_forward(x, state, jnp.int32(0), hooks)
            pull_layers = partial(self._run_layers_backward, result, jnp.int32(0))
        leave = self._map_microbatches(partial(self.stack.leave, ctx=self.ctx))
        x, pull_leave = jax.vjp(leave, result.output)

        def pull(backward_state: BackwardState, ct: Cotangent, hooks: BackwardHooks) -> StackGradients:
            (ct,) = pull_leave(ct)
            # At least float32: in bfloat16 each addition would lose up to 1/512 of the sum.
            shared_sums = grad_accumulation.zeros(self.layers.shared.trainable)
            gradients = pull_layers(StackGradients(backward_state, ct, shared_sums), hooks)
            (ct,) = pull_enter(gradients.ct)
            return replace(gradients, ct=ct)

        return StageForward(x, self.stack.combine(result.outs), pull), state

    def _map_microbatches(self, function: Callable[[Carry], Carry]) -> Callable[[Carry], Carry]:
        """Return a function of one microbatch's activations as a function of those of the pass."""
        return jax.vmap(function) if self.stages.num_microbatches > 1 else function

    # --- groups of layers --------------------------------------------------------------------------------------------

    def _run_groups_forward(
        self, x: Carry, state: BackwardState, group_starts: jax.Array, hooks: ForwardHooks
    ) -> tuple[_GroupsForward, BackwardState]:
        """Run the stack group by group, saving only each group's input; arguments as for `_run_layers_forward`."""
        offloaded = jax.tree.map(self.layers.goes_to_host, x)
        is_changed = bool(hooks.stacks)

        def group(
            carry: tuple[Carry, BackwardState | None], first: jax.Array
        ) -> tuple[tuple[Carry, BackwardState | None], tuple[Out, Carry]]:
            x, changed = carry
            layers, changed = self._run_layers_forward(x, state if changed is None else changed, first, hooks)
            saved = layers.outs, move_leaves(offloaded, x, to_host=True)
            return (layers.output, changed if is_changed else None), saved

        (x, changed), (outs, group_inputs) = jax.lax.scan(group, (x, state if is_changed else None), group_starts)
        # The scan over groups stacks the layers' results as [groups, layers per group, ...].
        num_repeats = self.stack.num_repeats
        outs = jax.tree.map(lambda leaf: leaf.reshape(num_repeats, *leaf.shape[2:]), outs)
        return _GroupsForward(x, outs, group_inputs, offloaded), state if changed is None else changed

    def _run_groups_backward(
        self, groups: _GroupsForward, group_starts: jax.Array, gradients: StackGradients, hooks: BackwardHooks
    ) -> StackGradients:
        """Run the stack backward group by group; each group first runs its layers forward again.

        Args:
            groups: the forward pass of all groups.
            group_starts: index of each group's first layer.
            gradients: result of the layers after these.
            hooks: hooks that are called for each layer.
        """

        def body(step: jax.Array, gradients: StackGradients) -> StackGradients:
            index = group_starts.size - 1 - step
            x = move_leaves(groups.offloaded, slice_layer(groups.inputs, index), to_host=False)
            x, ct = jax.lax.optimization_barrier((x, gradients.ct))
            # Weights come from the loop carry: hooks have not changed this group's weights yet, and using the forward
            # pass's stacks would keep a second copy of them alive.
            layers, _ = self._run_layers_forward(x, gradients.backward_state, group_starts[index], ForwardHooks())
            return self._run_layers_backward(layers, group_starts[index], replace(gradients, ct=ct), hooks)

        return jax.lax.fori_loop(0, group_starts.size, body, gradients)

    # --- the layers of a group, or all of them -----------------------------------------------------------------------

    def _run_layers_forward(
        self, x: Carry, state: BackwardState, first: jax.Array, hooks: ForwardHooks
    ) -> tuple[_LayersForward, BackwardState]:
        """Run a group's layers forward: (result, the state after the hooks).

        Args:
            x: input of the first layer.
            state: the parameters of all layers, stacked, and what the hooks need.
            first: index of the first layer.
            hooks: hooks that are called for each layer.
        """
        last_step = self.group_size - 1

        def body(carry: _ForwardCarry, i: jax.Array) -> tuple[_ForwardCarry, tuple[Out, LayerResiduals]]:
            index = first + i
            next_index = first + jnp.minimum(i + 1, last_step)
            changed = carry.changed
            if changed is not None:
                changed = hooks.begin_layer(changed, self.name, index, next_index)
            stacks = (state if changed is None else changed).select_weights(self.name)
            # The next layer's offloaded weights are fetched while this layer computes. The last layer's weights are
            # fetched a second time, as every iteration of a loop does the same.
            next_fetched = self.layers.prefetch(stacks, next_index)
            weights, x = self.layers.take_weights(stacks, index, carry.fetched, carry.x)
            result = self.layers.forward(weights, index, x)
            return _ForwardCarry(result.output, next_fetched, changed), (result.out, result.residuals)

        changed = hooks.begin_loop(state, self.name, first) if hooks.stacks else None
        first, x = jax.lax.optimization_barrier((first, x))
        carry = _ForwardCarry(x, self.layers.prefetch(state.select_weights(self.name), first), changed)
        carry, (outs, residuals) = jax.lax.scan(body, carry, jnp.arange(self.group_size, dtype=first.dtype))
        if carry.changed is not None:
            state = hooks.end_loop(carry.changed, self.name)
        return _LayersForward(carry.x, outs, residuals), state

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
        backward_state = gradients.backward_state
        first, ct = jax.lax.optimization_barrier((first, gradients.ct))
        fetched = self.layers.prefetch(backward_state.select_weights(name), first + self.group_size - 1)
        last = first + self.group_size - 1
        backward_state = hooks.begin_loop(backward_state, name, last)
        output = layers.output if self.layers.inverts else None
        carry = _BackwardCarry(backward_state, ct, gradients.shared, output, fetched)
        body = partial(self._run_layer_backward, first, layers.residuals, hooks)
        carry = jax.lax.fori_loop(0, self.group_size, body, carry)
        backward_state = hooks.end_loop(carry.backward_state, name)
        return StackGradients(backward_state, carry.ct, carry.shared_sums)

    def _run_layer_backward(
        self, first: jax.Array, residuals: LayerResiduals, hooks: BackwardHooks, step: jax.Array, carry: _BackwardCarry
    ) -> _BackwardCarry:
        """Run one iteration of the loop of `_run_layers_backward`; step 0 is the last layer."""
        name = self.name
        backward_state = carry.backward_state
        i = self.group_size - 1 - step
        # Offloaded weights of the layer below are fetched while this layer computes, as in the forward pass.
        next_fetched = self.layers.prefetch(backward_state.select_weights(name), first + jnp.maximum(i - 1, 0))
        # The hook runs first: it may write to the stacks from which this layer's weights are sliced.
        backward_state = hooks.begin_layer(backward_state, name, first + i)
        stacks = backward_state.select_weights(name)
        weights, (ct, y) = self.layers.take_weights(stacks, first + i, carry.fetched, (carry.ct, carry.y))
        result = self.layers.backward(weights, slice_layer(residuals, i), first + i, y, ct)
        shared_sums = grad_accumulation.add(carry.shared_sums, result.shared_grads)
        # A completely frozen stack has no gradients.
        if result.grads:
            grads = self.stages.shard_gradients(name, result.grads)
            backward_state = hooks.on_grads(backward_state, name, grads, first + i)
        return _BackwardCarry(backward_state, result.ct, shared_sums, result.x, next_fetched)
