"""The update runs one chunk at a time: of the offloaded state, only the current and the next chunk are on the device.

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
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.units import Bundle, Decision, Group, UnitUpdate, Update, unit_at, with_unit
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules import after_backward
from plimsoll.framework.schedules.backward import forward
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.pieces import update_group
from plimsoll.framework.schedules.sections import PLACED_FIELDS
from plimsoll.framework.schedules.step import Metrics, State, Step, finish, microbatches, training_context
from plimsoll.framework.schedules.visits import Visit, Work


def update_in_chunks(
    learner: Learner,
    layout: StateLayout,
    state: State,
    grads: Nested,
    decision: Decision,
) -> Update:
    """Update with the same results as `update_whole`, in chunks.

    Gradients are in the memory that the layout gives them, or on the device if the layout has none.
    """
    grad_specs = _gradient_specs(learner, layout)

    def run(
        group: Group,
        update: UnitUpdate,
        bundle: Bundle,
        decision: Decision,
    ) -> Update:
        group_grad_specs = learner.select(grad_specs, group)
        specs = bundle_specs(layout, learner, group, group_grad_specs)
        return update_group(learner, layout.mesh, group, bundle, specs, decision)

    return learner.update(state["parameter"], grads, state["optimizer"], state["ema"], decision, run)


def bundle_specs(
    layout: StateLayout,
    learner: Learner,
    group: Group,
    gradients: Nested,
) -> Bundle:
    """Return the specs of a group's weights, gradients (as given), optimizer state and averages."""
    specs = layout.specs
    weights = learner.select(specs["parameter"], group)
    # Optimizer state is already keyed by stage and group; the others are selected from trees of all parameters.
    entry = specs["optimizer"][group.stage][group.label]
    average = learner.select(specs["ema"], group) if specs["ema"] else {}
    return weights, gradients, entry, average


def check(layout: StateLayout, memory: Memory, platform: str) -> None:
    """Check that loops do not slice host memory on GPUs, which XLA's GPU compiler cannot compile.

    Raises:
        ValueError: state or activations are in host memory, and the platform is a GPU.
    """
    hosted = any(leaf.spec.memory_kind != "device" for leaf in layout) or memory.activations.uses_host
    if hosted and platform == "gpu":
        placements = {name: getattr(memory, name) for name in PLACED_FIELDS}
        hosted_placements = {name: placement for name, placement in placements.items() if placement.uses_host}
        settings = [f"memory.{name} = {placement.text}" for name, placement in hosted_placements.items()]
        raise ValueError(
            f"memory.update = {memory.update} with {', '.join(settings) or 'state in host memory'}: XLA's GPU compiler "
            "cannot slice host memory inside a program; on GPU expected memory.update = layer_programs"
        )


def build_step(
    model: Chain,
    learner: Learner,
    layout: StateLayout,
    memory: Memory,
) -> Step:
    """Return the training step; see `after_backward.build_step`, and `check` for the errors."""
    platform = layout.mesh.devices.flat[0].platform
    check(layout, memory, platform)
    learner.try_reach()
    hosted_groups = {leaf.group for leaf in layout if leaf.spec.memory_kind != "device"}
    weights_are_hosted = bool(hosted_groups & {"parameter", "frozen"})
    gradients_are_hosted = "gradient" in hosted_groups
    # If nothing has to move during the backward pass, jax.value_and_grad computes the gradients.
    if not (weights_are_hosted or gradients_are_hosted or memory.activations.uses_host):
        return after_backward.build_step(model, learner, layout, memory, update=update_in_chunks)
    backward_pass = _BackwardPass(model, learner, layout, memory)

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        ctx = training_context(batch, state["counter"], model, layout, memory.remat)
        loss, out, norm, work = backward_pass(state, ctx)
        grads = work["gradient"]
        with jax.named_scope("update"):
            decision = learner.decide(loss, norm, state["counter"])
            update = update_in_chunks(learner, layout, {**state, **work}, grads, decision)
        # Gradients on the device are not part of the state, so they are dropped here.
        changed = {group: tree for group, tree in work.items() if group in state}
        if "gradient" in changed:
            changed["gradient"] = {stage: grads[stage] for stage in state["gradient"]}
        return finish(
            learner,
            state,
            update,
            decision,
            loss,
            out,
            **changed,
        )

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
        work: the gradients, as "gradient", and the groups of the state that the backward pass carries.
    """

    loss: jax.Array
    out: Out
    norm: jax.Array
    work: Work


class _Microbatch(NamedTuple):
    """One microbatch: its arrays, its rows' numbers in the global batch, and its index, int32."""

    batch: Nested
    rows: jax.Array | None
    number: jax.Array


class _PartResult(NamedTuple):
    """Loss and metrics of one microbatch, and the sum of squares of the gradients accumulated so far."""

    loss: jax.Array
    metrics: Metrics
    squares: jax.Array


class _AddedLeaf(NamedTuple):
    """A gradient, summed with those of earlier microbatches, and the buffer that holds the sum."""

    grad: jax.Array
    buffer: jax.Array


