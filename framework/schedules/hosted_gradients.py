"""Each gradient goes to the host as the backward pass makes it; their norm is summed on the way.

So gradients take one unit's memory on the device, and the norm is still known before anything is updated: clipping and
skipping are exact, with one backward pass. The update then streams gradients and state back, a piece at a time. The
host buffers are a group of the state: donated, written in place, and not part of a checkpoint.

May import: framework.layout, framework.learner, framework.models, framework.schedules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.layers.base import Out
from framework.layout import Nested, StateLayout, fetch_leaf, store_leaf
from framework.learner import Learner
from framework.models.causal_lm import CausalLM
from framework.schedules.backward import Work, forward
from framework.schedules.step import Metrics, State, Step, finish, microbatches, training_context
from framework.schedules.streamed import check, update_streamed


def build_step(model: CausalLM, learner: Learner, layout: StateLayout, *, remat: str) -> Step:
    """The training step; see `after_backward.build_step`, and `streamed.check` for what is raised."""
    check(layout, layout.mesh.devices.flat[0].platform)
    specs, count = layout.specs["gradient"], learner.accumulate

    def step(state: State, batch: Nested) -> tuple[State, Metrics]:
        ctx = training_context(batch, state["counter"], model, layout, remat)

        def part(carry: tuple[Nested, Nested, Nested], micro: tuple[Any, jax.Array]) -> Any:
            """One microbatch: its gradients are added to what is on the host; after the last, the sum is measured."""
            weights, gradient, buffers = carry
            (rows_batch, rows), number = micro
            own = replace(ctx, batch=rows_batch, rows=rows)

            def visit(work: Work, stage: str, grads: Nested, index: jax.Array | None) -> Work:
                def add(spec: Any, buffer: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
                    grad = grad.astype(spec.dtype)
                    if count > 1:
                        before = fetch_leaf(spec, buffer if index is None else _take(buffer, index))
                        grad = grad + jnp.where(number == 0, jnp.zeros_like(before), before)
                    new = store_leaf(spec, grad)
                    return grad, new if index is None else jax.lax.dynamic_update_index_in_dim(buffer, new, index, 0)

                with jax.named_scope("gradient"):
                    both = jax.tree.map(add, specs[stage], work["gradient"][stage], grads)
                    sums, new = (jax.tree.map(lambda _, pair, i=i: pair[i], specs[stage], both) for i in (0, 1))
                    squares = work["squares"] + jnp.square(learner.norm(sums))
                return {**work, "gradient": {**work["gradient"], stage: new}, "squares": squares}

            loss, out, work, pull = forward(model, weights["parameter"], weights["frozen"], own, buffers)
            work = pull({**work, "gradient": gradient, "squares": jnp.zeros_like(loss)}, visit)
            weights = {group: work[group] for group in weights}
            return (weights, work["gradient"], out.layer_state), (loss, out.metrics, work["squares"])

        micro = (ctx.batch, ctx.rows)
        carry = {group: state[group] for group in ("parameter", "frozen")}, state["gradient"], state["buffer"]
        if count == 1:
            carry, sums = part(carry, (micro, jnp.int32(0)))
        else:
            parts = microbatches(micro, count, ctx), jnp.arange(count)
            carry, sums = jax.lax.scan(part, carry, parts)
            sums = *jax.tree.map(jnp.sum, sums[:2]), sums[2][-1]
        (weights, grads, buffers), (loss, metrics, squares) = carry, sums
        with jax.named_scope("update"):
            decision = learner.decide(loss, jnp.sqrt(squares), state["counter"])
            update = update_streamed(learner, layout, {**state, **weights}, grads, decision)
        out = Out(metrics=metrics, layer_state=buffers)
        return finish(learner, state, update, decision, loss, out, frozen=weights["frozen"], gradient=grads)

    return step


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
