"""Scoring: log-probabilities of given tokens, for perplexity, bits per byte and multiple choice."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from framework.data.packing import num_windows, pack
from framework.data.tokenizers import Tokenizer
from framework.inference.generation import Forward, bucket
from framework.layers.base import batch_shards
from framework.layout import Nested
from framework.program.program import Program
from framework.terminal.phases import SHORT, phase

Tokens = Sequence[int] | np.ndarray


class Score(NamedTuple):
    """The score of a row: log-probability of its scored tokens in nats, their number, and whether each was the most
    likely one."""

    log_prob: float
    tokens: int
    greedy: bool


@dataclass(frozen=True)
class TextScore:
    """The score of a text: predicted tokens, mean loss in nats, its exponential, and bits per byte of UTF-8."""

    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float


class Scorer:
    """Computes log-probabilities by a model; keep it for as long as its compiled functions are of use.

    Args:
        program: the experiment on its mesh; data.seq_len bounds what a token is predicted from.
        state: with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages.
        batch_size: rows at a time, rounded up to what the mesh divides.
    """

    def __init__(
        self,
        program: Program,
        state: Nested,
        *,
        averaged: bool = False,
        batch_size: int = 8,
    ):
        # Reading the property is the check.
        _ = program.experiment.language_model.language_head
        weights = program.weights(state, averaged=averaged)
        self._arrays = (weights, state["buffer"])
        self.seq_len = program.experiment.data.seq_len
        shards = batch_shards(program.mesh.shape)
        # Rounded up, as the mesh must divide the rows.
        self._rows = -(-batch_size // shards) * shards
        forward = Forward(program, weights)
        score = functools.partial(_score, forward)
        self._score = program.jit(score, out_shardings=program.replicated)

    def score(self, rows: Sequence[tuple[Tokens, int]]) -> Iterator[Score]:
        """Yields, for each (tokens, start), the score of tokens[start:] given those before; start is at least 1.

        Of a row of more than seq_len + 1 tokens the last so many are taken.
        """
        max_tokens = self.seq_len + 1
        for offset in range(0, len(rows), self._rows):
            group = rows[offset : offset + self._rows]
            sequences: list[np.ndarray] = []
            starts: list[int] = []
            for tokens, start in group:
                num_dropped = max(0, len(tokens) - max_tokens)
                last_tokens = tokens[-max_tokens:]
                sequences.append(np.asarray(last_tokens, np.int32))
                starts.append(max(1, start - num_dropped))
            # Few lengths, as each of them is a program.
            longest = max(map(len, sequences))
            length = min(bucket(longest - 1), self.seq_len)
            # Empty rows fill the batch, so that its number of rows is always the same.
            num_empty = self._rows - len(sequences)
            fill = [np.zeros(0, np.int32)] * num_empty
            batch = pack([*sequences, *fill], length, separators=None)
            # Target i is token i + 1.
            for weights, start in zip(batch["weights"], starts, strict=False):
                weights[: start - 1] = 0.0
            sums = jax.device_get(self._score(self._arrays, batch))
            row_sums = list(zip(*sums, strict=True))
            for log_prob, num_tokens, num_wrong in row_sums[: len(group)]:
                yield Score(
                    log_prob=float(log_prob),
                    tokens=round(float(num_tokens)),
                    greedy=bool(num_wrong == 0),
                )

    def text(self, tokens: Tokens, num_bytes: int) -> TextScore:
        """Scores a token stream in windows of seq_len, as training evaluates it: every token but the first is predicted
        once, from those of its window before it. `num_bytes` is the text's size."""
        size = self.seq_len
        # A window has one token more than it has targets: the first token is predicted from nothing.
        rows: list[tuple[Tokens, int]] = []
        for i in range(num_windows(len(tokens), size)):
            start = i * size
            window = tokens[start : start + size + 1]
            rows.append((window, 1))
        scores: list[Score] = []
        with phase("scoring", patience=SHORT) as scoring:
            for score in self.score(rows):
                scores.append(score)
                scoring.progress(len(scores), len(rows))
        nll = -math.fsum(score.log_prob for score in scores)
        count = sum(score.tokens for score in scores)
        loss = nll / max(count, 1)
        # math.exp raises for numbers beyond about 709.
        perplexity = math.exp(loss) if loss < 700 else math.inf
        bits_per_byte = nll / math.log(2) / max(num_bytes, 1)
        return TextScore(count, loss, perplexity, bits_per_byte)


def _score(
    forward: Forward,
    arrays: Any,
    batch: Nested,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per row: the sum of log-probabilities, the number of targets, and of those that are not the most likely."""
    ctx = forward.program.evaluation_context(batch)
    head = forward.model.language_head
    x_BSD, weights, _ = forward(arrays, ctx)
    B, S, _ = x_BSD.shape
    chunks = head.chunks(B, S, ctx).count

    # Chunk by chunk, as the logits of all positions may be larger than the model.
    def chunk(
        x_BsD: jax.Array,
        targets_Bs: jax.Array,
        weights_Bs: jax.Array,
    ) -> tuple[jax.Array, ...]:
        logits_BsV = head.logits(weights, x_BsD, ctx)
        picked_Bs1 = jnp.take_along_axis(logits_BsV, targets_Bs[..., None], axis=-1)
        picked_Bs = picked_Bs1[..., 0]
        log_probs_Bs = picked_Bs - jax.nn.logsumexp(logits_BsV, axis=-1)
        wrong_Bs = jnp.argmax(logits_BsV, axis=-1) != targets_Bs
        return (
            (log_probs_Bs * weights_Bs).sum(1),
            weights_Bs.sum(1),
            (wrong_Bs * weights_Bs).sum(1),
        )

    # Slices are strided, so that each holds an equal part of every shard of the positions (as the head's loss).
    def split(x: jax.Array) -> jax.Array:
        shape = (B, S // chunks, chunks, *x.shape[2:])
        return jnp.moveaxis(x.reshape(shape), 2, 0)

    arrays_to_split = (x_BSD, batch["targets"], batch["weights"])
    parts = jax.tree.map(split, arrays_to_split)
    sums = jax.lax.map(lambda part: chunk(*part), parts)
    return jax.tree.map(lambda x: x.sum(0), sums)


def encode_pair(
    tokenizer: Tokenizer,
    context: str,
    continuation: str,
) -> tuple[list[int], int]:
    """Encodes a context and its continuation; returns (tokens of both, index of the continuation's first token).

    Spaces at the context's end go with the continuation, as word pieces have them; where a piece covers both it counts
    as the context's, as in lm-evaluation-harness.

    Raises:
        ValueError: nothing comes before the continuation, or it has no tokens.
    """
    stripped_context = context.rstrip()
    spaces = context[len(stripped_context) :]
    context = stripped_context
    continuation = spaces + continuation
    # Not the tokens of each: a tokenizer may merge the end of one with the beginning of the other.
    tokens = tokenizer.encode_prompt(context + continuation)
    start = len(tokenizer.encode_prompt(context))
    if start == 0 and tokenizer.separator_id is not None:
        # The first token is predicted from the separator, as at the beginning of a document.
        tokens = [tokenizer.separator_id, *tokens]
        start = 1
    if start == 0:
        raise ValueError(f"nothing to predict {continuation!r} from")
    if start >= len(tokens):
        raise ValueError(f"{continuation!r} is no token")
    return tokens, start