@dataclass(frozen=True)
class _BackwardPass:
    """Computes gradients layer by layer into their buffers, summed over the learner's microbatches."""

    model: Chain
    learner: Learner
    layout: StateLayout
    memory: Memory

    def __call__(self, state: State, ctx: Context) -> _Gradients:
        """Compute the gradients of ctx.batch."""
        count = self.learner.accumulate
        hosted_buffers = state.get("gradient", {})
        buffers = dict(hosted_buffers)
        for stage, specs in _gradient_specs(self.learner, self.layout).items():
            if stage not in hosted_buffers:
                buffers[stage] = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
        work = {"parameter": state["parameter"], "frozen": state["frozen"], "gradient": buffers}

        def part(carry: tuple[Work, Nested], micro: _Microbatch) -> tuple[tuple[Work, Nested], _PartResult]:
            return self._part(ctx, carry, micro)

        carry = work, state["buffer"]
        if count == 1:
            micro = _Microbatch(ctx.batch, ctx.rows, jnp.int32(0))
            (work, layer_state), (loss, metrics, squares) = part(carry, micro)
        else:
            batch_parts, rows_parts = microbatches((ctx.batch, ctx.rows), count, ctx)
            parts = _Microbatch(batch_parts, rows_parts, jnp.arange(count))
            (work, layer_state), results = jax.lax.scan(part, carry, parts)
            loss, metrics = jax.tree.map(jnp.sum, (results.loss, results.metrics))
            # Each microbatch measures the sum so far, so the last one has the total.
            squares = results.squares[-1]
        out = Out(metrics=metrics, layer_state=layer_state)
        return _Gradients(loss, out, jnp.sqrt(squares), work)

    def _part(
        self,
        ctx: Context,
        carry: tuple[Work, Nested],
        micro: _Microbatch,
    ) -> tuple[tuple[Work, Nested], _PartResult]:
        """Add one microbatch's gradients to those of earlier ones, and measure the sum."""
        work, buffers = carry
        micro_ctx = replace(ctx, batch=micro.batch, rows=micro.rows)
        loss, out, pull = forward(self.model, self.layout, self.memory, work, micro_ctx, buffers)
        work = pull({**work, "squares": jnp.zeros_like(loss)}, self._visit(micro.number))
        # Not part of the scan's carry: each microbatch starts a new sum.
        squares = work.pop("squares")
        return (work, out.layer_state), _PartResult(loss, out.metrics, squares)

    def _visit(self, number: jax.Array) -> Visit:
        """Return the hook that adds a layer's gradients to their buffers, for the microbatch with that index."""
        specs = _gradient_specs(self.learner, self.layout)

        def visit(
            work: Work,
            stage: str,
            grads: Nested,
            index: jax.Array | None,
        ) -> Work:
            def add(spec: TensorSpec, buffer: jax.Array, grad: jax.Array) -> _AddedLeaf:
                return self._added(spec, buffer, grad, number, index)

            with jax.named_scope("gradient"):
                added = jax.tree.map(add, specs[stage], work["gradient"][stage], grads)
                summed_grads = jax.tree.map(lambda _, leaf: leaf.grad, specs[stage], added)
                new_buffers = jax.tree.map(lambda _, leaf: leaf.buffer, specs[stage], added)
                squares = work["squares"] + jnp.square(self.learner.norm(summed_grads))
            # The sum of squares of all gradients is the sum over their parts, so no separate pass over them is
            # needed.
            gradient = {**work["gradient"], stage: new_buffers}
            return {**work, "gradient": gradient, "squares": squares}

        return visit

    def _added(
        self,
        spec: TensorSpec,
        buffer: jax.Array,
        grad: jax.Array,
        number: jax.Array,
        index: jax.Array | None,
    ) -> _AddedLeaf:
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
            stored_sum = buffer if index is None else unit_at(buffer, index)
            stored_sum = fetch_leaf(spec, stored_sum)
            # Buffers are not cleared between steps, so the first microbatch treats their contents as zero.
            grad = grad + jnp.where(number == 0, jnp.zeros_like(stored_sum), stored_sum)
        if index is not None:
            return _AddedLeaf(grad, with_unit(buffer, store_leaf(spec, grad), index))
        shard_rows = self.layout.sharding(spec).shard_shape(spec.shape)[0]
        has_halves = shard_rows >= max(2, spec.shape[0])
        if spec.memory_kind == "device" or not has_halves:
            return _AddedLeaf(grad, store_leaf(spec, grad))
        # Written in two halves, at an index that is not a constant: a single write would create a new array in
        # addition to the old one.
        start, _ = jax.lax.optimization_barrier((jnp.int32(0), grad))
        # A table is not a stack of layers, so its rows are split in half.
        half = grad.shape[0] // 2
        for first_row, rows in ((start, grad[:half]), (start + half, grad[half:])):
            buffer = jax.lax.dynamic_update_slice_in_dim(buffer, store_leaf(spec, rows), first_row, 0)
        return _AddedLeaf(grad, buffer)
