"""Losses over pairs of a preferred and a rejected answer: DPO and IPO with a reference, ORPO and SimPO without one.

The log-probability of an answer y to a prompt x is the sum over its tokens: log pi(y|x) = sum_t log pi(y_t | x,
y_<t). A batch's rows are pairs of sequences (`framework.objectives.sequences`); weights_BS are 1 where an answer's
token is predicted, and `reference` is f32[B, S], the log-probability of each of these tokens under the reference
model.

Where implementations differ from the papers (IPO, ORPO), these losses follow TRL 1.16; each class documents the
difference. `python -m pytest -m peers tests/peers/test_preferences_live.py` compares them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Fraction, NonNegativeFloat, PositiveFloat, component
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import LossAndMetrics
from plimsoll.framework.layers.objective import Head, Objective
from plimsoll.framework.layout import Nested
from plimsoll.framework.objectives.sequences import AnswerPairs, Pairs, per_token, split_pairs, sum_sequences

# Sums of an evaluation that are not metrics of pairs.
_NON_PAIR_SUMS = ("loss", "tokens", "sequences", "sft", "sft_targets")


class PairLoss(Objective):
    """Base class of losses over pairs.

    The loss is the mean of `pair_losses`, plus `sft` times the mean cross-entropy of chosen answers.

    The metrics are means over pairs: `preference` (the loss without the cross-entropy term), `reward_chosen`,
    `reward_rejected` and `margin`, the difference of the two; `accuracy`, the fraction of margins above 0;
    `log_prob_chosen`, `log_prob_rejected` and `length_chosen`, `length_rejected`, in nats and tokens per answer; with
    a reference `kl`, the mean over both answers of log pi - log ref, in nats: it estimates the divergence from the
    reference to the extent that the answers are like the model's own. `sft` is the cross-entropy, in nats per token,
    if it is part of the loss.

    Attributes:
        beta: factor on the rewards.
        sft: weight of the cross-entropy.
        sft_prompt: whether the cross-entropy includes prompts.
    """

    arrays: tuple[str, ...] = ("ends", "segments")
    unit = "nats per pair"
    beta: float
    sft: float = 0.0
    sft_prompt: bool = False

    def rewards(self, answers: AnswerPairs) -> Pairs:
        """Return the rewards of the answers that the loss implies; their differences are the margins.

        With a reference they are beta (log pi - log ref), with sums over tokens also where the loss has means, so that
        the methods are comparable. Without a reference they are beta times the log-probability per token.
        """
        values = answers.log_ratios if "reference" in self.arrays else answers.mean_log_probs
        return jax.tree.map(lambda values: self.beta * values, values)

    def pair_losses(self, answers: AnswerPairs) -> jax.Array:
        """Return the loss of each pair, [B, P]; that of a missing pair is finite."""
        raise NotImplementedError

    def counts(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return sft_targets, the number of tokens that the cross-entropy is averaged over."""
        if self.sft == 0:
            return {}
        return {"sft_targets": jnp.sum(self._sft_weights(batch))}

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context) -> LossAndMetrics:
        """Return the mean over pairs, plus the weighted cross-entropy, a mean over tokens."""
        assert ctx.num_sequences is not None
        batch = ctx.batch
        log_probs_BS = head.log_probs(weights, x_BSD, ctx)
        answers = _sum_answers(log_probs_BS, batch)
        # A sequence counts with the weight at its end; both of a pair have the same.
        pair_weights_BP = split_pairs(sum_sequences(batch["ends"], batch["segments"])).chosen
        pair_values = {"preference": self.pair_losses(answers), **self._compute_metrics(answers)}
        # A pair is two sequences. The division comes after the sum, which may have more digits than the number of
        # sequences.
        means = {
            name: 2 * jnp.sum(pair_weights_BP * values) / ctx.num_sequences for name, values in pair_values.items()
        }
        loss = means["preference"]
        if self.sft > 0:
            nll = -jnp.sum(self._sft_weights(batch) * log_probs_BS)
            means["sft"] = nll / ctx.counts.get("sft_targets", 1.0)
            loss = loss + self.sft * means["sft"]
        return loss, jax.lax.stop_gradient(means)

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return means over pairs: "loss" and all metrics."""
        # Each pair counts as two sequences, also in the sums.
        num_sequences = max(totals["sequences"], 1.0)
        pair_metrics = [name for name in totals if name not in _NON_PAIR_SUMS]
        summary = {name: totals[name] / num_sequences for name in pair_metrics}
        # Computed from its parts: the sum of losses mixes terms per pair with terms per token.
        loss = summary["preference"]
        if self.sft > 0:
            summary["sft"] = totals["sft"] / max(totals["sft_targets"], 1.0)
            loss += self.sft * summary["sft"]
        return {"loss": loss, **summary, "pairs": totals["sequences"] / 2}

    def _sft_weights(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Return f32[B, S]: 1 where the cross-entropy counts a target."""
        segments_BS = batch["segments"]
        is_chosen_BS = (segments_BS % 2 == 1).astype(jnp.float32)
        return is_chosen_BS if self.sft_prompt else is_chosen_BS * batch["weights"]

    def _compute_metrics(self, answers: AnswerPairs) -> dict[str, jax.Array]:
        """Return the metrics of each pair, [B, P]."""
        rewards = self.rewards(answers)
        margins_BP = rewards.chosen - rewards.rejected
        observed = {
            "reward_chosen": rewards.chosen,
            "reward_rejected": rewards.rejected,
            "margin": margins_BP,
            "accuracy": margins_BP > 0,
            "log_prob_chosen": answers.log_probs.chosen,
            "log_prob_rejected": answers.log_probs.rejected,
            "length_chosen": answers.lengths.chosen,
            "length_rejected": answers.lengths.rejected,
        }
        if "reference" in self.arrays:
            observed["kl"] = (answers.log_ratios.chosen + answers.log_ratios.rejected) / 2
        return observed


