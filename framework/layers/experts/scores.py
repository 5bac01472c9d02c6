"""Conversion of router logits to each token's experts and their shares, and the balance of the experts' load.

Pure functions of arrays. E is the number of experts, K the number of experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Score = Literal["softmax", "softmax_chosen", "sigmoid"]
Scope = Literal["sequence", "batch"]
GroupScore = Literal["best", "best_two"]


@dataclass(frozen=True)
class GroupLimit:
    """Limits a token's experts to a few groups; the first E / groups experts form the first group.

    Attributes:
        groups: number of groups; divides E.
        top_groups: number of groups that a token's experts may come from.
        score: a group's score is that of its "best" expert (DeepSeek-V2, arXiv 2405.04434, section 2.2.2), or the sum
            of its "best_two" (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, with K / top_groups = 2).
    """

    groups: int
    top_groups: int
    score: GroupScore


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertChoice:
    """The experts of each token.

    Attributes:
        experts_BSK: int32, the experts in the order of their scores; for equal scores, the lower number comes first.
        shares_BSK: the weight of each of these experts, in the dtype of the logits.
    """

    experts_BSK: jax.Array
    shares_BSK: jax.Array


def choose(
    logits_BSE: jax.Array,
    bias_E: jax.Array | None,
    *,
    top_k: int,
    score: Score,
    normalize: bool,
    scale: float,
    limit: GroupLimit | None = None,
) -> ExpertChoice:
    """Choose each token's experts.

    Args:
        logits_BSE: float32 or wider.
        bias_E: added to the scores that determine the choice, not to the shares (DeepSeek-V3, arXiv 2412.19437,
            equation 16); None for no bias.
        top_k: K.
        score: "softmax" over all experts, before the choice (Switch, Mixtral, Qwen3-MoE); "softmax_chosen" over the
            chosen ones (Shazeer et al. 2017, arXiv 1701.06538, equation 4; gpt-oss); "sigmoid" of each (DeepSeek-V3).
        normalize: divide the shares by their sum.
        scale: factor on the shares, applied last.
        limit: the groups that the experts may come from; None means any.
    """
    scores_BSE = logits_BSE
    if score == "softmax":
        scores_BSE = jax.nn.softmax(logits_BSE, axis=-1)
    elif score == "sigmoid":
        scores_BSE = jax.nn.sigmoid(logits_BSE)
    ranks_BSE = scores_BSE if bias_E is None else scores_BSE + bias_E.astype(scores_BSE.dtype)
    # The choice has no gradient, because it is a step function of the scores.
    ranks_BSE = jax.lax.stop_gradient(ranks_BSE)
    if limit is not None:
        # Axes: G groups of M members; T of the groups are chosen.
        ranks_BSGM = ranks_BSE.reshape(*ranks_BSE.shape[:2], limit.groups, -1)
        num_counted = 1 if limit.score == "best" else 2
        best_BSGN, _ = jax.lax.top_k(ranks_BSGM, num_counted)
        _, groups_BST = jax.lax.top_k(jnp.sum(best_BSGN, axis=-1), limit.top_groups)
        is_top_BSG = jnp.any(jax.nn.one_hot(groups_BST, limit.groups, dtype=bool), axis=2)
        is_allowed_BSE = jnp.repeat(is_top_BSG, ranks_BSGM.shape[-1], axis=-1)
        ranks_BSE = jnp.where(is_allowed_BSE, ranks_BSE, -jnp.inf)
    _, experts_BSK = jax.lax.top_k(ranks_BSE, top_k)
    shares_BSK = jnp.take_along_axis(scores_BSE, experts_BSK, axis=-1)
    if score == "softmax_chosen":
        shares_BSK = jax.nn.softmax(shares_BSK, axis=-1)
    if normalize:
        sums_BS1 = jnp.sum(shares_BSK, axis=-1, keepdims=True)
        # All sigmoids may underflow to 0. The smallest normal number avoids 0 / 0, and is lost in any other sum.
        tiny = jnp.finfo(sums_BS1.dtype).tiny
        shares_BSK = shares_BSK / (sums_BS1 + tiny)
    return ExpertChoice(experts_BSK, shares_BSK * jnp.asarray(scale, shares_BSK.dtype))


def probabilities(logits_BSE: jax.Array, score: Score) -> jax.Array:
    """Return each token's scores as a distribution over all experts, [B, S, E]: sigmoids are divided by their sum."""
    if score == "sigmoid":
        # Computed from logarithms, because all sigmoids may underflow.
        return jax.nn.softmax(jax.nn.log_sigmoid(logits_BSE), axis=-1)
    return jax.nn.softmax(logits_BSE, axis=-1)


def loads(experts_BSK: jax.Array, weights_BS: jax.Array, num_experts: int) -> jax.Array:
    """Count the tokens of each sequence that chose each expert, by their weights: [B, E] in the weights' dtype."""
    chosen_BSE = jnp.sum(jax.nn.one_hot(experts_BSK, num_experts, dtype=weights_BS.dtype), axis=2)
    return jnp.einsum("bse,bs->be", chosen_BSE, weights_BS)


def balance_loss(
    loads_BE: jax.Array, probabilities_BSE: jax.Array, weights_BS: jax.Array, top_k: int, scope: Scope
) -> jax.Array:
    """Compute E * sum_e(f_e * P_e), times the number of tokens: a scalar, 1 per token if all experts are used equally.

    f_e is the share of the choices that fell on expert e, P_e its mean probability (Fedus et al. 2021, arXiv
    2101.03961, equations 4 to 6; with K choices, each counts 1/K).

    Args:
        loads_BE: the result of `loads`; no gradient flows through it.
        probabilities_BSE: the result of `probabilities`.
        weights_BS: weights of the tokens; 0 excludes a token.
        top_k: K.
        scope: f and P are means over each "sequence" (DeepSeek-V3, equations 17 to 20), or over the whole "batch".
    """
    num_experts = loads_BE.shape[-1]
    masses_BE = jnp.einsum("bse,bs->be", probabilities_BSE, weights_BS)
    loads_BE = jax.lax.stop_gradient(loads_BE)
    counts_B = jnp.sum(weights_BS, axis=-1)
    if scope == "batch":
        loads_BE = jnp.sum(loads_BE, axis=0, keepdims=True)
        masses_BE = jnp.sum(masses_BE, axis=0, keepdims=True)
        counts_B = jnp.sum(counts_B, keepdims=True)
    # A sequence without counted tokens has no loads either: 0 / 1.
    divisors_B = jnp.where(counts_B > 0, counts_B, 1.0)
    products_B = jnp.sum(loads_BE * masses_BE, axis=-1) / divisors_B
    return num_experts / top_k * jnp.sum(products_B)
