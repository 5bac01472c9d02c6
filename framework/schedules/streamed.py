"""The streamed schedule: the update runs one chunk at a time, after the whole backward pass.

Of the offloaded state, only the current and the next chunk are on the device.

If weights, gradients or activations are in host memory, gradients are computed layer by layer: each is written to its
buffer during the backward pass, which also sums up their norm. Otherwise they are computed as in after_backward. In
both cases the norm is known before anything is updated, so clipping and skipping are exact, with a single backward
pass. Buffers in host memory are a group of the state: they are donated, written in place, and not saved in
checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layout import Nested, StateLayout, TensorSpec, fetch_leaf, store_leaf
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import ParamGroup
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate, LayerUpdateFn, slice_layer, write_layer
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules import after_backward
from plimsoll.framework.schedules.backward import forward
from plimsoll.framework.schedules.backward_hooks import BackwardState, GradientHook
from plimsoll.framework.schedules.chunked_update import update_group
from plimsoll.framework.schedules.layer_ranges import PLACED_FIELDS
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.step import Metrics, State, Step, finish, microbatches, training_context


def update_in_chunks(
    learner: Learner, layout: StateLayout, state: State, grads: Nested, decision: Decision
) -> LayerUpdate:
    """Update in chunks, with the same results as `after_backward.update_whole`.

    Args:
        learner, layout: the learner, and the layout of the training state.
        state: the training state before the step.
        grads: gradients, in the memory that the layout gives them, or on the device if the layout has none.
        decision: see `Learner.decide`.
    """
    grad_specs = _gradient_specs(learner, layout)

    def run(group: ParamGroup, update: LayerUpdateFn, train_state: LayerTrainState, decision: Decision) -> LayerUpdate:
        group_grad_specs = learner.select(grad_specs, group)
        specs = train_state_specs(layout, learner, group, group_grad_specs)
        return update_group(learner, layout.mesh, group, train_state, specs, decision)

    return learner.update(state["parameter"], grads, state["optimizer"], state["ema"], decision, run)


def train_state_specs(layout: StateLayout, learner: Learner, group: ParamGroup, gradients: Nested) -> LayerTrainState:
    """Return the specs of a group's weights, gradients, optimizer state and averages.

    Args:
        layout, learner: the layout of the training state, and the learner.
        group: the parameter group.
        gradients: specs of the group's gradients, which are returned unchanged.
    """
    specs = layout.specs
    weights = learner.select(specs["parameter"], group)
    # Optimizer state is already keyed by stage and group; the others are selected from trees of all parameters.
    entry = specs["optimizer"][group.stage][group.label]
    average = learner.select(specs["ema"], group) if specs["ema"] else {}
    return LayerTrainState(weights, gradients, entry, average)


def check(layout: StateLayout, memory: Memory, platform: str) -> None:
    """Check that loops do not slice host memory on GPUs, which XLA's GPU compiler cannot compile.

    Args:
        layout: the layout of the training state.
        memory: the memory settings.
        platform: platform of the devices: tpu, gpu or cpu.

    Raises:
        ValueError: state or activations are in host memory, and the platform is a GPU.
    """
    offloaded = any(leaf.spec.memory_kind != "device" for leaf in layout) or memory.activations.uses_host
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
    offloaded_groups = {leaf.group for leaf in layout if leaf.spec.memory_kind != "device"}
    weights_are_offloaded = bool(offloaded_groups & {"parameter", "frozen"})
    gradients_are_offloaded = "gradient" in offloaded_groups
    # If nothing has to move during the backward pass, jax.value_and_grad computes the gradients.
    if not (weights_are_offloaded or gradients_are_offloaded or memory.activations.uses_host):
        return after_backward.build_step(model, learner, layout, memory, update=update_in_chunks)
    backward_pass = _GradientAccumulation(model, learner, layout, memory)

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        ctx = training_context(batch, state["counter"], model, layout, memory.remat)
        loss, out, norm, backward_state = backward_pass(state, ctx)
        grads = backward_state["gradient"]
        with jax.named_scope("update"):
            decision = learner.decide(loss, norm, state["counter"])
            update = update_in_chunks(learner, layout, {**state, **backward_state}, grads, decision)
        # Gradients on the device are not part of the state, so they are dropped here.
        changed = {group: tree for group, tree in backward_state.items() if group in state}
        if "gradient" in changed:
            changed["gradient"] = {stage: grads[stage] for stage in state["gradient"]}
        return finish(learner, state, update, decision, loss, out, **changed)

    return step


def _gradient_specs(learner: Learner, layout: StateLayout) -> Nested:
    """Return the specs of the buffers of all gradients; those in host memory are part of the state."""
    return {**learner.gradient_specs(), **layout.specs.get("gradient", {})}


class _Gradients(NamedTuple):
    """The result of a step's backward pass.

    Attributes:
        loss: f32 scalar, of the whole batch.
        out: metrics of the whole batch, and the buffers after it.
        norm: f32 scalar, norm of all gradients together.
        backward_state: the gradients, as "gradient", and the groups of the state that the backward pass carries.
    """

    loss: jax.Array
    out: Out
    norm: jax.Array
    backward_state: BackwardState


class _Microbatch(NamedTuple):
    """One microbatch: its arrays, its rows' numbers in the global batch, and its index, int32."""

    batch: Nested
    rows: jax.Array | None
    number: jax.Array


class _MicrobatchResult(NamedTuple):
    """Loss and metrics of one microbatch, and the sum of squares of the gradients accumulated so far."""

    loss: jax.Array
    metrics: Metrics
    squares: jax.Array


class _SummedLeaf(NamedTuple):
    """A gradient, summed with those of earlier microbatches, and the buffer that holds the sum."""

    grad: jax.Array
    buffer: jax.Array


