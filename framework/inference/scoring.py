"""Scoring: log-probabilities of given tokens, for perplexity, bits per byte and multiple-choice evaluation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.data.packing import num_windows, pack
from plimsoll.framework.data.tokenizers import Tokenizer
from plimsoll.framework.inference.generation import InferenceForward, ModelArrays, bucket
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.layout import Nested, TrainState
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import SHORT, phase

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Score:
    """The score of a row.

    Attributes:
        log_prob: total log-probability of the scored tokens, in nats.
        tokens: number of scored tokens.
        greedy: True if every scored token was the most likely one.
    """

    log_prob: float
    tokens: int
    greedy: bool


@dataclass(frozen=True)
class TextScore:
    """The score of a text.

    Attributes:
        tokens: number of predicted tokens.
        loss: mean loss in nats per token.
        perplexity: exponential of the loss.
        bits_per_byte: total loss in bits per UTF-8 byte of the text.
    """

    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float


class Scorer:
    """Computes log-probabilities with a model; keep the instance to reuse its compiled functions.

    Args:
        program: program of the experiment on its mesh; data.seq_len limits the context of a prediction.
        state: state with the groups parameter (or ema), frozen and buffer.
        averaged: use the moving averages of the weights.
        batch_size: number of rows to score at a time, rounded up to a multiple of the mesh's batch shards.
    """

    def __init__(self, program: Program, state: TrainState, *, averaged: bool = False, batch_size: int = 8):
        # The property raises ValueError if the model has no language head.
        _ = program.experiment.language_model.language_head
        weights = program.weights(state, averaged=averaged)
        self._arrays = (weights, state.buffer)
        self.seq_len = program.experiment.data.seq_len
        shards = batch_shards(program.mesh.shape)
        # The number of rows must be a multiple of the batch shards.
        self._rows = -(-batch_size // shards) * shards
        score = functools.partial(_score, InferenceForward(program, weights))
        self._score = program.jit(score, out_shardings=program.replicated)

    def score(self, rows: Sequence[tuple[Tokens, int]]) -> Iterator[Score]:
        """Yield, for each (tokens, start), the score of tokens[start:] given the tokens before; start is at least 1.

        Rows with more than seq_len + 1 tokens are truncated to their last seq_len + 1 tokens.
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
            # Round to one of a few lengths, because each length needs its own program.
            longest = max(map(len, sequences))
            length = min(bucket(longest - 1), self.seq_len)
            # Fill the batch with empty rows, so that its number of rows is always the same.
            num_empty = self._rows - len(sequences)
            fill = [np.zeros(0, np.int32)] * num_empty
            batch = pack([*sequences, *fill], length, separators=None)
            # Target i is token i + 1.
            for weights, start in zip(batch["weights"], starts, strict=False):
                weights[: start - 1] = 0.0
            sums = jax.device_get(self._score(self._arrays, batch))
            row_sums = list(zip(*sums, strict=True))
            for log_prob, num_tokens, num_wrong in row_sums[: len(group)]:
                yield Score(log_prob=float(log_prob), tokens=round(float(num_tokens)), greedy=bool(num_wrong == 0))

    def text(self, tokens: Tokens, num_bytes: int) -> TextScore:
        """Score a token stream in windows of seq_len, as in the evaluation of training.

        Every token except the first is predicted once, from the preceding tokens of its window.

        Args:
            tokens: tokens of the text.
            num_bytes: size of the text in bytes.
        """
        size = self.seq_len
        # A window has one more token than targets, because its first token has no context to be predicted from.
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
        # math.exp overflows above about 709.
        perplexity = math.exp(loss) if loss < 700 else math.inf
        bits_per_byte = nll / math.log(2) / max(num_bytes, 1)
        return TextScore(count, loss, perplexity, bits_per_byte)


def _score(forward: InferenceForward, arrays: ModelArrays, batch: Nested) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute per row the sum of log-probabilities, the number of targets, and the number that are not the argmax."""
    ctx = forward.program.evaluation_context(batch)
    head = forward.model.language_head
    out = forward(arrays, ctx)

    def compute_values(logits_BsV: jax.Array, targets_Bs: jax.Array) -> tuple[jax.Array, jax.Array]:
        picked_Bs1 = jnp.take_along_axis(logits_BsV, targets_Bs[..., None], axis=-1)
        log_probs_Bs = picked_Bs1[..., 0] - jax.nn.logsumexp(logits_BsV, axis=-1)
        return log_probs_Bs, jnp.argmax(logits_BsV, axis=-1) != targets_Bs

    # Chunk by chunk, because the logits of all positions may be larger than the model.
    log_probs_BS, is_wrong_BS = head.map_logits(compute_values, out.head_weights, out.x_BSD, ctx, (batch["targets"],))
    weights_BS = batch["weights"]
    return (log_probs_BS * weights_BS).sum(1), weights_BS.sum(1), (is_wrong_BS * weights_BS).sum(1)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Encode a context and its continuation; returns (tokens of both, index of the continuation's first token).

    Trailing whitespace of the context moves to the continuation, because subword tokens start with the space. A token
    that covers both counts as context, as in lm-evaluation-harness.

    Raises:
        ValueError: there is nothing before the continuation, or the continuation has no tokens.
    """
    stripped_context = context.rstrip()
    spaces = context[len(stripped_context) :]
    context = stripped_context
    continuation = spaces + continuation
    # Encode both together: a tokenizer may merge the end of one with the beginning of the other.
    tokens = tokenizer.encode_prompt(context + continuation)
    start = len(tokenizer.encode_prompt(context))
    if start == 0 and tokenizer.separator_id is not None:
        # Predict the first token from the separator, as at the beginning of a document.
        tokens = [tokenizer.separator_id, *tokens]
        start = 1
    if start == 0:
        raise ValueError(f"expected text before {continuation!r} to predict it from")
    if start >= len(tokens):
        raise ValueError(f"{continuation!r} has no tokens")
    return tokens, start
