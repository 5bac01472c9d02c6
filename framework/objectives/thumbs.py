"""KTO: a loss over single answers, each desirable or undesirable (unpaired preferences)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from plimsoll.framework.config import NonNegativeFloat, PositiveFloat, component
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import Loss
from plimsoll.framework.layers.objective import Head, Objective
from plimsoll.framework.layout import Nested
from plimsoll.framework.objectives.sequences import sequence_sums

_KINDS = ("desirable", "undesirable")


class _Thumbs(NamedTuple):
    """The sequences of a microbatch, each field f32[B, N]; zeros for missing sequences.

    Attributes:
        desirable, undesirable: 1 for a counted answer of this kind.
        estimating: 1 for a sequence that the estimate of KL uses.
        log_probs: the log-probability of each answer, summed over its tokens.
        log_ratios: log_probs minus those of the reference.
        lengths: number of tokens of each answer.
    """

    desirable: jax.Array
    undesirable: jax.Array
    estimating: jax.Array
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

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context) -> Loss:
        """Return the mean over answers, and the metrics."""
        thumbs = _thumbs(head.log_probs(weights, x_BSD, ctx), ctx.batch)
        kl = _kl(thumbs)
        # The distance by which an answer is on the right side of z, [B, N].
        margins_BN = (thumbs.desirable - thumbs.undesirable) * (self.beta * (thumbs.log_ratios - kl))
        # 1 - sigmoid(x) is computed as sigmoid(-x), which loses no digits.
        losses_BN = jax.nn.sigmoid(-margins_BN)
        desirable_loss = self.desirable_weight * jnp.sum(thumbs.desirable * losses_BN)
        undesirable_loss = self.undesirable_weight * jnp.sum(thumbs.undesirable * losses_BN)
        num_answers = ctx.counts.get("answers", 1.0)
        counted_BN = thumbs.desirable + thumbs.undesirable
        metrics = {
            **self._observed(thumbs, ctx.counts),
            "accuracy": jnp.sum(counted_BN * (margins_BN > 0)) / num_answers,
            # The mean over microbatches, weighted by their numbers of answers.
            "kl": kl * jnp.sum(counted_BN) / num_answers,
        }
        loss = (desirable_loss + undesirable_loss) / num_answers
        return loss, jax.lax.stop_gradient({"preference": loss, **metrics})

    def _observed(self, thumbs: _Thumbs, counts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the means over answers of each kind; in an evaluation, the sums."""
        values = {
            "reward": self.beta * thumbs.log_ratios,
            "log_prob": thumbs.log_probs,
            "length": thumbs.lengths,
        }
        observed = {}
        for kind in _KINDS:
            counted_BN = getattr(thumbs, kind)
            for name, values_BN in values.items():
                observed[f"{name}_{kind}"] = jnp.sum(counted_BN * values_BN) / counts.get(kind, 1.0)
        observed["margin"] = observed["reward_desirable"] - observed["reward_undesirable"]
        return observed

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return means over answers: "loss" and all metrics; and the numbers of answers."""
        num_answers = max(totals["answers"], 1.0)
        summary = {name: totals[name] / num_answers for name in ("preference", "accuracy", "kl")}
        for kind in _KINDS:
            for name in ("reward", "log_prob", "length"):
                summary[f"{name}_{kind}"] = totals[f"{name}_{kind}"] / max(totals[kind], 1.0)
        # Recomputed here: the two kinds have different counts, so the difference of their sums is not that of their
        # means.
        summary["margin"] = summary["reward_desirable"] - summary["reward_undesirable"]
        numbers = {kind: totals[kind] for kind in _KINDS}
        return {"loss": summary["preference"], **summary, **numbers}


def _thumbs(log_probs_BS: jax.Array, batch: dict[str, jax.Array]) -> _Thumbs:
    """Compute the sums over sequences, and the role of each sequence."""
    segments_BS = batch["segments"]
    answer_BS = batch["weights"]
    # The label at a sequence's end: +1 or -1; 0 for a sequence that does not count.
    labels_BN = sequence_sums(batch["ends"] * batch["labels"], segments_BS)
    unlabelled_BN = sequence_sums(answer_BS * (batch["labels"] == 0), segments_BS)
    return _Thumbs(
        desirable=jnp.maximum(labels_BN, 0.0),
        undesirable=jnp.maximum(-labels_BN, 0.0),
        estimating=(unlabelled_BN > 0).astype(jnp.float32),
        log_probs=sequence_sums(answer_BS * log_probs_BS, segments_BS),
        log_ratios=sequence_sums(answer_BS * (log_probs_BS - batch["reference"]), segments_BS),
        lengths=sequence_sums(answer_BS, segments_BS),
    )


def _kl(thumbs: _Thumbs) -> jax.Array:
    """Return z, f32 scalar, in nats."""
    log_ratio_sum = jnp.sum(thumbs.estimating * thumbs.log_ratios)
    mean = log_ratio_sum / jnp.maximum(jnp.sum(thumbs.estimating), 1.0)
    return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))