@dataclass(frozen=True)
class _GradientAccumulation:
    """Computes gradients layer by layer into their buffers, summed over the learner's microbatches."""

    model: Chain
    learner: Learner
    layout: StateLayout
    memory: Memory

    def __call__(self, state: State, ctx: Context) -> _Gradients:
        """Compute the gradients of ctx.batch."""
        count = self.learner.accumulate
        offloaded_buffers = state.get("gradient", {})
        buffers = dict(offloaded_buffers)
        for stage, specs in _gradient_specs(self.learner, self.layout).items():
            if stage not in offloaded_buffers:
                buffers[stage] = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
        backward_state = {"parameter": state["parameter"], "frozen": state["frozen"], "gradient": buffers}

        def accumulate(
            carry: tuple[BackwardState, Nested], micro: _Microbatch
        ) -> tuple[tuple[BackwardState, Nested], _MicrobatchResult]:
            return self._accumulate_microbatch(ctx, carry, micro)

        carry = backward_state, state["buffer"]
        if count == 1:
            micro = _Microbatch(ctx.batch, ctx.rows, jnp.int32(0))
            (backward_state, layer_state), (loss, metrics, squares) = accumulate(carry, micro)
        else:
            batch_parts, rows_parts = microbatches((ctx.batch, ctx.rows), count, ctx)
            parts = _Microbatch(batch_parts, rows_parts, jnp.arange(count))
            (backward_state, layer_state), results = jax.lax.scan(accumulate, carry, parts)
            loss, metrics = jax.tree.map(jnp.sum, (results.loss, results.metrics))
            # Each microbatch measures the sum so far, so the last one has the total.
            squares = results.squares[-1]
        out = Out(metrics=metrics, layer_state=layer_state)
        return _Gradients(loss, out, jnp.sqrt(squares), backward_state)

    def _accumulate_microbatch(
        self, ctx: Context, carry: tuple[BackwardState, Nested], micro: _Microbatch
    ) -> tuple[tuple[BackwardState, Nested], _MicrobatchResult]:
        """Add one microbatch's gradients to those of earlier ones, and measure the sum."""
        backward_state, buffers = carry
        micro_ctx = replace(ctx, batch=micro.batch, rows=micro.rows)
        loss, out, pull = forward(self.model, self.layout, self.memory, backward_state, micro_ctx, buffers)
        backward_state = pull(
            {**backward_state, "squares": jnp.zeros_like(loss)}, self._make_gradient_hook(micro.number)
        )
        # Not part of the scan's carry: each microbatch starts a new sum.
        squares = backward_state.pop("squares")
        return (backward_state, out.layer_state), _MicrobatchResult(loss, out.metrics, squares)

    def _make_gradient_hook(self, number: jax.Array) -> GradientHook:
        """Return the hook that adds a layer's gradients to their buffers, for the microbatch with that index."""
        specs = _gradient_specs(self.learner, self.layout)

        def on_grads(
            backward_state: BackwardState, stage: str, grads: Nested, index: jax.Array | None
        ) -> BackwardState:
            def add(spec: TensorSpec, buffer: jax.Array, grad: jax.Array) -> _SummedLeaf:
                return self._add_gradient(spec, buffer, grad, number, index)

            with jax.named_scope("gradient"):
                added = jax.tree.map(add, specs[stage], backward_state["gradient"][stage], grads)
                summed_grads = jax.tree.map(lambda _, leaf: leaf.grad, specs[stage], added)
                new_buffers = jax.tree.map(lambda _, leaf: leaf.buffer, specs[stage], added)
                squares = backward_state["squares"] + jnp.square(self.learner.norm(summed_grads))
            # The sum of squares of all gradients is the sum over their parts, so no separate pass over them is
            # needed.
            gradient = {**backward_state["gradient"], stage: new_buffers}
            return {**backward_state, "gradient": gradient, "squares": squares}

        return on_grads

    def _add_gradient(
        self, spec: TensorSpec, buffer: jax.Array, grad: jax.Array, number: jax.Array, index: jax.Array | None
    ) -> _SummedLeaf:
        """Add a gradient to its buffer; for a stack, at the layer's index.

        Args:
            spec: spec of the buffer.
            buffer: sum of the microbatches so far; in the first microbatch, leftovers of the previous step.
            grad: gradient of this microbatch.
            number: index of the microbatch.
            index: index of the layer; None outside of stacks.
        """
        grad = grad.astype(spec.dtype)
        if self.learner.accumulate > 1:
            stored_sum = buffer if index is None else slice_layer(buffer, index)
            stored_sum = fetch_leaf(spec, stored_sum)
            # Buffers are not cleared between steps, so the first microbatch treats their contents as zero.
            grad = grad + jnp.where(number == 0, jnp.zeros_like(stored_sum), stored_sum)
        if index is not None:
            return _SummedLeaf(grad, write_layer(buffer, store_leaf(spec, grad), index))
        shard_rows = self.layout.sharding(spec).shard_shape(spec.shape)[0]
        has_halves = shard_rows >= max(2, spec.shape[0])
        if spec.memory_kind == "device" or not has_halves:
            return _SummedLeaf(grad, store_leaf(spec, grad))
        # Written in two halves, at an index that is not a constant: a single write would create a new array in
        # addition to the old one.
        start, _ = jax.lax.optimization_barrier((jnp.int32(0), grad))
        # A table is not a stack of layers, so its rows are split in half.
        half = grad.shape[0] // 2
        for first_row, rows in ((start, grad[:half]), (start + half, grad[half:])):
            buffer = jax.lax.dynamic_update_slice_in_dim(buffer, store_leaf(spec, rows), first_row, 0)
        return _SummedLeaf(grad, buffer)
