"""Distillation: a student learns the distribution of a teacher, given by the most likely tokens at each position.

`framework.batch_transforms.teacher` adds the teacher's arrays to a batch:

    teacher_ids        int32[B, S, K]    the teacher's K most likely tokens at each position, in descending order
    teacher_log_probs  float32[B, S, K]  their log-probabilities, in nats
    teacher_tail       float32[B, S]     the log of the total probability of all other tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import annotated_types as at
import jax
import jax.numpy as jnp

from plimsoll.framework.config import PositiveFloat, Probability, component
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import LossAndMetrics, apply_softcap
from plimsoll.framework.layers.objective import Head, Objective
from plimsoll.framework.layout import Nested

Divergence = Literal["forward", "reverse", "jsd"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenInputs:
    """Inputs of the loss of positions, in addition to their logits.

    Attributes:
        targets_BS: int32, the next tokens.
        weights_BS: f32, the share of each position in the loss; 0 if it does not count.
        ids_BSK: int32, the teacher's most likely tokens, all different where the weight is not 0.
        log_probs_BSK: f32, their log-probabilities.
        tail_BS: f32, the log of the total probability of all other tokens.
    """

    targets_BS: jax.Array
    weights_BS: jax.Array
    ids_BSK: jax.Array
    log_probs_BSK: jax.Array
    tail_BS: jax.Array


@component
class Distillation(Objective):
    """The divergence of teacher and student at each counted target, plus the next tokens' cross-entropy.

    The vocabulary is divided into K + 1 parts, the same for both: each of the teacher's K most likely tokens, and one
    bucket of all other tokens, whose probability is their sum. Nothing is renormalized over the K tokens, and no
    probability outside of them is dropped: the student learns the total probability of the bucket, but not how it is
    divided. With p_1 .. p_K+1 the teacher's probabilities of these parts, q_1 .. q_K+1 the student's, and T the
    temperature,

        p_j(T) = p_j^(1/T) / sum_i p_i^(1/T),  and the same for q_j(T): the temperature is applied to the parts
        forward  D = sum_j p_j(T) log (p_j(T) / q_j(T))                          KL(teacher || student)
        reverse  D = sum_j q_j(T) log (q_j(T) / p_j(T))                          KL(student || teacher)
        jsd      D = beta KL(p(T) || m) + (1 - beta) KL(q(T) || m),  m = beta p(T) + (1 - beta) q(T)

        loss = (1 - alpha) T^2 D + alpha nll

    With K = V the bucket is empty, and these are the divergences of the whole distributions, at every T; otherwise D
    is at most that of the whole distributions (T = 1; data-processing inequality). T^2 keeps the size of the
    gradients the same when the temperature changes (Hinton et al. 2015, arXiv 1503.02531, section 2). The generalized
    Jensen-Shannon divergence is that of GKD (Agarwal et al. 2023, arXiv 2306.13649, equation 1), which has no T^2.

    Args:
        divergence: "forward" spreads the student over everything that the teacher finds likely, "reverse" lets it
            choose among that, "jsd" interpolates between the two.
        beta: for jsd, the teacher's share of the mixture.
        temperature: T; above 1, less likely tokens count more.
        alpha: share of the next tokens' cross-entropy in the loss; with 0, only the teacher counts.
    """

    arrays = ("teacher_ids", "teacher_log_probs", "teacher_tail")

    def __init__(
        self,
        *,
        divergence: Divergence = "forward",
        beta: Annotated[float, at.Interval(gt=0, lt=1)] = 0.5,
        temperature: PositiveFloat = 1.0,
        alpha: Probability = 0.5,
    ):
        if not math.isfinite(temperature):
            raise ValueError(f"temperature = {temperature}: expected a finite number over 0")
        self.divergence: Divergence = divergence
        self.beta = beta
        self.temperature = temperature
        self.alpha = alpha

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context) -> LossAndMetrics:
        """Return the mean over counted targets; see `distillation_loss` for the metrics."""
        assert ctx.num_targets is not None
        batch = ctx.batch
        inputs = TokenInputs(
            targets_BS=batch["targets"],
            # Divided by the targets of the global batch, so that the microbatches add up to its mean.
            weights_BS=batch["weights"] / ctx.num_targets,
            ids_BSK=batch["teacher_ids"],
            log_probs_BSK=batch["teacher_log_probs"],
            tail_BS=batch["teacher_tail"],
        )
        compute_loss = partial(distillation_loss, objective=self, softcap=head.softcap)
        return head.sum_loss(compute_loss, weights, x_BSD, ctx, inputs)

    def compute_divergence(self, teacher_BSJ: jax.Array, student_BSJ: jax.Array) -> jax.Array:
        """Return D at each position, [B, S], from log-probabilities of the parts at temperature T."""
        if self.divergence == "forward":
            return _kl(teacher_BSJ, student_BSJ)
        if self.divergence == "reverse":
            return _kl(student_BSJ, teacher_BSJ)
        beta = self.beta
        mixture_BSJ = jnp.logaddexp(teacher_BSJ + math.log(beta), student_BSJ + math.log1p(-beta))
        return beta * _kl(teacher_BSJ, mixture_BSJ) + (1 - beta) * _kl(student_BSJ, mixture_BSJ)

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return means over counted targets, and the perplexity of the next tokens, exp(nll)."""
        tokens = max(totals["tokens"], 1.0)
        means = {name: totals[name] / tokens for name in ("loss", "kl", "nll", "agreement")}
        # The exponential of more than that does not fit into a float64.
        perplexity = math.inf if means["nll"] > 700 else math.exp(means["nll"])
        return {**means, "perplexity": perplexity, "tokens": totals["tokens"]}


