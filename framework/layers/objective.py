"""Objective: what the head of a language model minimizes in place of the next tokens' cross-entropy.

The head knows this interface alone; `framework.objectives` has the objectives. One objective is a function of all
positions of a microbatch, so it may add up the log-probabilities of a sequence, or compare two sequences of a row.
"""

from __future__ import annotations

from typing import Protocol

import jax

from framework.layers.base import Context
from framework.layers.chunked_loss import Chunks, Loss
from framework.layout import Nested


class Head(Protocol):
    """What an objective may ask of the head; see `framework.layers.head.LMHead`."""

    softcap: float | None

    def log_probs(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """f32[B, S], the log-probability of each target."""
        ...

    def normed(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """The final norm's output, [B, S, D]."""
        ...

    def chunks(self, batch: int, length: int, ctx: Context) -> Chunks:
        """The chunks in which logits of [batch, length] positions are made."""
        ...


class Objective:
    """The base of objectives.

    Attributes:
        arrays: names of the batch's arrays that it reads, beside tokens, targets and weights.
        unit: of the loss that is reported, such as "nats per pair".
        depends_on_microbatches: another learner.accumulate is another loss, beyond rounding; see `Layer`.
        reads_scores: it is for a `framework.layers.score_head.ScoreHead`, not for the head of a language model.
    """

    arrays: tuple[str, ...] = ()
    unit: str = "nats per token"
    depends_on_microbatches: bool = False
    reads_scores: bool = False

    def check_labels(self, num_labels: int) -> None:
        """Raises ValueError where it is not for a score head of so many labels."""
        raise ValueError(
            f"objective = {type(self).__name__} is for a language model's head; expected one of "
            "framework.objectives.rewards for a score head"
        )

    def counts(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Numbers of a global batch that its loss or metrics are divided by, beside counted targets and sequences.

        Returns:
            {name: f32 scalar}: a training step hands them to `loss` as ctx.counts, each 1 at least; an evaluation adds
            them up for `summary`. The names differ from those of metrics.
        """
        return {}

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context) -> Loss:
        """The loss of ctx.batch, and metrics by name.

        Args:
            head: whose input this is.
            weights: the head's, prepared.
            x_BSD: what the last layer gives.
            ctx: losses and metrics are divided by ctx.num_targets (counted tokens of the global batch), by
                ctx.num_sequences (counted sequences of the global batch) or by one of ctx.counts, so microbatches add
                up to their batch. In an evaluation the first two are 1 and ctx.counts is empty: sums leave.

        Returns:
            (f32 scalar, {name: f32 scalar}); metrics have no gradient.
        """
        raise NotImplementedError

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """What an evaluation reports, "loss" among it.

        Args:
            totals: sums over the evaluated batches of the metrics, of "loss", of "tokens" and "sequences", the
                numbers of those that count, and of `counts`.
        """
        raise NotImplementedError
