"""The router: assigns experts to each token, and keeps the load balanced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from plimsoll.framework.config import (
    Config,
    FiniteNonNegative,
    Fraction,
    PositiveFloat,
    PositiveInt,
    component,
    config_for,
)
from plimsoll.framework.layers.base import Context, Layer
from plimsoll.framework.layers.experts import scores
from plimsoll.framework.layers.experts.scores import ExpertChoice, GroupLimit, GroupScore, Scope, Score
from plimsoll.framework.layout import Nested, ParameterSpec, TensorSpec, fold_in_name, nearest_divisors


@dataclass(frozen=True)
class Routing:
    """The router's results for a batch.

    Attributes:
        choice: each token's experts and their shares.
        loss: scalar, the balance and z losses times their coefficients, divided by ctx.num_targets; None outside of
            training, and if all coefficients are 0.
        metrics: scalars by name, means over counted targets; {} outside of training.
        buffers: new values of the router's buffers.
    """

    choice: ExpertChoice
    loss: jax.Array | None
    metrics: dict[str, jax.Array]
    buffers: Nested


@component
class Router(Layer):
    """A linear map to one logit per expert, in float32 regardless of the compute dtype.

    Losses and metrics are over counted targets, like the model's loss: padding and prompts with weight 0 are excluded.

    Args:
        dim: D, the width of the residual stream; set by the parent.
        num_experts: E, the number of experts; set by the parent.
        top_k: K, the number of experts per token.
        score: how logits become scores for the choice and the shares, see `framework.layers.experts.scores.choose`.
        normalize: divide the shares of the chosen experts by their sum (norm_topk_prob of a config.json).
        scale: factor on the shares (routed_scaling_factor).
        groups: number of groups of equal size that the experts form (n_group); a token's experts come from a few of
            them. 1 means no limit.
        top_groups: number of groups that a token's experts may come from (topk_group).
        group_score: how groups are scored, see `framework.layers.experts.scores.GroupLimit`.
        jitter: in training, the router's input is multiplied by random numbers from 1 - jitter to 1 + jitter (Fedus
            et al. 2021, arXiv 2101.03961, appendix C); the experts' input is not.
        balance: coefficient of the load-balancing loss, which is 1 if all experts are used equally.
        balance_over: balance the load of each "sequence" or of the "batch". A batch is one microbatch of all devices,
            so with learner.accumulate only "sequence" gives the same loss as without.
        z: coefficient of the z loss, the mean of logsumexp(logits)^2.
        bias_rate: step size of each expert's selection bias. After each step, the bias increases by this if the batch
            chose the expert less than the mean expert, and otherwise decreases (Wang et al. 2024, arXiv 2408.15664;
            DeepSeek-V3 uses 0.001 with score = sigmoid). None means that there is no such bias.
        selection_bias: whether each expert has a constant selection bias, as in published models that were balanced
            with biases (e_score_correction_bias of DeepSeek-V3); initially zero, and not trained.
        logit_bias: whether the logits have a learned bias, initially zero (gpt-oss); it affects choice, shares and
            losses.
        expert_metrics: also report each expert's share of the choices, as load/0, load/1, ...
        init: config of the initializer of the weight.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        num_experts: PositiveInt,
        top_k: PositiveInt = 2,
        score: Score = "softmax",
        normalize: bool = True,
        scale: PositiveFloat = 1.0,
        groups: PositiveInt = 1,
        top_groups: PositiveInt = 1,
        group_score: GroupScore = "best",
        jitter: Fraction = 0.0,
        balance: FiniteNonNegative = 0.01,
        balance_over: Scope = "sequence",
        z: FiniteNonNegative = 0.0,
        bias_rate: PositiveFloat | None = None,
        selection_bias: bool = False,
        logit_bias: bool = False,
        expert_metrics: bool = False,
        init: Config = config_for(jax.nn.initializers.normal, stddev=0.02),
    ):
        if top_k > num_experts:
            raise ValueError(f"top_k = {top_k} is more than num_experts = {num_experts}; expected 1 to {num_experts}")
        _check_groups(num_experts, top_k, groups, top_groups, group_score)
        if selection_bias and bias_rate is not None:
            raise ValueError(
                f"bias_rate = {bias_rate} with selection_bias = True; expected one of the two: a published model has "
                "constant biases"
            )
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.score: Score = score
        self.normalize = normalize
        self.scale = scale
        self.limit = None if groups == 1 else GroupLimit(groups, top_groups, group_score)
        self.jitter = jitter
        self.balance = balance
        self.balance_over: Scope = balance_over
        self.z = z
        self.bias_rate = bias_rate
        self.selection_bias = selection_bias
        self.logit_bias = logit_bias
        self.expert_metrics = expert_metrics
        self._init = init.instantiate()

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of weight [D, E] and, if there are any, bias [E] and selection_bias [E].

        E is not sharded over the `expert` axis: every device routes its own tokens among all experts.
        """
        weight = ParameterSpec(
            (self.dim, self.num_experts), "float32", ("fsdp", None), initializer=self._init, roles=("in", "router")
        )
        specs = {"weight": weight}
        if self.logit_bias:
            specs["bias"] = ParameterSpec((self.num_experts,), "float32", (None,), roles=("router",))
        if self.selection_bias:
            # In float32 whatever model.param_dtype is: in bfloat16, biases of about 10 would round to 0.06, which is
            # more than the differences between the scores of experts.
            specs["selection_bias"] = ParameterSpec(
                (self.num_experts,), "float32", (None,), roles=("router",), trainable=False, keeps_dtype=True
            )
        return specs

    def layer_buffer_specs(self) -> dict[str, TensorSpec]:
        """Return the specs of bias [E], updated up to the step before last, and loads [E], of the last step.

        There are none without bias_rate.
        """
        if self.bias_rate is None:
            return {}
        return {name: TensorSpec((self.num_experts,), "float32") for name in ("bias", "loads")}

    @property
    def depends_on_microbatches(self) -> bool:
        """True if the loss balances a microbatch. The bias moves once per step, regardless of microbatches."""
        return self.balance > 0.0 and self.balance_over == "batch"

    @staticmethod
    def _is_first_microbatch(ctx: Context) -> jax.Array | bool:
        """Return whether the loads contain nothing of the current step.

        The first microbatch of a step has the batch's first row.
        """
        if not ctx.training:
            return True
        assert ctx.rows is not None, "a bias needs row indices"
        return ctx.rows[0] == 0

    def __call__(self, weights: dict[str, jax.Array], x_BSD: jax.Array, ctx: Context, buffers: Nested) -> Routing:
        """Route the tokens x_BSD; `buffers` has the structure of `layer_buffer_specs`."""
        wide = jnp.promote_types(x_BSD.dtype, jnp.float32)
        inputs_BSD = self._apply_jitter(x_BSD.astype(wide), ctx)
        logits_BSE = inputs_BSD @ weights["weight"].astype(wide)
        if self.logit_bias:
            logits_BSE = logits_BSE + weights["bias"].astype(wide)
        bias_E = weights["selection_bias"] if self.selection_bias else None
        if self.bias_rate is not None:
            # The loads are complete when the next step begins, regardless of the number of microbatches, so that step's
            # first microbatch computes the update. The other microbatches find the bias updated, and loads of the
            # current step.
            missing = jnp.mean(buffers["loads"]) - buffers["loads"]
            updated = buffers["bias"] + self.bias_rate * jnp.sign(missing)
            bias_E = jnp.where(self._is_first_microbatch(ctx), updated, buffers["bias"])
        choice = scores.choose(
            logits_BSE,
            bias_E,
            top_k=self.top_k,
            score=self.score,
            normalize=self.normalize,
            scale=self.scale,
            limit=self.limit,
        )
        if not ctx.training:
            # A generation cache has no room for state that does not change.
            return Routing(choice, None, {}, {} if ctx.cache else buffers)
        if self.bias_rate is not None:
            loads_BE = scores.loads(choice.experts_BSK, ctx.batch["weights"], self.num_experts)
            loads_E = jnp.sum(loads_BE, axis=0).astype(jnp.float32)
            earlier_E = jnp.where(self._is_first_microbatch(ctx), 0.0, buffers["loads"])
            buffers = {"bias": bias_E, "loads": earlier_E + loads_E}
        elif ctx.cache:
            buffers = {}
        loss, metrics = self._compute_losses(logits_BSE, choice, ctx)
        return Routing(choice, loss, metrics, buffers)

    def _apply_jitter(self, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        if self.jitter == 0.0 or not ctx.training:
            return x_BSD
        assert ctx.rng is not None, "jitter needs a key"
        assert ctx.rows is not None, "jitter needs row indices"
        key = fold_in_name(ctx.rng, "jitter")
        draw = partial(jax.random.uniform, shape=x_BSD.shape[1:], dtype=x_BSD.dtype)
        # One key per global row, as for dropout, so that sharding and microbatching do not change the draw.
        factors_BSD = jax.vmap(
            lambda row: draw(jax.random.fold_in(key, row), minval=1.0 - self.jitter, maxval=1.0 + self.jitter)
        )(ctx.rows)
        return x_BSD * factors_BSD

    def _compute_losses(
        self, logits_BSE: jax.Array, choice: ExpertChoice, ctx: Context
    ) -> tuple[jax.Array | None, dict[str, jax.Array]]:
        """Return (the losses times their coefficients, metrics), both divided by ctx.num_targets."""
        assert ctx.num_targets is not None, "losses are means over targets"
        weights_BS = ctx.batch["weights"].astype(logits_BSE.dtype)
        probabilities_BSE = scores.probabilities(logits_BSE, self.score)
        loads_BE = scores.loads(choice.experts_BSK, weights_BS, self.num_experts)
        sums = {
            "balance": scores.balance_loss(loads_BE, probabilities_BSE, weights_BS, self.top_k, self.balance_over),
            # Zoph et al. 2022, arXiv 2202.08906, equation 5.
            "z": jnp.sum(jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1)) * weights_BS),
        }
        losses = []
        for name, coefficient in (("balance", self.balance), ("z", self.z)):
            if coefficient:
                losses.append(coefficient * sums[name] / ctx.num_targets)
        loads_E = jnp.sum(loads_BE, axis=0)
        # Times E / K: 1 is an expert's even share. With several microbatches, the maxima and minima are averaged.
        even_E = loads_E * (self.num_experts / self.top_k)
        # In nats.
        entropies_BS = jnp.sum(jax.scipy.special.entr(probabilities_BSE), axis=-1)
        sums |= {
            "entropy": jnp.sum(entropies_BS * weights_BS),
            "load_max": jnp.max(even_E),
            "load_min": jnp.min(even_E),
        }
        if self.expert_metrics:
            for expert in range(self.num_experts):
                sums[f"load/{expert}"] = even_E[expert]
        metrics = {
            name: jax.lax.stop_gradient(value / ctx.num_targets).astype(jnp.float32) for name, value in sums.items()
        }
        loss = sum(losses[1:], losses[0]) if losses else None
        return loss, metrics

    def flops_per_token(self, seq_len: int) -> float:
        """Count the product with the weight: 2 * D * E."""
        return 2.0 * self.dim * self.num_experts


def _check_groups(num_experts: int, top_k: int, groups: int, top_groups: int, group_score: GroupScore) -> None:
    """Raise ValueError if the groups differ in size, or the chosen groups have too few experts."""
    if num_experts % groups:
        raise ValueError(
            f"groups = {groups} does not divide num_experts = {num_experts}; "
            f"nearest that do: {nearest_divisors(num_experts, groups)}"
        )
    if top_groups > groups:
        raise ValueError(f"top_groups = {top_groups} is more than groups = {groups}; expected 1 to {groups}")
    group_size = num_experts // groups
    if top_k > top_groups * group_size:
        raise ValueError(
            f"top_k = {top_k} is more than the {top_groups * group_size} experts of top_groups = {top_groups}; "
            f"expected top_groups of at least {-(-top_k // group_size)}"
        )
    if groups > 1 and group_score == "best_two" and group_size < 2:
        raise ValueError(f"group_score = best_two with groups = {groups} of one expert each; expected best")
