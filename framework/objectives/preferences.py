"""Losses over pairs of answers, of which one was preferred.

The log-probability of an answer y to a prompt x is the sum over its tokens: log pi(y|x) = sum_t log pi(y_t | x, y_<t).
A batch's rows are pairs of sequences (`framework.objectives.sequences`); weights_BS are 1 where an answer's token is
predicted, and `reference` is f32[B, S], the log-probability of each of these tokens by the model that is compared with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from framework.config import Fraction, PositiveFloat, component
from framework.layers.base import Context
from framework.layers.chunked_loss import Loss
from framework.layers.objective import Head, Objective
from framework.layout import Nested
from framework.objectives.sequences import pairs_of, sequence_sums


@component
class DPO(Objective):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    loss = -log sigmoid(margin), margin = beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))

    Args:
        beta: how far the model may go from the reference: less is farther.
        label_smoothing: the probability that a preference is the wrong way round (conservative DPO, Mitchell 2023).
    """

    arrays = ("ends", "segments", "reference")
    unit = "nats per pair"

    def __init__(self, *, beta: PositiveFloat = 0.1, label_smoothing: Fraction = 0.0):
        self.beta = beta
        self.label_smoothing = label_smoothing

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context) -> Loss:
        """The mean over pairs."""
        assert ctx.num_sequences is not None
        batch = ctx.batch
        token_weights_BS = batch["weights"]
        log_probs_BS = head.log_probs(weights, x_BSD, ctx)
        ratios_BN = sequence_sums(token_weights_BS * (log_probs_BS - batch["reference"]), batch["segments"])
        rewards = pairs_of(self.beta * ratios_BN)
        margins_BP = rewards.chosen - rewards.rejected
        smoothing = self.label_smoothing
        losses_BP = -(1 - smoothing) * jax.nn.log_sigmoid(margins_BP) - smoothing * jax.nn.log_sigmoid(-margins_BP)
        # A sequence counts by the weight at its end; both of a pair have the same.
        pair_weights_BP = pairs_of(sequence_sums(batch["ends"], batch["segments"])).chosen * (2 / ctx.num_sequences)
        metrics = {
            "margin": jnp.sum(pair_weights_BP * margins_BP),
            "accuracy": jnp.sum(pair_weights_BP * (margins_BP > 0)),
        }
        return jnp.sum(pair_weights_BP * losses_BP), jax.lax.stop_gradient(metrics)

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Means over pairs."""
        # Each pair counts as two sequences, in the sums as well.
        sequences = max(totals["sequences"], 1.0)
        means = {name: totals[name] / sequences for name in ("loss", "margin", "accuracy")}
        return {**means, "pairs": totals["sequences"] / 2}
