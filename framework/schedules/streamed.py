"""The update goes through the model a piece at a time: of what lives in host memory only one piece (and the next one,
on its way) is on the device.

Gradients are either taken as in after_backward, or, where weights, gradients or activations are in host memory, a unit
at a time: each is written into its buffer as the backward pass makes it, and their norm is summed on the way. In both
cases the norm is known before anything is updated, so clipping and skipping are exact, with one backward pass. Buffers
in host memory are a group of the state: donated, written in place, and not part of a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.layers.base import Context, Out
from framework.layout import Nested, StateLayout, fetch_leaf, store_leaf
from framework.learner.learner import Learner
from framework.learner.units import Bundle, Decision, Group, UnitUpdate, Update, unit_at, with_unit
from framework.models.chain import Chain
from framework.schedules import after_backward
from framework.schedules.backward import Work, forward
from framework.schedules.memory import Memory
from framework.schedules.pieces import update_group
from framework.schedules.step import Metrics, State, Step, finish, microbatches, training_context


def update_streamed(learner: Learner, layout: StateLayout, state: State, grads: Nested, decision: Decision) -> Update:
    """As `update_whole`, with the same results. Gradients are where the layout has them (else on the device)."""
    where = _gradient_specs(learner, layout)

    def run(group: Group, update: UnitUpdate, bundle: Bundle, decision: Decision) -> Update:
        own = bundle_specs(layout, learner, group, learner.select(where, group))
        return update_group(learner, layout.mesh, group, bundle, own, decision)

    return learner.update(state["parameter"], grads, state["optimizer"], state["ema"], decision, run)


def bundle_specs(layout: StateLayout, learner: Learner, group: Group, gradients: Nested) -> Bundle:
    """The specs of a group's weights, gradients (as given), optimizer state and averages."""
    specs = layout.specs
    average = learner.select(specs["ema"], group) if specs["ema"] else {}
    return learner.select(specs["parameter"], group), gradients, specs["optimizer"][group.stage][group.label], average


def check(layout: StateLayout, memory: Memory, platform: str) -> None:
    """Raises ValueError when loops would take slices of host memory of GPUs: their compiler cannot."""
    hosted = any(leaf.spec.memory_kind != "device" for leaf in layout) or memory.activations != "device"
    if hosted and platform == "gpu":
        names = ("parameters", "gradients", "optimizer_state", "activations")
        away = [f"memory.{name} = pinned_host" for name in names if getattr(memory, name) == "pinned_host"]
        raise ValueError(
            f"memory.update = {memory.update} with {', '.join(away) or 'state in host memory'}: XLA's GPU compiler "
            "cannot slice host memory inside a program; on GPU expected memory.update = layer_programs"
        )


def build_step(model: Chain, learner: Learner, layout: StateLayout, memory: Memory) -> Step:
    """The training step; see `after_backward.build_step`, and `check` for what is raised."""
    check(layout, memory, layout.mesh.devices.flat[0].platform)
    groups = {leaf.group for leaf in layout if leaf.spec.memory_kind != "device"}
    if memory.gradients == "device" == memory.activations and not groups & {"parameter", "frozen"}:
        return after_backward.build_step(model, learner, layout, memory, update=update_streamed)

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        ctx = training_context(batch, state["counter"], model, layout, memory.remat)
        loss, out, norm, changed = _gradients(model, learner, layout, memory, state, ctx)
        grads = changed["gradient"]
        with jax.named_scope("update"):
            decision = learner.decide(loss, norm, state["counter"])
            update = update_streamed(learner, layout, {**state, **changed}, grads, decision)
        changed = {group: tree for group, tree in changed.items() if group in state}
        return finish(learner, state, update, decision, loss, out, **changed)

    return step


def _gradient_specs(learner: Learner, layout: StateLayout) -> Nested:
    return layout.specs.get("gradient") or learner.gradient_specs("device")


def _gradients(
    model: Chain, learner: Learner, layout: StateLayout, memory: Memory, state: State, ctx: Context
) -> tuple[jax.Array, Out, jax.Array, State]:
    """(loss, out, the gradients' norm, {"gradient", and the groups that the backward pass carries}), a unit at a time,
    summed over the learner's microbatches."""
    specs, count = _gradient_specs(learner, layout), learner.accumulate
    buffers = state.get("gradient") or jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)

    def part(carry: tuple[State, Nested], micro: tuple[Any, jax.Array]) -> Any:
        """One microbatch: its gradients are added to those before it; after the last, the sum is measured."""
        work, buffers = carry
        (rows_batch, rows), number = micro

        def visit(work: Work, stage: str, grads: Nested, index: jax.Array | None) -> Work:
            def add(spec: Any, buffer: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
                grad = grad.astype(spec.dtype)
                if count > 1:
                    before = fetch_leaf(spec, buffer if index is None else unit_at(buffer, index))
                    grad = grad + jnp.where(number == 0, jnp.zeros_like(before), before)
                if index is not None:
                    return grad, with_unit(buffer, store_leaf(spec, grad), index)
                rows = layout.sharding(spec).shard_shape(spec.shape)[0]
                if spec.memory_kind == "device" or rows < max(2, spec.shape[0]):
                    return grad, store_leaf(spec, grad)
                # In two parts, by an index that is no constant: written at once it would be a new array beside the old.
                start, half = jax.lax.optimization_barrier((jnp.int32(0), grad))[0], grad.shape[0] // 2
                for first, rows in ((start, grad[:half]), (start + half, grad[half:])):
                    buffer = jax.lax.dynamic_update_slice_in_dim(buffer, store_leaf(spec, rows), first, 0)
                return grad, buffer

            with jax.named_scope("gradient"):
                both = jax.tree.map(add, specs[stage], work["gradient"][stage], grads)
                sums, new = (jax.tree.map(lambda _, pair, i=i: pair[i], specs[stage], both) for i in (0, 1))
                squares = work["squares"] + jnp.square(learner.norm(sums))
            return {**work, "gradient": {**work["gradient"], stage: new}, "squares": squares}

        own = replace(ctx, batch=rows_batch, rows=rows)
        loss, out, pull = forward(model, layout, memory, work, own, buffers)
        work = pull({**work, "squares": jnp.zeros_like(loss)}, visit)
        squares = work.pop("squares")
        return (work, out.layer_state), (loss, out.metrics, squares)

    carry = {**{group: state[group] for group in ("parameter", "frozen")}, "gradient": buffers}, state["buffer"]
    micro = (ctx.batch, ctx.rows)
    if count == 1:
        (work, layer_state), (loss, metrics, squares) = part(carry, (micro, jnp.int32(0)))
    else:
        parts = microbatches(micro, count, ctx), jnp.arange(count)
        (work, layer_state), (losses, metrics, sums) = jax.lax.scan(part, carry, parts)
        (loss, metrics), squares = jax.tree.map(jnp.sum, (losses, metrics)), sums[-1]
    return loss, Out(metrics=metrics, layer_state=layer_state), jnp.sqrt(squares), work
