"""Evaluation of held-out data in global batches: by a run between its steps, and by `evaluate --validation` later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from framework.data.batches import Pipeline
from framework.metrics.throughput import MetricsBuffer
from framework.program.program import Program
from framework.terminal.phases import phase


def evaluated(
    program: Program,
    state: dict[str, Any],
    name: str,
    *,
    limit: int | None = None,
    averaged: bool = False,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, float] | None:
    """The model's summary of its sums over one validation set, "loss" among them; None if it was to stop.

    Args:
        program: the experiment on its mesh; its data is set up.
        state: with the groups parameter (or ema), frozen and buffer.
        name: the validation set.
        limit: as in `Pipeline.eval_batch_numbers`.
        averaged: use the moving averages.
        goes_on: asked after each batch.
    """
    data = program.experiment.data
    num_batches = len(data.eval_batch_numbers(name, limit))
    buffer = MetricsBuffer()
    totals: Counter[str] = Counter()
    weights = " with averaged weights" if averaged else ""
    with phase(f"evaluating {name}{weights}") as evaluating, data.eval_batches(name, program.rows, limit) as batches:
        for number, batch in enumerate(batches):
            evaluating.progress(number, num_batches)
            # The batch on the device has no name here, so that it goes before the next one comes.
            batch_sums = program.evaluate(state, program.put(batch), averaged=averaged)
            buffer.put(number, batch_sums)
            if not goes_on():
                return None
            # One batch behind: the device always has work, and memory is bounded.
            for _, sums in buffer.take(keep=1):
                totals.update(sums)
        for _, sums in buffer.take(keep=0):
            totals.update(sums)
    return program.experiment.model.summary(dict(totals))


def share_of(data: Pipeline, name: str, limit: int | None) -> str:
    """How much of a validation set an evaluation takes, such as "20 of 106 batches"; "" for all of it."""
    num_batches = len(data.eval_batch_numbers(name))
    num_taken = len(data.eval_batch_numbers(name, limit))
    return f"{num_taken} of {num_batches} batches" if num_taken < num_batches else ""
