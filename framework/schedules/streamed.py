"""The streamed schedule: the update runs one chunk at a time, after the whole backward pass.

Of the offloaded state, only the current and the next chunk are on the device.

If weights, gradients or activations are in host memory, gradients are computed layer by layer: each is written to its
buffer during the backward pass, which also sums up their norm. Otherwise they are computed as in after_backward. In
both cases the norm is known before anything is updated, so clipping and skipping are exact, with a single backward
pass. Buffers in host memory are a group of the state: they are donated, written in place, and not saved in
checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layout import (
    Nested,
    StateLayout,
    TensorSpec,
    TrainState,
    fetch_leaf,
    flatten,
    store_leaf,
    unflatten,
)
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate, LayerUpdateFn, slice_layer, write_layer
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules import after_backward
from plimsoll.framework.schedules.backward import forward
from plimsoll.framework.schedules.backward_state import BackwardHooks, BackwardState, ForwardHooks
from plimsoll.framework.schedules.chunked_update import train_state_specs, update_group
from plimsoll.framework.schedules.delayed_update import (
    build_hooks,
    clear_update,
    find_delayed_stacks,
    leave_update,
    recall_decision,
)
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.speculative_update import SpeculativeUpdate
from plimsoll.framework.schedules.stack_layout import PLACED_FIELDS
from plimsoll.framework.schedules.step import Metrics, Step, finish, microbatches, stack_microbatches, training_context


def update_in_chunks(
    learner: Learner,
    layout: StateLayout,
    state: TrainState,
    grads: Nested,
    decision: Decision,
    stages: Collection[str] | None = None,
) -> LayerUpdate:
    """Update in chunks, with the same results as `after_backward.update_whole`.

    Args:
        learner, layout: the learner, and the layout of the training state.
        state: the training state before the step.
        grads: gradients, in the memory that the layout gives them, or on the device if the layout has none.
        decision: see `Learner.decide`.
        stages: stages to update; None for all.
    """
    grad_specs = _gradient_specs(learner, layout)

    def run(update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
        group = update.optimizer.group
        specs = train_state_specs(layout, learner, group, learner.select(grad_specs, group))
        return update_group(update, layout.mesh, train_state, specs, decision)

    if stages is None:
        return learner.update(state.parameter, grads, state.optimizer, state.ema, decision, run)
    update = LayerUpdate(state.parameter, state.optimizer, state.ema)
    for stage in stages:
        update = learner.update(update.weights, grads, update.entry, update.average, decision, run, stage)
    return update


def check(layout: StateLayout, memory: Memory, platform: str) -> None:
    """Check that loops do not slice host memory on GPUs, which XLA's GPU compiler cannot compile.

    Args:
        layout: the layout of the training state.
        memory: the memory settings.
        platform: platform of the devices: tpu, gpu or cpu.

    Raises:
        ValueError: state or activations are in host memory, and the platform is a GPU.
    """
    offloaded = any(leaf.spec.is_offloaded for leaf in layout) or memory.activations.uses_host
    if offloaded and platform == "gpu":
        placements = {name: getattr(memory, name) for name in PLACED_FIELDS}
        offloaded_placements = {name: placement for name, placement in placements.items() if placement.uses_host}
        settings = [f"memory.{name} = {placement.text}" for name, placement in offloaded_placements.items()]
        raise ValueError(
            f"memory.update = {memory.update} with {', '.join(settings) or 'state in host memory'}: XLA's GPU compiler "
            "cannot slice host memory inside a program; on GPU expected memory.update = layer_programs"
        )


def build_step(model: Chain, learner: Learner, layout: StateLayout, memory: Memory) -> Step:
    """Return the training step; see `after_backward.build_step`, and `check` for the errors."""
    platform = layout.mesh.devices.flat[0].platform
    check(layout, memory, platform)
    learner.measure_localities()
    offloaded_groups = {leaf.group for leaf in layout if leaf.spec.is_offloaded}
    weights_are_offloaded = bool(offloaded_groups & {"parameter", "frozen"})
    gradients_are_offloaded = "gradient" in offloaded_groups
    # If nothing has to move during the backward pass, jax.value_and_grad computes the gradients.
    moves = weights_are_offloaded or gradients_are_offloaded or memory.activations.uses_host
    if not moves and memory.accumulate_by == "microbatch":
        return after_backward.build_step(model, learner, layout, memory, update=update_in_chunks)
    delayed_stacks = find_delayed_stacks(model, layout, memory)
    speculative_stacks = list(layout.specs.spare)
    accumulation = _GradientAccumulation(model, learner, layout, memory, speculative_stacks)
    # Stages that are updated when the norm is known; None for all.
    stages = None
    if delayed_stacks or speculative_stacks:
        others = {*delayed_stacks, *speculative_stacks}
        stages = [stage for stage in learner.gradient_specs() if stage not in others]

    def step(state: TrainState, batch: Nested) -> tuple[TrainState, Metrics]:
        ctx = training_context(batch, state.counter, model, layout, memory.remat)
        hooks = ForwardHooks()
        if delayed_stacks:
            # The update that the last step left is applied in the forward pass.
            hooks = build_hooks(learner, layout, state, delayed_stacks)
        result = accumulation.run(state, ctx, hooks)
        grads = result.backward_state.gradient
        with jax.named_scope("update"):
            decision = learner.decide(result.loss, result.norm, state.counter)
            # The backward loop carries the weights and returns them, although nothing changed them.
            after = result.backward_state
            if speculative_stacks:
                speculation = accumulation.speculate(result.loss, state.counter)
                after = speculation.correct(state, after, decision)
            state_after = replace(state, parameter=after.parameter, optimizer=after.optimizer, ema=after.ema)
            update = update_in_chunks(learner, layout, state_after, grads, decision, stages)
        changed = {
            "gradient": _select_buffers(grads, state.gradient),
            "frozen": after.frozen,
            "pending": leave_update(decision) if delayed_stacks else state.pending,
            "spare": after.spare,
            "spare_ema": after.spare_ema,
        }
        return finish(learner, state, update, decision, result.loss, result.out, **changed)

    return step


def complete_update(
    model: Chain, learner: Learner, layout: StateLayout, memory: Memory, state: TrainState
) -> TrainState:
    """Apply the update that a step left for the next one, without a step; see `delayed_update.py`.

    Args:
        model, learner, layout, memory: see `build_step`.
        state: the training state; without a pending update, its values do not change.
    """
    decision = recall_decision(learner, state)
    stacks = find_delayed_stacks(model, layout, memory)
    update = update_in_chunks(learner, layout, state, state.gradient, decision, stacks)
    state = replace(state, parameter=update.weights, optimizer=update.entry, ema=update.average)
    return clear_update(state)


def _gradient_specs(learner: Learner, layout: StateLayout) -> Nested:
    """Return the specs of the buffers of all gradients; those in host memory are part of the state."""
    return unflatten({**flatten(learner.gradient_specs()), **flatten(layout.specs.gradient)})


def _select_buffers(grads: Nested, buffers: Nested) -> Nested:
    """Return the gradients that have a buffer in the state; those on the device are dropped."""
    grad_by_path = flatten(grads)
    return unflatten({path: grad_by_path[path] for path in flatten(buffers)})


@dataclass(frozen=True)
class _Gradients:
    """The result of a step's backward pass.

    Attributes:
        loss: f32 scalar, of the whole batch.
        out: metrics of the whole batch, and the buffers after it.
        norm: f32 scalar, norm of all gradients together.
        backward_state: the gradients, and the weights and their state after the hooks of both passes.
    """

    loss: jax.Array
    out: Out
    norm: jax.Array
    backward_state: BackwardState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Microbatch:
    """One microbatch.

    Attributes:
        batch: its arrays.
        rows: its rows' numbers in the global batch.
        number: its index, int32.
    """

    batch: Nested
    rows: jax.Array | None
    number: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _MicrobatchResult:
    """The result of one microbatch.

    Attributes:
        loss: f32 scalar.
        metrics: metrics of the microbatch.
        squares: f32 scalar, sum of the squares of the gradients accumulated so far.
    """

    loss: jax.Array
    metrics: Metrics
    squares: jax.Array


@dataclass(frozen=True)
class _GradientAccumulation:
    """Computes gradients layer by layer into their buffers, summed over the learner's microbatches.

    Attributes:
        model, learner, layout, memory: see `build_step`.
        speculative_stacks: stacks whose layers are updated in the backward pass.
    """

    model: Chain
    learner: Learner
    layout: StateLayout
    memory: Memory
    speculative_stacks: Collection[str]

    @property
    def num_passes(self) -> int:
        """The number of passes through the model."""
        return self.learner.accumulate if self.memory.accumulate_by == "microbatch" else 1

    def run(self, state: TrainState, ctx: Context, hooks: ForwardHooks) -> _Gradients:
        """Compute the gradients of ctx.batch; hooks and speculative updates are for a single pass."""
        count = self.num_passes
        # Host memory has only some of the buffers, perhaps those of a stage's experts.
        offloaded_buffers = flatten(state.gradient)
        buffer_by_path = {}
        for path, spec in flatten(_gradient_specs(self.learner, self.layout)).items():
            buffer = offloaded_buffers.get(path)
            buffer_by_path[path] = jnp.zeros(spec.shape, spec.dtype) if buffer is None else buffer
        buffers = unflatten(buffer_by_path)
        backward_state = BackwardState(parameter=state.parameter, frozen=state.frozen, gradient=buffers)
        uses_optimizer = bool(hooks.stacks or self.speculative_stacks)
        if uses_optimizer:
            backward_state = replace(
                backward_state, optimizer=state.optimizer, ema=state.ema, spare=state.spare, spare_ema=state.spare_ema
            )
        carry = backward_state, state.buffer
        accumulate = partial(self._accumulate_microbatch, ctx, state.counter, hooks)
        if count == 1:
            stacked = stack_microbatches(ctx, self.learner.accumulate)
            micro = _Microbatch(stacked.batch, stacked.rows, jnp.int32(0))
            (backward_state, layer_state), result = accumulate(carry, micro)
        else:
            batch_parts, rows_parts = microbatches((ctx.batch, ctx.rows), count, ctx)
            parts = _Microbatch(batch_parts, rows_parts, jnp.arange(count))
            (backward_state, layer_state), results = jax.lax.scan(accumulate, carry, parts)
            loss, metrics = jax.tree.map(jnp.sum, (results.loss, results.metrics))
            # Each microbatch measures the sum so far, so the last one has the total.
            result = _MicrobatchResult(loss, metrics, results.squares[-1])
        out = Out(metrics=result.metrics, layer_state=layer_state)
        norm = jnp.sqrt(result.squares)
        if not uses_optimizer:
            backward_state = replace(backward_state, optimizer=state.optimizer, ema=state.ema)
        return _Gradients(result.loss, out, norm, backward_state)

    def speculate(self, loss: jax.Array, counter: Nested) -> SpeculativeUpdate:
        """Return the updates under the assumption that nothing is clipped, and that the gradients are finite.

        Args:
            loss: f32 scalar, of the whole batch.
            counter: the state's counters before the step.
        """
        decision = self.learner.decide(loss, jnp.zeros_like(loss), counter)
        return SpeculativeUpdate(self.learner, self.layout, self.speculative_stacks, decision)

    def _accumulate_microbatch(
        self,
        ctx: Context,
        counter: Nested,
        hooks: ForwardHooks,
        carry: tuple[BackwardState, Nested],
        micro: _Microbatch,
    ) -> tuple[tuple[BackwardState, Nested], _MicrobatchResult]:
        """Add one microbatch's gradients to those of earlier ones, and measure the sum."""
        backward_state, buffers = carry
        micro_ctx = replace(ctx, batch=micro.batch, rows=micro.rows)
        num_microbatches = self.learner.accumulate // self.num_passes
        result = forward(
            self.model, self.layout, self.memory, backward_state, micro_ctx, buffers, hooks, num_microbatches
        )
        backward_state = replace(result.state, squares=jnp.zeros_like(result.loss))
        if self.speculative_stacks:
            speculation = self.speculate(result.loss, counter)
            backward_hooks = BackwardHooks(
                partial(self._add_gradients, micro.number, speculation),
                speculation.begin_loop,
                speculation.begin_layer,
                speculation.end_loop,
            )
            backward_state = result.pull(backward_state, backward_hooks)
        else:
            # The backward pass does not need optimizer state and averages.
            backward_state = replace(backward_state, optimizer={}, ema={})
            backward_hooks = BackwardHooks(partial(self._add_gradients, micro.number, None))
            backward_state = result.pull(backward_state, backward_hooks)
            backward_state = replace(backward_state, optimizer=result.state.optimizer, ema=result.state.ema)
        squares = backward_state.squares
        assert squares is not None
        # Not part of the scan's carry: each microbatch starts a new sum.
        backward_state = replace(backward_state, squares=None)
        return (backward_state, result.out.layer_state), _MicrobatchResult(result.loss, result.out.metrics, squares)

    def _add_gradients(
        self,
        number: jax.Array,
        speculation: SpeculativeUpdate | None,
        backward_state: BackwardState,
        stage: str,
        grads: Nested,
        index: jax.Array | None,
    ) -> BackwardState:
        """Add a layer's gradients to their buffers: the gradient hook of the microbatch with the index `number`."""
        assert backward_state.squares is not None
        specs = _gradient_specs(self.learner, self.layout)[stage]
        buffers = flatten(backward_state.gradient[stage])
        grad_by_path = flatten(grads)
        with jax.named_scope("gradient"):
            for path, spec in flatten(specs).items():
                grad_by_path[path], buffers[path] = self._add_gradient(
                    spec, buffers[path], grad_by_path[path], number, index
                )
            # The sum of squares of all gradients is the sum over their parts, so no separate pass over them is
            # needed.
            squares = backward_state.squares + jnp.square(self.learner.norm(unflatten(grad_by_path)))
        gradient = {**backward_state.gradient, stage: unflatten(buffers)}
        backward_state = replace(backward_state, gradient=gradient, squares=squares)
        if speculation is None:
            return backward_state
        return speculation.update_layer(backward_state, stage, unflatten(grad_by_path))

    def _add_gradient(
        self, spec: TensorSpec, buffer: jax.Array, grad: jax.Array, number: jax.Array, index: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Add a gradient to its buffer, for a stack at the layer's index: (sum of the microbatches, new buffer).

        Args:
            spec: spec of the buffer.
            buffer: sum of the microbatches so far; in the first microbatch, leftovers of the previous step.
            grad: gradient of this microbatch.
            number: index of the microbatch.
            index: index of the layer; None outside of stacks.
        """
        grad = grad.astype(spec.dtype)
        if self.num_passes > 1:
            stored_sum = buffer if index is None else slice_layer(buffer, index)
            stored_sum = fetch_leaf(spec, stored_sum)
            # Buffers are not cleared between steps, so the first microbatch treats their contents as zero.
            grad = grad + jnp.where(number == 0, jnp.zeros_like(stored_sum), stored_sum)
        if index is not None:
            return grad, write_layer(buffer, store_leaf(spec, grad), index)
        shard_shape = self.layout.sharding(spec).shard_shape(spec.shape)
        # XLA for TPU makes the rows of a narrow table the minor axis, and cannot write a part of that axis.
        is_narrow = bool(shard_shape[-1] % 128)
        has_halves = shard_shape[0] >= max(2, spec.shape[0]) and not is_narrow
        if not spec.is_offloaded or not has_halves:
            return grad, store_leaf(spec, grad)
        # Written in two halves, at an index that is not a constant: a single write would create a new array in
        # addition to the old one.
        start, _ = jax.lax.optimization_barrier((jnp.int32(0), grad))
        # A table is not a stack of layers, so its rows are split in half.
        half = grad.shape[0] // 2
        for first_row, rows in ((start, grad[:half]), (start + half, grad[half:])):
            buffer = jax.lax.dynamic_update_slice_in_dim(buffer, store_leaf(spec, rows), first_row, 0)
        return grad, buffer