@component
class DPO(PairLoss):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    loss = -log sigmoid(margin), margin = beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))

    Args:
        beta: strength of the pull to the reference; with a lower value, the model may move farther away.
        label_smoothing: probability that a preference is wrong (conservative DPO, Mitchell 2023).
        sft: weight of the mean cross-entropy of chosen answers' tokens, added to the loss (RPO, Pang et al. 2024,
            arXiv 2404.19733, which averages over each answer; TRL averages over all tokens of the batch, as here).
    """

    arrays = ("ends", "segments", "reference")

    def __init__(self, *, beta: PositiveFloat = 0.1, label_smoothing: Fraction = 0.0, sft: NonNegativeFloat = 0.0):
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.sft = sft

    def pair_losses(self, answers: AnswerPairs) -> jax.Array:
        """Return the loss of each pair."""
        rewards = self.rewards(answers)
        return _logistic(rewards.chosen - rewards.rejected, self.label_smoothing)


@component
class IPO(PairLoss):
    """Identity preference optimization (Azar et al. 2023, arXiv 2310.12036, equation 17).

    loss = (h - 1 / (2 beta))^2, h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)

    The log-ratios of the paper are sums over an answer's tokens. TRL uses means per token, as the authors recommended
    to its developers; this class does the same unless `per_token` is off.

    Args:
        beta: tau of the paper; the difference of log-ratios is pulled to 1 / (2 beta).
        per_token: divide log-ratios by the number of the answer's tokens.
        sft: weight of the mean cross-entropy of chosen answers' tokens, added to the loss.
    """

    arrays = ("ends", "segments", "reference")
    unit = "squared nats per pair"

    def __init__(self, *, beta: PositiveFloat = 0.1, per_token: bool = True, sft: NonNegativeFloat = 0.0):
        self.beta = beta
        self.per_token = per_token
        self.sft = sft

    def pair_losses(self, answers: AnswerPairs) -> jax.Array:
        """Return the loss of each pair."""
        log_ratios = answers.log_ratios
        if self.per_token:
            log_ratios = per_token(log_ratios, answers.lengths)
        return jnp.square(log_ratios.chosen - log_ratios.rejected - 1 / (2 * self.beta))


@component
class ORPO(PairLoss):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691, equations 6 and 7); no reference.

    loss = cross-entropy of the chosen sequence - beta log sigmoid(log odds(chosen) - log odds(rejected)),
    odds(y) = p / (1 - p), where log p is the answer's log-probability per token

    The cross-entropy is as in the authors' code and TRL: over prompt and answer, the mean over all tokens of the
    batch. Means are over the global batch; in TRL, they are over each microbatch.

    Args:
        beta: lambda of the paper.
        sft_prompt: whether the cross-entropy includes the prompts of chosen answers.
    """

    # The cross-entropy is part of the method.
    sft = 1.0

    def __init__(self, *, beta: PositiveFloat = 0.1, sft_prompt: bool = True):
        self.beta = beta
        self.sft_prompt = sft_prompt

    def pair_losses(self, answers: AnswerPairs) -> jax.Array:
        """Return the odds ratio term of each pair."""
        mean_log_probs = answers.mean_log_probs
        log_odds = []
        for log_probs_BP in (mean_log_probs.chosen, mean_log_probs.rejected):
            # A probability of 1 has no odds. The log-probability of a missing sequence is an empty sum, 0, and would
            # make gradients NaN.
            below_one_BP = jnp.minimum(log_probs_BP, -jnp.finfo(log_probs_BP.dtype).eps)
            log_odds.append(below_one_BP - jnp.log(-jnp.expm1(below_one_BP)))
        chosen_BP, rejected_BP = log_odds
        return self.beta * _logistic(chosen_BP - rejected_BP)


