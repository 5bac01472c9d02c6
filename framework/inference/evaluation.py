"""Evaluation on held-out data in global batches, for a run between its steps and for `evaluate --validation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from plimsoll.framework.data.batches import Pipeline
from plimsoll.framework.layout import TrainState
from plimsoll.framework.metrics.throughput import MetricsBuffer
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import phase


def evaluate_set(
    program: Program,
    state: TrainState,
    name: str,
    *,
    limit: int | None = None,
    averaged: bool = False,
    should_continue: Callable[[], bool] = lambda: True,
) -> dict[str, float] | None:
    """Evaluate one validation set.

    Args:
        program: program of the experiment on its mesh; its data must be set up.
        state: state with the groups parameter (or ema), frozen and buffer.
        name: name of the validation set.
        limit: maximum number of batches, as in `Pipeline.eval_batch_numbers`.
        averaged: use the moving averages of the weights.
        should_continue: called after each batch; the evaluation stops when it returns False.

    Returns:
        The model's summary of its sums over the set, which includes "loss"; None if the evaluation was stopped.
    """
    data = program.experiment.data
    num_batches = len(data.eval_batch_numbers(name, limit))
    buffer = MetricsBuffer()
    totals: Counter[str] = Counter()
    weights = " with averaged weights" if averaged else ""
    with phase(f"evaluating {name}{weights}") as evaluating, data.eval_batches(name, program.rows, limit) as batches:
        for number, batch in enumerate(batches):
            evaluating.progress(number, num_batches)
            # No variable refers to the batch on the device, so it is freed before the next one is loaded.
            batch_sums = program.evaluate(state, program.put(batch), averaged=averaged)
            buffer.put(number, batch_sums)
            if not should_continue():
                return None
            # Fetch one batch late: the device always has work, and memory stays bounded.
            for _, sums in buffer.take(keep=1):
                totals.update(sums)
        for _, sums in buffer.take(keep=0):
            totals.update(sums)
    return program.experiment.model.summary(dict(totals))


def describe_share(data: Pipeline, name: str, limit: int | None) -> str:
    """Describe the part of a validation set that is evaluated, such as "20 of 106 batches"; "" for all of it."""
    num_batches = len(data.eval_batch_numbers(name))
    num_taken = len(data.eval_batch_numbers(name, limit))
    return f"{num_taken} of {num_batches} batches" if num_taken < num_batches else ""
