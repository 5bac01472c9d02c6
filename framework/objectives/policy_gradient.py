"""Policy-gradient losses over answers that the model itself sampled, each with its reward.

`framework.batch_transforms.rollouts` samples the answers and completes a batch. At every column whose target is a token
of an answer, `advantages` is the answer's advantage relative to the others of its group, and `behavior` is the
log-probability of that token when it was sampled. It is NaN if unknown; the answer is then treated as the current
model's own. At the last column of an answer, `rewards` is its reward, and `spreads` the standard deviation of its
group's rewards. All are f32[B, S].
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from plimsoll.framework.config import NonNegativeFloat, PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import LossAndMetrics
from plimsoll.framework.layers.objective import Head, Objective
from plimsoll.framework.layout import Nested
from plimsoll.framework.objectives.sequences import sum_sequences

# Rewards of a group whose standard deviation is below this are equal up to rounding.
_NO_SPREAD = 1e-6


@component
class GRPO(Objective):
    """Group relative policy optimization (DeepSeekMath, arXiv 2402.03300, equation 3).

    For a token y_t of an answer with the advantage A, with ratio = pi(y_t) / pi_sampler(y_t):

        loss_t = -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A) + beta KL_t
        KL_t = ref(y_t) / pi(y_t) - log(ref(y_t) / pi(y_t)) - 1      (k3 of Schulman 2020)

    Args:
        normalization: how the tokens' losses are averaged. "grpo": over the tokens of each answer, then over answers;
            "dapo": over all tokens of the batch (arXiv 2503.14476); "dr_grpo": their sum is divided by the number of
            answers times `answer_tokens`, so that no length is favored (arXiv 2503.20783).
        epsilon: how far the ratio may fall below 1 and still have a gradient.
        epsilon_high: how far it may rise above 1 and still have a gradient; None for `epsilon`.
        beta: weight of the KL divergence from a reference, whose log-probabilities the batch must then have.
        unbiased_kl: multiply KL_t by the ratio, which makes its gradient an unbiased estimate of the divergence's
            gradient (DeepSeek-V3.2, arXiv 2512.02556; TRL does the same). False computes KL_t as in the DeepSeekMath
            paper.
        answer_tokens: maximum length of an answer, the same as `data.answer_tokens`; only for "dr_grpo".

    In an evaluation, answers have no advantage, and "loss" is the negative mean reward.
    """

    unit = "advantage per token"

    def __init__(
        self,
        *,
        normalization: Literal["grpo", "dapo", "dr_grpo"] = "dapo",
        epsilon: PositiveFloat = 0.2,
        epsilon_high: PositiveFloat | None = None,
        beta: NonNegativeFloat = 0.0,
        unbiased_kl: bool = True,
        answer_tokens: PositiveInt | None = None,
    ):
        if epsilon >= 1.0:
            raise ValueError(f"GRPO.epsilon: expected less than 1, as ratios are positive, given {epsilon}")
        if (normalization == "dr_grpo") != (answer_tokens is not None):
            raise ValueError(
                f"GRPO.answer_tokens = {answer_tokens} with normalization = {normalization}: "
                "expected a number with dr_grpo, and None with the others"
            )
        self.normalization = normalization
        self.epsilon_low = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high
        self.beta = beta
        self.unbiased_kl = unbiased_kl
        self.answer_tokens = answer_tokens
        arrays = ("ends", "segments", "advantages", "behavior", "rewards", "spreads")
        self.arrays = (*arrays, "reference") if beta else arrays

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context) -> LossAndMetrics:
        """Return the mean over the tokens of all answers, according to `normalization`."""
        batch = ctx.batch
        log_probs_BS = head.log_probs(weights, x_BSD, ctx)
        token_weights_BS = batch["weights"]
        advantages_BS = batch["advantages"]
        is_counted_BS = token_weights_BS > 0
        # If the log-probabilities of an answer when it was sampled are unknown, the current model's replace them: the
        # ratio is 1 there, and its gradient that of the log-probability.
        current_BS = jax.lax.stop_gradient(log_probs_BS)
        behavior_BS = jnp.where(jnp.isnan(batch["behavior"]), current_BS, batch["behavior"])
        # After an answer, `behavior` is 0 and the target is padding: the exponential of their difference could be
        # infinite.
        log_ratios_BS = jnp.where(is_counted_BS, log_probs_BS - behavior_BS, 0.0)
        ratios_BS = jnp.exp(log_ratios_BS)
        clipped_BS = jnp.clip(ratios_BS, 1 - self.epsilon_low, 1 + self.epsilon_high)
        losses_BS = -jnp.minimum(ratios_BS * advantages_BS, clipped_BS * advantages_BS)
        divergences_BS = None
        if self.beta:
            log_ref_ratios_BS = jnp.where(is_counted_BS, batch["reference"] - log_probs_BS, 0.0)
            divergences_BS = jnp.exp(log_ref_ratios_BS) - log_ref_ratios_BS - 1
            if self.unbiased_kl:
                divergences_BS = divergences_BS * ratios_BS
            losses_BS = losses_BS + self.beta * divergences_BS
        loss = jnp.sum(self._token_shares(ctx) * losses_BS)
        metrics = self._metrics(ratios_BS, divergences_BS, behavior_BS, ctx)
        return loss, jax.lax.stop_gradient(metrics)

    def _token_shares(self, ctx: Context) -> jax.Array:
        """Return f32[B, S], the share of each token's loss in the loss of the global batch."""
        assert ctx.num_sequences is not None
        assert ctx.num_targets is not None
        token_weights_BS = ctx.batch["weights"]
        if self.normalization == "dapo":
            return token_weights_BS / ctx.num_targets
        if self.answer_tokens is not None:
            return token_weights_BS / (ctx.num_sequences * self.answer_tokens)
        segments_BS = ctx.batch["segments"]
        lengths_BN = sum_sequences(token_weights_BS, segments_BS)
        # Padding has the number 0; its weight is 0, so its length does not matter.
        indices_BS = jnp.maximum(segments_BS - 1, 0)
        lengths_BS = jnp.take_along_axis(lengths_BN, indices_BS, axis=1)
        return token_weights_BS / (jnp.maximum(lengths_BS, 1.0) * ctx.num_sequences)

    def _metrics(
        self, ratios_BS: jax.Array, divergences_BS: jax.Array | None, behavior_BS: jax.Array, ctx: Context
    ) -> dict[str, jax.Array]:
        """Return means over answers (reward, reward_std of groups, flat_groups, length) and over tokens (others)."""
        assert ctx.num_sequences is not None
        assert ctx.num_targets is not None
        batch = ctx.batch
        answer_shares_BS = batch["ends"] / ctx.num_sequences
        token_shares_BS = batch["weights"] / ctx.num_targets
        advantages_BS = batch["advantages"]
        is_low_BS = (ratios_BS < 1 - self.epsilon_low) & (advantages_BS < 0)
        is_high_BS = (ratios_BS > 1 + self.epsilon_high) & (advantages_BS > 0)
        metrics = {
            "reward": jnp.sum(answer_shares_BS * batch["rewards"]),
            "reward_std": jnp.sum(answer_shares_BS * batch["spreads"]),
            "flat_groups": jnp.sum(answer_shares_BS * (batch["spreads"] < _NO_SPREAD)),
            "length": jnp.sum(batch["weights"]) / ctx.num_sequences,
            "clipped": jnp.sum(token_shares_BS * (is_low_BS | is_high_BS)),
            # The mean of -log pi over tokens sampled from pi: an unbiased estimate of its entropy.
            "entropy": -jnp.sum(token_shares_BS * behavior_BS),
        }
        if divergences_BS is not None:
            metrics["kl"] = jnp.sum(token_shares_BS * divergences_BS)
        return metrics

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the mean reward and length of the answers to held-out prompts; "loss" is the negative reward."""
        answers = max(totals["sequences"], 1.0)
        reward = totals["reward"] / answers
        return {"loss": -reward, "reward": reward, "length": totals["length"] / answers, "answers": totals["sequences"]}
