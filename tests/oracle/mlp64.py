"""The reference's feed-forward blocks and mixtures of experts, from the published formulas, in plain JAX.

Every expert is computed for every token and weighted with the token's share. Rows are not sorted or sharded.

Axis letters: B sequences, S positions, D width, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tests.oracle.experiments import MLP, LoRA, Mixture, Router

Parameters = dict[str, jax.Array]
Linear = Callable[[str, jax.Array], jax.Array]  # (name of a linear layer, its input) -> its output


def mlp(one: MLP, linear: Linear, x: jax.Array) -> jax.Array:
    """Return down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""
    activation = {
        "gelu": lambda x: 0.5 * x * (1.0 + jax.lax.erf(x / math.sqrt(2.0))),
        "gelu_tanh": lambda x: 0.5 * x * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1.0 + jnp.exp(-x)),
        "relu": lambda x: jnp.where(x > 0, x, 0.0),
        "relu_squared": lambda x: jnp.where(x > 0, x, 0.0) ** 2,
    }[one.activation]
    if one.gated:
        return linear("down", activation(linear("gate", x)) * linear("up", x))
    return linear("down", activation(linear("up", x)))


def mixture(
    one: Mixture,
    lora: LoRA | None,
    params: Parameters,
    home: str,
    target: str,
    linear: Linear,
    x_BSD: jax.Array,
    batch: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Return (shared(x) + sum_e share_e expert_e(x) [B, S, D], the router's losses).

    A gate g makes the first term sigmoid(x g) shared(x) (arXiv 2407.10671). The names of the parameters start with
    `home`; `lora.targets` is searched for in `target`.
    """
    logits_BSE = x_BSD @ params[f"{home}/router/weight"] + params.get(f"{home}/router/bias", 0.0)
    scores_BSE, is_chosen_BSE, shares_BSE = _route(one.router, logits_BSE)

    def expert_linear(expert: int, name: str, x: jax.Array) -> jax.Array:
        own = f"{home}/experts/{name}"
        y = x @ params[own][expert]
        if one.expert.bias:
            y = y + params[f"{own}_bias"][expert]
        if lora is None or "experts" not in lora.targets or not re.search(lora.targets, f"{target}/experts/{name}"):
            return y
        return y + (lora.alpha / lora.rank) * x @ params[f"{own}_lora_a"][expert] @ params[f"{own}_lora_b"][expert]

    y_BSD = jnp.zeros_like(x_BSD)
    if one.shared is not None:
        y_BSD = mlp(one.shared, lambda name, x: linear(f"shared/{name}", x), x_BSD)
        if one.shared_gate:
            y_BSD = y_BSD / (1.0 + jnp.exp(-linear("shared_gate", x_BSD)))
    for expert in range(one.router.experts):
        y_BSD = y_BSD + shares_BSE[..., expert, None] * mlp(one.expert, partial(expert_linear, expert), x_BSD)
    return y_BSD, _losses(one.router, logits_BSE, scores_BSE, is_chosen_BSE, batch)


def _route(router: Router, logits_BSE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (scores of all experts, mask of the chosen experts, shares of all experts); other shares are 0."""
    exponentials_BSE = jnp.exp(logits_BSE)
    if router.score == "sigmoid":
        scores_BSE = 1.0 / (1.0 + jnp.exp(-logits_BSE))
    else:
        scores_BSE = exponentials_BSE / jnp.sum(exponentials_BSE, axis=-1, keepdims=True)
    # An expert is chosen if fewer than top_k have a larger logit, because every score increases with the logit.
    num_larger_BSE = jnp.sum(logits_BSE[..., None, :] > logits_BSE[..., :, None], axis=-1)
    is_chosen_BSE = num_larger_BSE < router.top_k
    # A softmax over the chosen experts is the softmax over all, divided by its sum over the chosen.
    shares_BSE = jnp.where(is_chosen_BSE, scores_BSE, 0.0)
    if router.normalize or router.score == "softmax_chosen":
        shares_BSE = shares_BSE / jnp.sum(shares_BSE, axis=-1, keepdims=True)
    return scores_BSE, is_chosen_BSE, router.scale * shares_BSE


def _losses(
    router: Router, logits_BSE: jax.Array, scores_BSE: jax.Array, is_chosen_BSE: jax.Array, batch: dict[str, Any]
) -> jax.Array:
    """Return the sum of z loss and balance loss with their coefficients, as weighted means over targets.

    The z loss is logsumexp(logits)^2 (arXiv 2202.08906, equation 5), the balance loss E * sum_e(f_e * P_e) (arXiv
    2101.03961, equations 4 to 6). f_e is the fraction of choices that select expert e, and P_e the mean of its score as
    a fraction of all experts' scores. Both are per sequence, or over all sequences of a microbatch: those with the same
    index modulo the number of microbatches.
    """
    weights_BS, total = batch["weights"], batch["total"]
    sizes_BS = jnp.log(jnp.sum(jnp.exp(logits_BSE), axis=-1))
    loss = router.z * jnp.sum(weights_BS * sizes_BS**2) / total
    probabilities_BSE = scores_BSE / jnp.sum(scores_BSE, axis=-1, keepdims=True)
    rows = weights_BS.shape[0]
    parts = range(rows) if router.balance_over == "sequence" else range(batch["microbatches"])
    for part in parts:
        weights_bS1 = weights_BS[part :: len(parts), :, None]
        count = jnp.sum(weights_bS1)
        divisor = jnp.where(count > 0, count, 1.0)  # without targets, the sums over them are 0 too
        used_E = jnp.sum(weights_bS1 * is_chosen_BSE[part :: len(parts)], axis=(0, 1)) / (router.top_k * divisor)
        mean_E = jnp.sum(weights_bS1 * probabilities_BSE[part :: len(parts)], axis=(0, 1)) / divisor
        loss = loss + router.balance * router.experts * jnp.sum(used_E * mean_E) * count / total
    return loss
