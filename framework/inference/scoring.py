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
from framework.layout import Nested
from framework.program.program import Program

Tokens = Sequence[int] | np.ndarray


class Score(NamedTuple):
    """Of a row's scored tokens: their log-probability in nats, how many, and whether each was the most likely."""

    log_prob: float
    tokens: int
    greedy: bool


@dataclass(frozen=True)
class TextScore:
    """Of a text: predicted tokens, mean loss in nats, its exponential, and bits per byte of UTF-8."""

    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float


class Scorer:
    """Log-probabilities by a model; keep it for as long as its compiled functions are of use.

    Args:
        program: the experiment on its mesh; data.seq_len bounds what a token is predicted from.
        state: with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages.
        batch_size: rows at a time, rounded up to what the mesh divides.
    """

    def __init__(self, program: Program, state: Nested, *, averaged: bool = False, batch_size: int = 8):
        self._arrays = program.weights(state, averaged=averaged), state["buffer"]
        self.seq_len = program.experiment.data.seq_len
        shards = program.mesh.shape["data"] * program.mesh.shape["fsdp"]
        self._rows = -(-batch_size // shards) * shards
        score = functools.partial(_score, Forward(program, self._arrays[0]))
        self._score = program.jit(score, out_shardings=program.replicated)

    def score(self, rows: Sequence[tuple[Tokens, int]]) -> Iterator[Score]:
        """Of each (tokens, start) in order, the score of tokens[start:] after those before; start is at least 1.

        Of a row of more than seq_len + 1 tokens the last so many are taken.
        """
        for at in range(0, len(rows), self._rows):
            group = rows[at : at + self._rows]
            cut = [np.asarray(tokens[-self.seq_len - 1 :], np.int32) for tokens, _ in group]
            starts = [max(1, start - max(0, len(tokens) - self.seq_len - 1)) for tokens, start in group]
            length = min(bucket(max(map(len, cut)) - 1), self.seq_len)
            batch = pack([*cut, *[np.zeros(0, np.int32)] * (self._rows - len(cut))], length, separators=None)
            for weights, start in zip(batch["weights"], starts, strict=False):
                weights[: start - 1] = 0.0
            sums = jax.device_get(self._score(self._arrays, batch))
            for log_prob, tokens, wrong in list(zip(*sums, strict=True))[: len(group)]:
                yield Score(float(log_prob), round(float(tokens)), bool(wrong == 0))

    def text(self, tokens: Tokens, num_bytes: int) -> TextScore:
        """A token stream in windows of seq_len, as training evaluates it: every token but the first is predicted once,
        from those of its window before it. `num_bytes` is the text's size."""
        size = self.seq_len
        windows = [tokens[i * size : (i + 1) * size + 1] for i in range(num_windows(len(tokens), size))]
        scores = list(self.score([(window, 1) for window in windows]))
        nll, count = -math.fsum(score.log_prob for score in scores), sum(score.tokens for score in scores)
        loss = nll / max(count, 1)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return TextScore(count, loss, perplexity, nll / math.log(2) / max(num_bytes, 1))


def _score(forward: Forward, arrays: Any, batch: Nested) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per row: the sum of log-probabilities, the number of targets, and of those that are not the most likely."""
    ctx, head = forward.program.evaluation_context(batch), forward.model.head
    x_BSD, weights, _ = forward(arrays, ctx)
    B, S, _ = x_BSD.shape
    chunks = head.chunks(B, S, ctx).count

    def chunk(x_BsD: jax.Array, targets_Bs: jax.Array, weights_Bs: jax.Array) -> tuple[jax.Array, ...]:
        logits_BsV = head.logits(weights, x_BsD, ctx)
        picked_Bs = jnp.take_along_axis(logits_BsV, targets_Bs[..., None], axis=-1)[..., 0]
        log_probs_Bs = picked_Bs - jax.nn.logsumexp(logits_BsV, axis=-1)
        wrong_Bs = jnp.argmax(logits_BsV, axis=-1) != targets_Bs
        return (log_probs_Bs * weights_Bs).sum(1), weights_Bs.sum(1), (wrong_Bs * weights_Bs).sum(1)

    # Slices are strided, so that each holds an equal part of every shard of the positions (as the head's loss).
    split = lambda x: jnp.moveaxis(x.reshape(B, S // chunks, chunks, *x.shape[2:]), 2, 0)  # noqa: E731
    parts = jax.tree.map(split, (x_BSD, batch["targets"], batch["weights"]))
    sums = jax.lax.map(lambda part: chunk(*part), parts)
    return jax.tree.map(lambda x: x.sum(0), sums)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """(tokens of both, where the continuation's begin). Spaces at the context's end go with the continuation, as word
    pieces have them; where a piece covers both it counts as the context's, as in lm-evaluation-harness.

    Raises:
        ValueError: nothing comes before the continuation, or it has no tokens.
    """
    kept = context.rstrip()
    continuation, context = context[len(kept) :] + continuation, kept
    tokens, start = tokenizer.encode_prompt(context + continuation), len(tokenizer.encode_prompt(context))
    if start == 0 and tokenizer.separator_id is not None:
        tokens, start = [tokenizer.separator_id, *tokens], 1
    if start == 0 or start >= len(tokens):
        raise ValueError(f"nothing to predict {continuation!r} from" if start == 0 else f"{continuation!r} is no token")
    return tokens, start
