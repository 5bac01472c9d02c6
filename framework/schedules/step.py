"""Building blocks of every schedule's training step: contexts, microbatches, and the state and metrics after a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import BATCH_AXES, Context, Out
from plimsoll.framework.layout import Nested, StateLayout, TrainState
from plimsoll.framework.learner.decisions import Decision
from plimsoll.framework.learner.learner import Learner
from plimsoll.framework.learner.rules import DEFAULT
from plimsoll.framework.learner.update import LayerUpdate
from plimsoll.framework.models.chain import Chain

Metrics = dict[str, jax.Array]
Batch = TypeVar("Batch")  # arrays [B, ...] in any tree
Step = Callable[[TrainState, Nested], tuple[TrainState, Metrics]]


def training_context(batch: Nested, counter: Nested, model: Chain, layout: StateLayout, remat: str) -> Context:
    """Return the context of one training step.

    The step's key is the run's key folded with the step number. Rows are numbered within the global batch.

    Args:
        batch: arrays of the global batch.
        counter: the state's counters.
        model, layout: the model, and the layout of the training state.
        remat: the remat policy of stages that have none of their own.
    """
    run_key = jax.random.wrap_key_data(counter["rng"])
    step_key = jax.random.fold_in(run_key, counter["step"])
    rows = jnp.arange(batch["weights"].shape[0])
    counted_targets = jnp.sum(batch["weights"])
    num_sequences = None
    if "ends" in batch:
        num_sequences = jnp.maximum(jnp.sum(batch["ends"]), 1.0)
    counts = {name: jnp.maximum(count, 1.0) for name, count in model.counts(batch).items()}
    return Context(
        batch=batch,
        rng=step_key,
        rows=rows,
        # Clamped to 1, so that a batch without counted targets has loss zero, not NaN.
        num_targets=jnp.maximum(counted_targets, 1.0),
        num_sequences=num_sequences,
        counts=counts,
        training=True,
        mesh=layout.mesh,
        compute_dtype=model.compute_dtype,
        remat=remat,
    )


def evaluation_context(batch: Nested, model: Chain, layout: StateLayout) -> Context:
    """Return the context for anything but training: no dropout, sums instead of means."""
    return Context(
        batch=batch,
        num_targets=jnp.float32(1.0),
        num_sequences=jnp.float32(1.0),
        mesh=layout.mesh,
        compute_dtype=model.compute_dtype,
    )


def microbatches(batch: Batch, count: int, ctx: Context) -> Batch:
    """Split arrays [B, ...] into [count, B / count, ...].

    The split is strided: each device keeps its own rows, and every microbatch holds an equal share of them.

    Args:
        batch: arrays [B, ...] in any tree.
        count: number of microbatches.
        ctx: a context with the mesh over which rows are sharded.
    """

    def split(x: jax.Array) -> jax.Array:
        part_rows = x.shape[0] // count
        parts = x.reshape(part_rows, count, *x.shape[1:])
        parts = jnp.moveaxis(parts, 1, 0)
        feature_axes = (None,) * (parts.ndim - 2)
        return ctx.constrain(parts, None, BATCH_AXES, *feature_axes)

    return jax.tree.map(split, batch)


def stack_microbatches(ctx: Context, count: int) -> Context:
    """Return the context of `count` microbatches: its batch and rows are [count, B / count, ...].

    A single microbatch has no leading axis.
    """
    if count == 1:
        return ctx
    batch, rows = microbatches((ctx.batch, ctx.rows), count, ctx)
    return replace(ctx, batch=batch, rows=rows)


def finish(
    learner: Learner,
    state: TrainState,
    update: LayerUpdate,
    decision: Decision,
    loss: jax.Array,
    out: Out,
    **changed: Nested,
) -> tuple[TrainState, Metrics]:
    """Return the new state and the metrics of a step after its update.

    Args:
        learner, state: the learner, and the state before the step.
        update: new parameters, optimizer state and averages.
        decision: the step's decision. If it is not ok, buffers keep their old values and the step counts as skipped.
        loss, out: loss and `Out` of the whole batch.
        changed: other groups of the state that have new values.
    """
    counter = state.counter
    ok = decision.ok
    # A skipped batch must not change the buffers either.
    buffers = jax.tree.map(lambda new, old: jnp.where(ok, new, old), out.layer_state, state.buffer)
    new_counter = {
        **counter,
        "step": counter["step"] + 1,
        "skipped": counter["skipped"] + jnp.where(ok, 0, 1),
        # A skipped step's norm may be NaN, and clip_mode = previous_norm would divide by it.
        "grad_norm": jnp.where(ok, decision.norm.astype(jnp.float32), counter["grad_norm"]),
        **learner.spikes.count_loss(counter, loss.astype(jnp.float32), ok),
    }
    new_state = replace(
        state,
        **changed,
        parameter=update.weights,
        optimizer=update.entry,
        ema=update.average,
        buffer=buffers,
        counter=new_counter,
    )
    metrics = {"loss": loss, **out.metrics, "grad_norm": decision.norm, "skipped": 1.0 - ok}
    for label, rate in learner.learning_rates.items():
        name = "learning_rate" if label == DEFAULT else f"learning_rate/{label}"
        metrics[name] = rate(decision.count)
    return new_state, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
