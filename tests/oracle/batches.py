"""Batches of random experiments: tokens, packed documents and padding, rows without targets, a step with NaN."""

from __future__ import annotations

import numpy as np

from tests.oracle.experiments import RandomExperiment


def host_batch(drawn: RandomExperiment, step: int) -> dict[str, np.ndarray]:
    """Return the global batch of a step: arrays [B, S] as from a DataPipeline."""
    data = drawn.data
    shape = (data.batch, data.seq_len)
    rng = np.random.default_rng([drawn.seed, step])
    stream = rng.integers(0, drawn.model.vocab, (data.batch, data.seq_len + 1)).astype(np.int32)
    weights = (rng.random(shape) < 0.8).astype(np.float32)
    if data.fractions:
        # Sums of these are exact in float32, and so is division by multiplying with the reciprocal.
        weights *= rng.choice(np.array([0.25, 0.5, 1.0], np.float32), shape)
    batch = {"tokens": stream[:, :-1], "targets": stream[:, 1:]}
    if data.documents:
        batch |= _documents(rng, *shape)
        weights *= batch["segments"] > 0
    for empty_step, count, index in data.empty:
        if step == empty_step:
            weights[index::count] = 0.0
    if step == data.poisoned:
        weights = weights * np.float32(np.nan)
    return {**batch, "weights": weights}


def _documents(rng: np.random.Generator, batch: int, length: int) -> dict[str, np.ndarray]:
    """Return segments 1, 2, ... of a few positions each, followed by padding (0); a row may be only padding."""
    segments, positions = np.zeros((2, batch, length), np.int32)
    for row in range(batch):
        used = int(rng.integers(length // 2, length + 1)) if rng.random() < 0.9 else 0
        start, number = 0, 1
        while start < used:
            end = min(used, start + int(rng.integers(1, length)))
            segments[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
            start, number = end, number + 1
    return {"segments": segments, "positions": positions}
