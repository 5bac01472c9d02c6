"""The update goes through the model a piece at a time: of what lives in host memory only one piece (and the next one,
on its way) is on the device.

Gradients are either taken as in after_backward, or, where weights, gradients or activations are in host memory, a unit
at a time: each is written into its buffer as the backward pass makes it, and their norm is summed on the way. In both
cases the norm is known before anything is updated, so clipping and skipping are exact, with one backward pass. Buffers
in host memory are a group of the state: donated, written in place, and not part of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from framework.layers.base import Context, Out
from framework.layout import Nested, StateLayout, TensorSpec, fetch_leaf, store_leaf
from framework.learner.learner import Learner
from framework.learner.units import Bundle, Decision, Group, UnitUpdate, Update, unit_at, with_unit
from framework.models.chain import Chain
from framework.schedules import after_backward
from framework.schedules.backward import forward
from framework.schedules.memory import Memory
from framework.schedules.pieces import update_group
from framework.schedules.sections import PLACED_FIELDS
from framework.schedules.step import Metrics, State, Step, finish, microbatches, training_context
from framework.schedules.visits import Visit, Work


def update_streamed(
    learner: Learner,
    layout: StateLayout,
    state: State,
    grads: Nested,
    decision: Decision,
) -> Update:
    """Updates as `update_whole` does, with the same results. Gradients are where the layout has them (else on the
    device)."""
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
    """The specs of a group's weights, gradients (as given), optimizer state and averages."""
    specs = layout.specs
    weights = learner.select(specs["parameter"], group)
    # Optimizer state is by stage and group already; the others are selected from trees of all parameters.
    entry = specs["optimizer"][group.stage][group.label]
    average = learner.select(specs["ema"], group) if specs["ema"] else {}
    return weights, gradients, entry, average


def check(layout: StateLayout, memory: Memory, platform: str) -> None:
    """Raises ValueError when loops would take slices of host memory of GPUs: their compiler cannot."""
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
    """The training step; see `after_backward.build_step`, and `check` for what is raised."""
    platform = layout.mesh.devices.flat[0].platform
    check(layout, memory, platform)
    learner.try_reach()
    hosted_groups = {leaf.group for leaf in layout if leaf.spec.memory_kind != "device"}
    weights_are_hosted = bool(hosted_groups & {"parameter", "frozen"})
    gradients_are_hosted = "gradient" in hosted_groups
    # Where nothing has to move during the backward pass, jax.value_and_grad takes it.
    if not (weights_are_hosted or gradients_are_hosted or memory.activations.uses_host):
        return after_backward.build_step(model, learner, layout, memory, update=update_streamed)
    backward_pass = _BackwardPass(model, learner, layout, memory)

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        ctx = training_context(batch, state["counter"], model, layout, memory.remat)
        loss, out, norm, work = backward_pass(state, ctx)
        grads = work["gradient"]
        with jax.named_scope("update"):
            decision = learner.decide(loss, norm, state["counter"])
            update = update_streamed(learner, layout, {**state, **work}, grads, decision)
        # Gradients on the device are not part of the state, and end here.
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
    """The specs of the buffers of all gradients; those in host memory are part of the state."""
    return {**learner.gradient_specs(), **layout.specs.get("gradient", {})}


class _Gradients(NamedTuple):
    """What a step's backward pass hands on.

    Attributes:
      loss: f32 scalar, of the whole batch.
      out: metrics of the whole batch, and the buffers as it leaves them.
      norm: f32 scalar, of all gradients together.
      work: the gradients, as "gradient", and the groups of the state that the backward pass carries.
    """

    loss: jax.Array
    out: Out
    norm: jax.Array
    work: Work


class _Microbatch(NamedTuple):
    """One microbatch: its arrays, the rows' numbers in the global batch, and its own number, int32."""

    batch: Nested
    rows: jax.Array | None
    number: jax.Array


class _PartResult(NamedTuple):
    """What one microbatch adds to a step: its loss and metrics, and the squares' sum of the gradients so far."""

    loss: jax.Array
    metrics: Metrics
    squares: jax.Array


class _AddedLeaf(NamedTuple):
    """A gradient, summed with those of earlier microbatches, and the buffer that has it."""

    grad: jax.Array
    buffer: jax.Array


@dataclass(frozen=True)
class _BackwardPass:
    """Takes gradients a unit at a time, into their buffers, summed over the learner's microbatches."""

    model: Chain
    learner: Learner
    layout: StateLayout
    memory: Memory

    def __call__(self, state: State, ctx: Context) -> _Gradients:
        """Takes the gradients of ctx.batch."""
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
            # Each microbatch measures the sum so far, and the last one all of it.
            squares = results.squares[-1]
        out = Out(metrics=metrics, layer_state=layer_state)
        return _Gradients(loss, out, jnp.sqrt(squares), work)

    def _part(
        self,
        ctx: Context,
        carry: tuple[Work, Nested],
        micro: _Microbatch,
    ) -> tuple[tuple[Work, Nested], _PartResult]:
        """Adds one microbatch's gradients to those of earlier ones, and measures the sum."""
        work, buffers = carry
        micro_ctx = replace(ctx, batch=micro.batch, rows=micro.rows)
        loss, out, pull = forward(self.model, self.layout, self.memory, work, micro_ctx, buffers)
        work = pull({**work, "squares": jnp.zeros_like(loss)}, self._visit(micro.number))
        # The carry of the scan has no squares: each microbatch begins its own sum.
        squares = work.pop("squares")
        return (work, out.layer_state), _PartResult(loss, out.metrics, squares)

    def _visit(self, number: jax.Array) -> Visit:
        """What adds a unit's gradients to their buffers, for the microbatch of that number."""
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
            # The sum of squares of the whole is that of its parts, so no pass over all gradients is needed.
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
        """Adds a gradient to its buffer, of a stack at the unit's index.

        Args:
            spec: the buffer's.
            buffer: the sum of the microbatches so far; in the first one, what the last step left there.
            grad: of this microbatch.
            number: the microbatch's.
            index: the unit's; None outside of stacks.
        """
        grad = grad.astype(spec.dtype)
        if self.learner.accumulate > 1:
            stored_sum = buffer if index is None else unit_at(buffer, index)
            stored_sum = fetch_leaf(spec, stored_sum)
            # Buffers are not cleared between steps: the first microbatch takes zero for what they hold.
            grad = grad + jnp.where(number == 0, jnp.zeros_like(stored_sum), stored_sum)
        if index is not None:
            return _AddedLeaf(grad, with_unit(buffer, store_leaf(spec, grad), index))
        shard_rows = self.layout.sharding(spec).shard_shape(spec.shape)[0]
        has_halves = shard_rows >= max(2, spec.shape[0])
        if spec.memory_kind == "device" or not has_halves:
            return _AddedLeaf(grad, store_leaf(spec, grad))
        # In two parts, by an index that is no constant: written at once it would be a new array beside the old.
        start, _ = jax.lax.optimization_barrier((jnp.int32(0), grad))
        # A table is no stack of units, so its rows are halved.
        half = grad.shape[0] // 2
        for first_row, rows in ((start, grad[:half]), (start + half, grad[half:])):
            buffer = jax.lax.dynamic_update_slice_in_dim(buffer, store_leaf(spec, rows), first_row, 0)
        return _AddedLeaf(grad, buffer)