@component
class SimPO(PairLoss):
    """Simple preference optimization (Meng et al. 2024, arXiv 2405.14734, equation 6); no reference.

    loss = -log sigmoid(beta (log pi(chosen) / |chosen| - log pi(rejected) / |rejected|) - gamma)

    Args:
        beta: scale of the log-probabilities per token.
        gamma: target margin; the authors recommend starting with 0.3 to 0.5 times beta.
        label_smoothing: probability that a preference is wrong.
        sft: weight of the mean cross-entropy of chosen answers' tokens, added to the loss (CPO-SimPO).
    """

    def __init__(
        self,
        *,
        beta: PositiveFloat = 2.0,
        gamma: NonNegativeFloat = 1.0,
        label_smoothing: Fraction = 0.0,
        sft: NonNegativeFloat = 0.0,
    ):
        self.beta = beta
        self.gamma = gamma
        self.label_smoothing = label_smoothing
        self.sft = sft

    def pair_losses(self, answers: AnswerPairs) -> jax.Array:
        """Return the loss of each pair; gamma is not part of the rewards."""
        rewards = self.rewards(answers)
        return _logistic(rewards.chosen - rewards.rejected - self.gamma, self.label_smoothing)


def _sum_answers(log_probs_BS: jax.Array, batch: dict[str, jax.Array]) -> AnswerPairs:
    """Return the sums over answers; without a reference, the log-ratios are zeros."""
    token_weights_BS = batch["weights"]
    segments_BS = batch["segments"]

    def sums(values_BS: jax.Array) -> Pairs:
        return split_pairs(sum_sequences(token_weights_BS * values_BS, segments_BS))

    log_ratios_BS = jnp.zeros_like(log_probs_BS)
    if "reference" in batch:
        log_ratios_BS = log_probs_BS - batch["reference"]
    return AnswerPairs(
        log_probs=sums(log_probs_BS), log_ratios=sums(log_ratios_BS), lengths=sums(jnp.ones_like(log_probs_BS))
    )


def _logistic(margins_BP: jax.Array, smoothing: float = 0.0) -> jax.Array:
    """Return -log sigmoid(margin), with a fraction `smoothing` of the preferences assumed to be reversed."""
    losses_BP = -jax.nn.log_sigmoid(margins_BP)
    if smoothing == 0:
        return losses_BP
    return (1 - smoothing) * losses_BP - smoothing * jax.nn.log_sigmoid(-margins_BP)
