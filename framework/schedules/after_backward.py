"""The plain schedule: the whole backward pass, then the whole update.

All gradients are on the device at once. Optimizer state is in the memory that the layout assigns to it, and offloaded
leaves are fetched whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import LAYER_AXIS, Context, Out
from plimsoll.framework.layout import Nested, StateLayout, TrainState, merge
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.update import LayerUpdate
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules import pipeline
from plimsoll.framework.schedules.memory import Memory
from plimsoll.framework.schedules.step import Metrics, Step, finish, microbatches, training_context


def update_whole(
    learner: Learner, layout: StateLayout, state: TrainState, grads: Nested, decision: Decision
) -> LayerUpdate:
    """Update all layers at once, after fetching all of the state to the device.

    Args:
        learner, layout: the learner, and the layout of the training state.
        state: the training state before the step.
        grads: gradients of all trainable parameters, on the device.
        decision: see `Learner.decide`.
    """
    optimizer = layout.fetch("optimizer", state.optimizer)
    ema = layout.fetch("ema", state.ema)
    new = learner.update(state.parameter, grads, optimizer, ema, decision)
    new_optimizer = layout.store("optimizer", new.entry)
    new_ema = layout.store("ema", new.average)
    return LayerUpdate(new.weights, new_optimizer, new_ema)


def build_step(
    model: Chain,
    learner: Learner,
    layout: StateLayout,
    memory: Memory,
    *,
    update: Callable[[Learner, StateLayout, TrainState, Nested, Decision], LayerUpdate] = update_whole,
    pipe_chunks: int = 1,
) -> Step:
    """Return the training step, to be jitted with the layout's shardings and a donated state.

    Args:
        model, learner, layout: the model, the learner, and the layout of the training state.
        memory: placement of the state, and what the backward pass recomputes.
        update: (learner, layout, state, gradients, decision) -> new parameters, optimizer state (placed as in the
            layout) and averages.
        pipe_chunks: mesh.pipe_chunks, if the mesh has several devices along pipe.

    Returns:
        step(state, batch) -> (state, metrics): metrics are f32 scalars; "loss" is the mean over counted targets.
    """

    def step(state: TrainState, batch: Nested) -> tuple[TrainState, Metrics]:
        ctx = training_context(batch, state.counter, model, layout, memory.remat)
        if layout.mesh.shape[LAYER_AXIS] > 1:
            (loss, out), grads = pipeline.accumulate_gradients(model, learner, state, ctx, chunks=pipe_chunks)
        else:
            (loss, out), grads = accumulate_gradients(model, learner, state, ctx)
        with jax.named_scope("update"):
            norm = learner.norm(grads)
            decision = learner.decide(loss, norm, state.counter)
            new = update(learner, layout, state, grads, decision)
        return finish(learner, state, new, decision, loss, out)

    return step


def accumulate_gradients(
    model: Chain, learner: Learner, state: TrainState, ctx: Context
) -> tuple[tuple[jax.Array, Out], Nested]:
    """Return ((loss, out), gradients of the trainable parameters), summed over the learner's microbatches.

    Frozen parameters are not an argument of the differentiated function, so they cost neither gradients nor
    residuals.

    Args:
        model, learner: the model, and the learner.
        state: the training state before the step.
        ctx: the context of the global batch.
    """
    frozen = model.unstack_layers(state.frozen, ctx.remat)

    def compute_loss(params: Nested, ctx: Context, buffers: Nested) -> tuple[jax.Array, Out]:
        return model.loss(merge(params, frozen), ctx, buffers)

    loss_and_grad = jax.value_and_grad(compute_loss, has_aux=True)

    def compute_grads(params: Nested, ctx: Context, buffers: Nested) -> tuple[tuple[jax.Array, Out], Nested]:
        # The layers of an unrolled stack are separate arguments: the gradient of a slice of a stack would be a full
        # stack of zeros except for that slice, once for each layer.
        results, grads = loss_and_grad(model.unstack_layers(params, ctx.remat), ctx, buffers)
        return results, model.stack_layers(grads)

    count = learner.accumulate
    if count == 1:
        return compute_grads(state.parameter, ctx, state.buffer)

    def body(
        carry: tuple[Nested, Nested], micro: tuple[Nested, jax.Array]
    ) -> tuple[tuple[Nested, Nested], tuple[jax.Array, Metrics]]:
        grad_sums, buffers = carry
        batch, rows = micro
        micro_ctx = replace(ctx, batch=batch, rows=rows)
        (loss, out), grads = compute_grads(state.parameter, micro_ctx, buffers)
        # The scope names these sums in profiles and plans.
        with jax.named_scope("gradient"):
            grad_sums = jax.tree.map(jnp.add, grad_sums, grads)
        return (grad_sums, out.layer_state), (loss, out.metrics)

    assert ctx.rows is not None
    # Sums are in the update's dtype, at least float32: adding in bfloat16 would lose small gradients.
    zeros = jax.tree.map(
        lambda p, spec: jnp.zeros(p.shape, learner.gradient_dtype(spec)), state.parameter, learner.specs
    )
    carry = zeros, state.buffer
    micro = microbatches((ctx.batch, ctx.rows), count, ctx)
    (grads, buffers), (losses, metrics) = jax.lax.scan(body, carry, micro)
    summed_metrics = {name: jnp.sum(values) for name, values in metrics.items()}
    out = Out(metrics=summed_metrics, layer_state=buffers)
    return (jnp.sum(losses), out), grads
