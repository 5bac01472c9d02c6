"""Losses over scores of whole sequences: pairwise rewards, and classes.

A sequence's scores are those at its last token, where `ends` is 1; see `framework.layers.score_head`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from plimsoll.framework.config import NonNegativeFloat, component
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import LossAndMetrics
from plimsoll.framework.layers.objective import Objective
from plimsoll.framework.layers.score_head import ScoreHead
from plimsoll.framework.layout import Nested
from plimsoll.framework.objectives.sequences import split_pairs, sum_sequences


class ScoreObjective(Objective):
    """Base class of objectives for score heads."""

    reads_scores = True

    def loss(self, head: ScoreHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> LossAndMetrics:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the loss and metrics like `Objective.loss`, for a score head."""
        raise NotImplementedError


@component
class PairwiseReward(ScoreObjective):
    """The Bradley-Terry model of preferences (Ouyang et al. 2022, arXiv 2203.02155, equation 1).

    loss = -log sigmoid(r(chosen) - r(rejected) - margin) + centering (r(chosen) + r(rejected))^2, the mean over pairs

    Args:
        margin: minimum difference by which the chosen sequence should be better (Llama 2, arXiv 2307.09288, equation
            2).
        centering: coefficient that pulls the rewards of a pair to a sum of zero (arXiv 2312.09244); the paper uses
            0.01.
    """

    arrays = ("ends", "segments")
    unit = "nats per pair"

    def __init__(self, *, margin: NonNegativeFloat = 0.0, centering: NonNegativeFloat = 0.0):
        self.margin = margin
        self.centering = centering

    def check_labels(self, num_labels: int) -> None:
        """Raise ValueError if there is more than one label: a reward is one number."""
        if num_labels != 1:
            raise ValueError(f"num_labels = {num_labels}: PairwiseReward compares one score per sequence; expected 1")

    def loss(self, head: ScoreHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> LossAndMetrics:
        """Return the mean over pairs of ctx.batch; metrics: accuracy, margin, and the rewards of both sequences."""
        assert ctx.num_sequences is not None
        ends_BS, segments_BS = ctx.batch["ends"], ctx.batch["segments"]
        scores_BS = head.scores(weights, x_BSD, ctx)[..., 0]
        end_scores_BS = jnp.where(ends_BS > 0, scores_BS, 0.0)
        rewards = split_pairs(sum_sequences(end_scores_BS, segments_BS))
        margins_BP = rewards.chosen - rewards.rejected
        losses_BP = -jax.nn.log_sigmoid(margins_BP - self.margin)
        if self.centering:
            losses_BP += self.centering * jnp.square(rewards.chosen + rewards.rejected)
        # A sequence counts with the weight at its end; both of a pair have the same.
        pair_weights_BP = split_pairs(sum_sequences(ends_BS, segments_BS)).chosen * (2 / ctx.num_sequences)
        metrics = {
            "accuracy": jnp.sum(pair_weights_BP * (margins_BP > 0)),
            "margin": jnp.sum(pair_weights_BP * margins_BP),
            "chosen": jnp.sum(pair_weights_BP * rewards.chosen),
            "rejected": jnp.sum(pair_weights_BP * rewards.rejected),
        }
        return jnp.sum(pair_weights_BP * losses_BP), jax.lax.stop_gradient(metrics)

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return means over pairs."""
        # Each pair counts as two sequences, also in the sums.
        sequences = max(totals["sequences"], 1.0)
        names = ("loss", "accuracy", "margin", "chosen", "rejected")
        means = {name: totals[name] / sequences for name in names}
        return {**means, "pairs": totals["sequences"] / 2}


@component
class Classification(ScoreObjective):
    """Cross-entropy over classes: -log softmax(scores)[label], the mean over sequences.

    `labels` contains the class of a sequence at its last token.
    """

    arrays = ("ends", "labels")
    unit = "nats per sequence"

    def check_labels(self, num_labels: int) -> None:
        """Raise ValueError for fewer than two classes: nothing could be learned, and regression is not supported."""
        if num_labels < 2:
            raise ValueError(f"num_labels = {num_labels}: Classification chooses between classes; expected at least 2")

    def loss(self, head: ScoreHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> LossAndMetrics:
        """Return the mean over sequences of ctx.batch; metrics: accuracy."""
        assert ctx.num_sequences is not None
        ends_BS = ctx.batch["ends"]
        labels_BS = ctx.batch["labels"].astype(jnp.int32)
        scores_BSC = head.scores(weights, x_BSD, ctx)
        log_probs_BSC = jax.nn.log_softmax(scores_BSC)
        is_label_BSC = labels_BS[..., None] == jnp.arange(head.num_labels)
        # A mask instead of a lookup, whose gradient would be a scatter.
        picked_BS = jnp.sum(jnp.where(is_label_BSC, log_probs_BSC, 0.0), axis=-1)
        shares_BS = ends_BS / ctx.num_sequences
        is_right_BS = jnp.argmax(scores_BSC, axis=-1) == labels_BS
        metrics = {"accuracy": jnp.sum(shares_BS * is_right_BS)}
        return -jnp.sum(shares_BS * picked_BS), jax.lax.stop_gradient(metrics)

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return means over sequences."""
        sequences = max(totals["sequences"], 1.0)
        means = {name: totals[name] / sequences for name in ("loss", "accuracy")}
        return {**means, "sequences": totals["sequences"]}
