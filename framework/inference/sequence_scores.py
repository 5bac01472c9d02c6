"""Scores of whole sequences by a model with a score head: rewards or class logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.inference.generation import InferenceForward, bucket
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.layout import Nested, TrainState
from plimsoll.framework.program.program import Program


class SequenceScorer:
    """Scores sequences; keep the instance to reuse its compiled function.

    Args:
        program: program of the experiment on its mesh; data.seq_len is the maximum length of a sequence.
        state: state with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages of the weights.
        batch_size: number of rows to score at a time, rounded up to a multiple of the mesh's batch shards.

    Raises:
        ValueError: the model has no score head.
    """

    def __init__(self, program: Program, state: TrainState, *, averaged: bool = False, batch_size: int = 8):
        # The property raises ValueError if the model has no score head.
        _ = program.experiment.language_model.score_head
        weights = program.weights(state, averaged=averaged)
        self._arrays = (weights, state.buffer)
        self.seq_len = program.experiment.data.seq_len
        shards = batch_shards(program.mesh.shape)
        # The number of rows must be a multiple of the batch shards.
        self._rows = -(-batch_size // shards) * shards
        score = functools.partial(_score, InferenceForward(program, weights))
        self._score = program.jit(score, out_shardings=program.replicated)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        """Yield the scores of each sequence, float32[C]. Sequences must not be empty, and are truncated to seq_len.

        Scores are read at the last token, like transformers, which reads them at the last non-padding token.
        """
        for offset in range(0, len(sequences), self._rows):
            group = [list(tokens)[: self.seq_len] for tokens in sequences[offset : offset + self._rows]]
            # Round to one of a few lengths, because each length needs its own program.
            length = min(bucket(max(map(len, group))), self.seq_len)
            tokens_BS = np.zeros((self._rows, length), np.int32)
            weights_BS = np.zeros((self._rows, length), np.float32)
            last_B = np.zeros(self._rows, np.int32)
            for row, tokens in enumerate(group):
                # Padding follows the sequence, which does not attend to it.
                tokens_BS[row, : len(tokens)] = tokens
                weights_BS[row, : len(tokens)] = 1.0
                last_B[row] = len(tokens) - 1
            batch = {"tokens": tokens_BS, "targets": np.zeros_like(tokens_BS), "weights": weights_BS}
            scores_BC = jax.device_get(self._score(self._arrays, batch, last_B))
            yield from scores_BC[: len(group)]


def _score(forward: InferenceForward, arrays: Any, batch: Nested, last_B: jax.Array) -> jax.Array:
    """Compute the scores at the last token of each row, [B, C]."""
    ctx = forward.program.evaluation_context(batch)
    x_BSD, weights, _ = forward(arrays, ctx)
    scores_BSC = forward.model.score_head.scores(weights, x_BSD, ctx)
    return jnp.take_along_axis(scores_BSC, last_B[:, None, None], axis=1)[:, 0]
