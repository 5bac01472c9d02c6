"""Scores of whole sequences by a model with a score head: rewards, or logits of classes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from framework.inference.generation import Forward, bucket
from framework.layers.base import batch_shards
from framework.layout import Nested
from framework.program.program import Program


class SequenceScorer:
    """Scores sequences; keep it for as long as its compiled function is of use.

    Args:
        program: the experiment on its mesh; data.seq_len bounds a sequence.
        state: with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages.
        batch_size: rows at a time, rounded up to what the mesh divides.

    Raises:
        ValueError: the model has no score head.
    """

    def __init__(self, program: Program, state: Nested, *, averaged: bool = False, batch_size: int = 8):
        # Reading the property is the check.
        _ = program.experiment.language_model.score_head
        weights = program.weights(state, averaged=averaged)
        self._arrays = (weights, state["buffer"])
        self.seq_len = program.experiment.data.seq_len
        shards = batch_shards(program.mesh.shape)
        # Rounded up, as the mesh must divide the rows.
        self._rows = -(-batch_size // shards) * shards
        score = functools.partial(_score, Forward(program, weights))
        self._score = program.jit(score, out_shardings=program.replicated)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        """Yields the scores, float32[C], of each sequence of at least one token; of a long one, of its first S tokens.

        They are read at the last token, as transformers reads them at the last one that is no padding.
        """
        for offset in range(0, len(sequences), self._rows):
            group = [list(tokens)[: self.seq_len] for tokens in sequences[offset : offset + self._rows]]
            # Few lengths, as each of them is a program.
            length = min(bucket(max(map(len, group))), self.seq_len)
            tokens_BS = np.zeros((self._rows, length), np.int32)
            weights_BS = np.zeros((self._rows, length), np.float32)
            last_B = np.zeros(self._rows, np.int32)
            for row, tokens in enumerate(group):
                # Padding stands behind a sequence, which sees nothing of it.
                tokens_BS[row, : len(tokens)] = tokens
                weights_BS[row, : len(tokens)] = 1.0
                last_B[row] = len(tokens) - 1
            batch = {"tokens": tokens_BS, "targets": np.zeros_like(tokens_BS), "weights": weights_BS}
            scores_BC = jax.device_get(self._score(self._arrays, batch, last_B))
            yield from scores_BC[: len(group)]


def _score(forward: Forward, arrays: Any, batch: Nested, last_B: jax.Array) -> jax.Array:
    """The scores at the last token of each row, [B, C]."""
    ctx = forward.program.evaluation_context(batch)
    x_BSD, weights, _ = forward(arrays, ctx)
    scores_BSC = forward.model.score_head.scores(weights, x_BSD, ctx)
    return jnp.take_along_axis(scores_BSC, last_B[:, None, None], axis=1)[:, 0]
