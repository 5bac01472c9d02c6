"""The plain schedule: the whole backward pass, then the whole update.

All gradients are on the device at once; optimizer state is where the layout says, and host leaves are moved whole.
May import: framework.layout, framework.learner, framework.models, framework.layers.base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.layers.base import BATCH_AXES, Context, Out
from framework.layout import Nested, StateLayout, merge
from framework.learner import Decision, Learner
from framework.models.causal_lm import CausalLM

State = dict[str, Any]
Metrics = dict[str, jax.Array]
Update = tuple[Nested, Nested, Nested]  # parameters, optimizer state, averages
Step = Callable[[State, Nested], tuple[State, Metrics]]


def update_whole(learner: Learner, layout: StateLayout, state: State, grads: Nested, decision: Decision) -> Update:
    """All units at once, and all of the state on the device for it."""
    optimizer = layout.fetch("optimizer", state["optimizer"])
    params, optimizer, ema = learner.update(state["parameter"], grads, optimizer, state["ema"], decision)
    return params, layout.store("optimizer", optimizer), ema


def build_step(
    model: CausalLM,
    learner: Learner,
    layout: StateLayout,
    *,
    remat: str,
    update: Callable[[Learner, StateLayout, State, Nested, Decision], Update] = update_whole,
) -> Step:
    """The training step, to be jitted with the layout's shardings and a donated state.

    Args:
        model, learner, layout: whose step.
        remat: what the backward pass recomputes.
        update: (learner, layout, state, gradients, decision) -> new parameters, optimizer state (where the layout has
            it) and averages.

    Returns:
        step(state, batch) -> (state, metrics): metrics are f32 scalars; "loss" is the mean over counted targets.
    """

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        counter = state["counter"]
        ctx = training_context(batch, counter, model, layout, remat)
        (loss, out), grads = accumulated_gradients(model, learner, state, ctx)
        with jax.named_scope("update"):
            decision = learner.decide(loss, grads)
            params, optimizer, ema = update(learner, layout, state, grads, decision)
        new_state = {
            "parameter": params,
            "frozen": state["frozen"],
            "buffer": jax.tree.map(lambda new, old: jnp.where(decision.ok, new, old), out.layer_state, state["buffer"]),
            "optimizer": optimizer,
            "ema": ema,
            "counter": {
                **counter,
                "step": counter["step"] + 1,
                "skipped": counter["skipped"] + jnp.where(decision.ok, 0, 1),
            },
        }
        metrics = {"loss": loss, **out.metrics, "grad_norm": decision.norm, "skipped": 1.0 - decision.ok}
        if learner.learning_rate is not None:
            metrics["learning_rate"] = learner.learning_rate(counter["step"] - counter["skipped"])
        return new_state, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}

    return step


def training_context(batch: Nested, counter: Nested, model: CausalLM, layout: StateLayout, remat: str) -> Context:
    """The context of one step: its key is the run's, folded by the step; rows are numbered in the global batch."""
    key = jax.random.wrap_key_data(counter["rng"])
    return Context(
        batch=batch,
        rng=jax.random.fold_in(key, counter["step"]),
        rows=jnp.arange(batch["tokens"].shape[0]),
        num_targets=jnp.maximum(jnp.sum(batch["weights"]), 1.0),
        training=True,
        mesh=layout.mesh,
        compute_dtype=model.compute_dtype,
        remat=remat,
    )


def accumulated_gradients(
    model: CausalLM, learner: Learner, state: State, ctx: Context
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


def microbatches(batch: Any, count: int, ctx: Context) -> Any:
    """Arrays [B, ...] as [count, B / count, ...]. Strided: each device keeps its own rows, and every microbatch holds
    an equal part of them."""

    def split(x: jax.Array) -> jax.Array:
        parts = jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
        return ctx.constrain(parts, None, BATCH_AXES, *(None,) * (parts.ndim - 2))

    return jax.tree.map(split, batch)