def distillation_loss(
    product_BSV: jax.Array, inputs: TokenInputs, *, objective: Distillation, softcap: float | None
) -> LossAndMetrics:
    """Compute the weighted loss of positions from their logits.

    Args:
        product_BSV: normed hidden states times the output table, f32 or wider: the logits before the softcap.
        inputs: inputs of these positions.
        objective: provides the divergence and its settings.
        softcap: see LMHead.

    Returns:
        (f32 scalar, metrics): sums over positions of the weight times the loss, and times each metric: "kl",
        KL(teacher || student) over the parts at T = 1, regardless of the divergence that is minimized; "nll" of the
        next token; "agreement", whether both have the same most likely token.
    """
    logits_BSV = apply_softcap(product_BSV, softcap)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    targets_BS1 = inputs.targets_BS[..., None]
    nll_BS = lse_BS - jnp.take_along_axis(logits_BSV, targets_BS1, axis=-1)[..., 0]
    student_BSJ = _compute_student_log_probs(logits_BSV, lse_BS, inputs.ids_BSK)
    # The teacher's log-probabilities of the parts, as stored, in the logits' dtype.
    teacher_BSJ = inputs.log_probs_BSK.astype(logits_BSV.dtype)
    if teacher_BSJ.shape[-1] < logits_BSV.shape[-1]:
        tail_BS1 = inputs.tail_BS[..., None].astype(logits_BSV.dtype)
        teacher_BSJ = jnp.concatenate([teacher_BSJ, tail_BS1], axis=-1)
    # Both are normalized again, so that rounding errors of the stored numbers do not contribute to the divergence.
    temperature = objective.temperature
    tempered_teacher_BSJ = jax.nn.log_softmax(teacher_BSJ / temperature, axis=-1)
    tempered_student_BSJ = jax.nn.log_softmax(student_BSJ / temperature, axis=-1)
    divergence_BS = temperature**2 * objective.compute_divergence(tempered_teacher_BSJ, tempered_student_BSJ)
    kl_BS = _kl(jax.nn.log_softmax(teacher_BSJ, axis=-1), student_BSJ)
    agreement_BS = jnp.argmax(logits_BSV, axis=-1) == inputs.ids_BSK[..., 0]
    alpha = objective.alpha
    weights_BS = inputs.weights_BS
    loss = jnp.sum(weights_BS * ((1 - alpha) * divergence_BS + alpha * nll_BS))
    metrics = {
        "kl": jnp.sum(weights_BS * kl_BS),
        "nll": jnp.sum(weights_BS * nll_BS),
        "agreement": jnp.sum(weights_BS * agreement_BS),
    }
    return loss, jax.lax.stop_gradient(metrics)


def _compute_student_log_probs(logits_BSV: jax.Array, lse_BS: jax.Array, ids_BSK: jax.Array) -> jax.Array:
    """Return the student's log-probabilities of the parts, [B, S, K + 1]; [B, S, V] if every token is a part."""
    picked_BSK = jnp.take_along_axis(logits_BSV, ids_BSK, axis=-1)
    if ids_BSK.shape[-1] == logits_BSV.shape[-1]:
        bucket_logits_BSJ = picked_BSK
    else:
        # This sums over the other tokens: 1 minus the sum of the K would have no accurate digits where it is small.
        others_BSV = jnp.put_along_axis(logits_BSV, ids_BSK, -jnp.inf, axis=-1, inplace=False)
        tail_BS1 = jax.nn.logsumexp(others_BSV, axis=-1, keepdims=True)
        bucket_logits_BSJ = jnp.concatenate([picked_BSK, tail_BS1], axis=-1)
    return bucket_logits_BSJ - lse_BS[..., None]


def _kl(p_BSJ: jax.Array, q_BSJ: jax.Array) -> jax.Array:
    """Return KL(p || q) at each position, [B, S], from log-probabilities."""
    return jnp.sum(jnp.exp(p_BSJ) * (p_BSJ - q_BSJ), axis=-1)
