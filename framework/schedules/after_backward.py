"""The plain schedule: the whole backward pass, then the whole update.

All gradients are on the device at once; optimizer state is where the layout says, and host leaves are moved whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.layers.base import Context, Out
from framework.layout import Nested, StateLayout, merge
from framework.learner.learner import Learner
from framework.learner.units import Decision, Update
from framework.models.chain import Chain
from framework.schedules.memory import Memory
from framework.schedules.step import Metrics, State, Step, finish, microbatches, training_context


def update_whole(learner: Learner, layout: StateLayout, state: State, grads: Nested, decision: Decision) -> Update:
    """All units at once, and all of the state on the device for it."""
    optimizer = layout.fetch("optimizer", state["optimizer"])
    ema = layout.fetch("ema", state["ema"])
    params, optimizer, ema = learner.update(state["parameter"], grads, optimizer, ema, decision)
    return params, layout.store("optimizer", optimizer), layout.store("ema", ema)


def build_step(
    model: Chain,
    learner: Learner,
    layout: StateLayout,
    memory: Memory,
    *,
    update: Callable[[Learner, StateLayout, State, Nested, Decision], Update] = update_whole,
) -> Step:
    """The training step, to be jitted with the layout's shardings and a donated state.

    Args:
        model, learner, layout: whose step.
        memory: where things live, and what the backward pass recomputes.
        update: (learner, layout, state, gradients, decision) -> new parameters, optimizer state (where the layout has
            it) and averages.

    Returns:
        step(state, batch) -> (state, metrics): metrics are f32 scalars; "loss" is the mean over counted targets.
    """

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        ctx = training_context(batch, state["counter"], model, layout, memory.remat)
        (loss, out), grads = accumulated_gradients(model, learner, state, ctx)
        with jax.named_scope("update"):
            decision = learner.decide(loss, learner.norm(grads), state["counter"])
            new = update(learner, layout, state, grads, decision)
        return finish(learner, state, new, decision, loss, out)

    return step


def accumulated_gradients(
    model: Chain, learner: Learner, state: State, ctx: Context
) -> tuple[tuple[jax.Array, Out], Nested]:
    """((loss, out), gradients of the trainable parameters), summed over the learner's microbatches.

    Frozen parameters are no argument of the differentiated function, so they cost neither gradient nor residual.
    """

    frozen = model.split_units(state["frozen"], ctx.remat)

    def loss_of(params: Nested, ctx: Context, buffers: Nested) -> tuple[jax.Array, Out]:
        return model.loss(merge(params, frozen), ctx, buffers)

    def grad_of(params: Nested, ctx: Context, buffers: Nested) -> Any:
        results, grads = jax.value_and_grad(loss_of, has_aux=True)(model.split_units(params, ctx.remat), ctx, buffers)
        return results, model.join_units(grads)

    count = learner.accumulate
    if count == 1:
        return grad_of(state["parameter"], ctx, state["buffer"])

    def body(carry: Any, micro: tuple[Nested, jax.Array]) -> tuple[Any, tuple[jax.Array, Metrics]]:
        grads, buffers = carry
        batch, rows = micro
        (loss, out), more = grad_of(state["parameter"], replace(ctx, batch=batch, rows=rows), buffers)
        with jax.named_scope("gradient"):
            grads = jax.tree.map(jnp.add, grads, more)
        return (grads, out.layer_state), (loss, out.metrics)

    assert ctx.rows is not None
    zeros = jax.tree.map(
        lambda p, spec: jnp.zeros(p.shape, learner.gradient_dtype(spec)), state["parameter"], learner.specs
    )
    (grads, buffers), (losses, metrics) = jax.lax.scan(
        body, (zeros, state["buffer"]), microbatches((ctx.batch, ctx.rows), count, ctx)
    )
    out = Out(metrics={name: jnp.sum(values) for name, values in metrics.items()}, layer_state=buffers)
    return (jnp.sum(losses), out), grads
