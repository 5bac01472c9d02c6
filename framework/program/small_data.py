"""Reduces the batch of a run whose training data has fewer rows than one batch."""

from __future__ import annotations

import math

from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.program.experiment import Experiment


def fit_batch_to_data(config: Config, experiment: Experiment, mesh: Mesh | AbstractMesh) -> list[str]:
    """Reduce the global batch to the rows of the data, in place, if the data has fewer rows than a batch.

    The new batch is the largest one that microbatches and shards divide. If even one row per shard and microbatch is
    too much, there are fewer microbatches.

    Args:
        config: config of the run; data.global_batch_size and learner.accumulate may change.
        experiment: its experiment; its data is set up, and `global_batch_size` of it may change. Build the experiment
            again if there are lines.
        mesh: the mesh of the run.

    Returns:
        Lines to show to the user; [] if nothing changes.

    Raises:
        ValueError: the data has fewer rows than the mesh has shards of a batch.
    """
    data = experiment.data
    num_rows = data.num_rows
    old_batch = data.global_batch_size
    if num_rows >= old_batch:
        return []
    shards = batch_shards(mesh.shape)
    old_accumulate = experiment.learner.accumulate
    if num_rows < shards:
        raise ValueError(
            f"data.source: has {num_rows} rows of data.seq_len={data.seq_len}, too few for one batch: "
            f"mesh.data * mesh.fsdp (* mesh.expert) = {shards} needs {shards}; add data, or reduce these"
        )
    if num_rows < data.batch_multiple:
        raise ValueError(
            f"data.source: has {num_rows} rows of data.seq_len={data.seq_len}, too few for one batch, which needs "
            f"{data.batch_multiple}; add data, or reduce the lengths of data.stages"
        )
    divisors = [number for number in range(old_accumulate, 0, -1) if old_accumulate % number == 0]
    steps = {number: math.lcm(number * shards, data.batch_multiple) for number in divisors}
    fitting = [number for number in divisors if steps[number] <= num_rows]
    if not fitting:
        raise ValueError(
            f"data.source: has {num_rows} rows of data.seq_len={data.seq_len}, too few for one batch, which is a "
            f"multiple of {steps[1]} (mesh, data); add data, or reduce mesh.data * mesh.fsdp"
        )
    accumulate = fitting[0]
    step = steps[accumulate]
    # No microbatch may be larger than before, because it would need more memory.
    largest = min(num_rows, old_batch // old_accumulate * accumulate)
    batch = max(step, largest // step * step)
    data.global_batch_size = batch
    config.data.global_batch_size = batch
    reason = f"the training data has {num_rows:,} rows of data.seq_len = {data.seq_len}"
    if batch < num_rows:
        of = "mesh, learner.accumulate" if data.batch_multiple == 1 else "mesh, learner.accumulate, data"
        reason += f", and a batch is a multiple of {step} ({of})"
    lines = [f"data.global_batch_size {old_batch:,} -> {batch:,}: {reason}"]
    if accumulate != old_accumulate:
        config.learner.accumulate = accumulate
        lines.append(f"learner.accumulate {old_accumulate} -> {accumulate}: the batch has fewer microbatches")
    return lines
