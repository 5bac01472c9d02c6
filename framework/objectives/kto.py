"""KTO: a loss over single answers, each desirable or undesirable (unpaired preferences)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from plimsoll.framework.config import NonNegativeFloat, PositiveFloat, component
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import LossAndMetrics
from plimsoll.framework.layers.objective import Head, Objective
from plimsoll.framework.layout import Nested
from plimsoll.framework.objectives.sequences import sum_sequences

_LABELS = ("desirable", "undesirable")


@dataclass(frozen=True)
class _UnpairedSequences:
    """The sequences of a microbatch, each field f32[B, N]; zeros for missing sequences.

    Attributes:
        desirable, undesirable: 1 for a counted answer of this kind.
        estimates_kl: 1 for a sequence that the estimate of KL uses.
        log_probs: the log-probability of each answer, summed over its tokens.
        log_ratios: log_probs minus those of the reference.
        lengths: number of tokens of each answer.
    """

    desirable: jax.Array
    undesirable: jax.Array
    estimates_kl: jax.Array
    log_probs: jax.Array
    log_ratios: jax.Array
    lengths: jax.Array


@component
class KTO(Objective):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306, equation 7).

    loss = weight (1 - sigmoid(beta (r - z))) of a desirable answer, weight (1 - sigmoid(beta (z - r))) of another,
    r = log pi - log ref; z = max(0, mean of r over prompts with answers to other prompts), without gradient

    z estimates the divergence from the reference; its sequences have the label 0 and no loss. It is computed for a
    microbatch, over all devices, so the same batch in more microbatches has a different, though similar, loss. TRL
    also computes it for the batch of a forward pass, over all devices. If a microbatch has no such sequence, z is 0.

    The loss is the mean over the answers of the global batch, as in the paper; in TRL, it is the mean over those of
    each microbatch.

    Metrics: `reward_desirable`, `reward_undesirable` (beta r), `log_prob_...`, `length_...`, means over answers of
    each kind; `margin`, the difference of the two rewards; `accuracy`, the fraction of answers on the right side of
    z; `kl`, z in nats.

    Args:
        beta: strength of the pull to the reference; with a lower value, the model may move farther away.
        desirable_weight: weight of desirable answers.
        undesirable_weight: weight of undesirable answers. The authors recommend that weight times number of examples
            is about the same for both kinds.
    """

    arrays = ("ends", "segments", "reference", "labels")
    # z is computed per microbatch.
    depends_on_microbatches = True
    unit = "loss per answer"

    def __init__(
        self,
        *,
        beta: PositiveFloat = 0.1,
        desirable_weight: NonNegativeFloat = 1.0,
        undesirable_weight: NonNegativeFloat = 1.0,
    ):
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def counts(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the numbers of answers of each kind, and of both."""
        counted_BS = batch["ends"] * jnp.abs(batch["labels"])
        desirable = jnp.sum(counted_BS * (batch["labels"] > 0))
        undesirable = jnp.sum(counted_BS * (batch["labels"] < 0))
        return {"answers": desirable + undesirable, "desirable": desirable, "undesirable": undesirable}

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context) -> LossAndMetrics:
        """Return the mean over answers, and the metrics."""
        unpaired = _sum_unpaired(head.log_probs(weights, x_BSD, ctx), ctx.batch)
        # z, in nats: the mean over the sequences that estimate it.
        log_ratio_sum = jnp.sum(unpaired.estimates_kl * unpaired.log_ratios)
        mean_log_ratio = log_ratio_sum / jnp.maximum(jnp.sum(unpaired.estimates_kl), 1.0)
        kl = jax.lax.stop_gradient(jnp.maximum(mean_log_ratio, 0.0))
        # The distance by which an answer is on the right side of z, [B, N].
        margins_BN = (unpaired.desirable - unpaired.undesirable) * (self.beta * (unpaired.log_ratios - kl))
        # 1 - sigmoid(x) is computed as sigmoid(-x), which loses no digits.
        losses_BN = jax.nn.sigmoid(-margins_BN)
        desirable_loss = self.desirable_weight * jnp.sum(unpaired.desirable * losses_BN)
        undesirable_loss = self.undesirable_weight * jnp.sum(unpaired.undesirable * losses_BN)
        num_answers = ctx.counts.get("answers", 1.0)
        answer_weights_BN = unpaired.desirable + unpaired.undesirable
        # Means over answers of each kind; in an evaluation, sums.
        values = {"reward": self.beta * unpaired.log_ratios, "log_prob": unpaired.log_probs, "length": unpaired.lengths}
        means = {}
        for label in _LABELS:
            label_weights_BN = getattr(unpaired, label)
            for name, values_BN in values.items():
                means[f"{name}_{label}"] = jnp.sum(label_weights_BN * values_BN) / ctx.counts.get(label, 1.0)
        metrics = {
            **means,
            "margin": means["reward_desirable"] - means["reward_undesirable"],
            "accuracy": jnp.sum(answer_weights_BN * (margins_BN > 0)) / num_answers,
            # The mean over microbatches, weighted by their numbers of answers.
            "kl": kl * jnp.sum(answer_weights_BN) / num_answers,
        }
        loss = (desirable_loss + undesirable_loss) / num_answers
        return loss, jax.lax.stop_gradient({"preference": loss, **metrics})

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return means over answers: "loss" and all metrics; and the numbers of answers."""
        num_answers = max(totals["answers"], 1.0)
        summary = {name: totals[name] / num_answers for name in ("preference", "accuracy", "kl")}
        for label in _LABELS:
            for name in ("reward", "log_prob", "length"):
                summary[f"{name}_{label}"] = totals[f"{name}_{label}"] / max(totals[label], 1.0)
        # Recomputed here: the two kinds have different counts, so the difference of their sums is not that of their
        # means.
        summary["margin"] = summary["reward_desirable"] - summary["reward_undesirable"]
        numbers = {label: totals[label] for label in _LABELS}
        return {"loss": summary["preference"], **summary, **numbers}


def _sum_unpaired(log_probs_BS: jax.Array, batch: dict[str, jax.Array]) -> _UnpairedSequences:
    """Compute the sums over sequences, and the role of each sequence."""
    segments_BS = batch["segments"]
    answer_BS = batch["weights"]
    # The label at a sequence's end: +1 or -1; 0 for a sequence that does not count.
    labels_BN = sum_sequences(batch["ends"] * batch["labels"], segments_BS)
    unlabeled_BN = sum_sequences(answer_BS * (batch["labels"] == 0), segments_BS)
    return _UnpairedSequences(
        desirable=jnp.maximum(labels_BN, 0.0),
        undesirable=jnp.maximum(-labels_BN, 0.0),
        estimates_kl=(unlabeled_BN > 0).astype(jnp.float32),
        log_probs=sum_sequences(answer_BS * log_probs_BS, segments_BS),
        log_ratios=sum_sequences(answer_BS * (log_probs_BS - batch["reference"]), segments_BS),
        lengths=sum_sequences(answer_BS, segments_BS),
    )
