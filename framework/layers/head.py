"""The last stage of a language model: final norm, logits, and the loss to minimize.

The default is the cross-entropy of the next tokens. An objective (`framework.layers.objective`) replaces it: a loss
over preferences, of a teacher, or of rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from plimsoll.framework.config import (
    Config,
    ConfigError,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    component,
    config_for,
    get_target,
)
from plimsoll.framework.config.names import get_dotted_name
from plimsoll.framework.layers.base import VOCAB_AXES, Context, Layer, Out, batch_shards, prepare_params, scale
from plimsoll.framework.layers.chunked_loss import (
    Chunks,
    ComputeLoss,
    LossAndMetrics,
    apply_softcap,
    by_position,
    compute_chunked_loss,
    token_log_probs,
    token_loss,
)
from plimsoll.framework.layers.logits_product import LogitsProduct, compute_logits
from plimsoll.framework.layers.low_precision import Recipe
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layers.objective import Objective, check_objective, compute_objective
from plimsoll.framework.layout import Nested, ParameterSpec, PyTree, fold_in_name

Inputs = TypeVar("Inputs")
# Names that an evaluation of a language model has already.
_OWN_NAMES = ("loss", "perplexity", "tokens", "sequences", "bytes", "bits_per_byte", "nll")


@component
class LMHead(Layer):
    """Computes the loss of ctx.batch["targets"], or logits, from x_BSD.

    Args:
        vocab_size: V, the number of logits per position; set by the model.
        dim: D, the width of the residual stream; set by the model.
        norm: config of the final norm.
        tied: use the embedding's table instead of a separate one.
        chunk_tokens: maximum number of tokens per device whose logits exist at once; 0 means all.
        gradient_tokens: maximum number of tokens per device whose logits' gradients are saved, in the compute dtype,
            until the table's gradient is computed from all of them at once; at least one chunk; 0 means all. If there
            are more tokens, they form several groups, and each group's gradient is reduced over the devices and added
            to a float32 sum.
        z_loss: weight of mean(logsumexp^2) (PaLM, arXiv 2204.02311).
        logit_divisor: divide the logits by this number, before the softcap (Granite: logits_scaling); None for 1.
        softcap: cap the logits: softcap * tanh(logits / softcap).
        init: config of the initializer of a separate table.
        objective: config of the loss that replaces the next tokens' cross-entropy, from framework.objectives.
        metrics: configs of functions whose mean over the counted targets evaluations report, by name. A function maps
            `logits`, float32 [B, S, V], and `targets`, int32 [B, S], to numbers [B, S]; it runs inside jit, on one
            chunk of positions at a time. Evaluations compute the logits a second time for it.
    """

    def __init__(
        self,
        *,
        vocab_size: PositiveInt,
        dim: PositiveInt,
        norm: Config = config_for(RMSNorm),
        tied: bool = False,
        chunk_tokens: int = 1024,
        gradient_tokens: int = 4096,
        z_loss: NonNegativeFloat = 0.0,
        logit_divisor: PositiveFloat | None = None,
        softcap: PositiveFloat | None = None,
        init: Config = config_for(jax.nn.initializers.normal, stddev=0.02),
        objective: Config | None = None,
        metrics: dict[str, Config] = {},  # noqa: B006
    ):
        bounds = {"chunk_tokens": chunk_tokens, "gradient_tokens": gradient_tokens}
        for name, tokens in bounds.items():
            if tokens < 0:
                raise ValueError(f"{name}: expected 0 (all at once) or more, given {tokens}")
        self.vocab_size = vocab_size
        self.dim = dim
        self.tied = tied
        self.chunk_tokens = chunk_tokens
        self.gradient_tokens = gradient_tokens
        self.z_loss = z_loss
        self.logit_divisor = logit_divisor
        self.softcap = softcap
        self.norm = norm.instantiate(dim=dim)
        self._init = init.instantiate()
        # Set by `model.precision`: the recipe of the product, and the path that names the noise of its rounding.
        self.recipe: Recipe | None = None
        self.path = ""
        self.metrics = dict(metrics)
        for name, metric in self.metrics.items():
            _check_metric(name, metric)
        self.objective: Objective | None = None if objective is None else objective.instantiate()
        if self.objective is not None:
            check_objective(self.objective)
        if self.objective is not None and z_loss:
            raise ValueError(
                f"z_loss = {z_loss} applies only to the next tokens' cross-entropy; expected 0 with an objective"
            )
        if self.objective is not None and self.objective.reads_scores:
            name = type(self.objective).__name__
            raise ValueError(f"objective = {name} is for a ScoreHead, given a language model's head")

    @property
    def depends_on_microbatches(self) -> bool:
        """True if the objective depends on microbatches."""
        return self.objective is not None and self.objective.depends_on_microbatches

    def children(self) -> dict[str, Layer]:
        """Return the final norm."""
        return {"norm": self.norm}

    def table_spec(self) -> ParameterSpec:
        """Return the spec of the table [V, D] that maps hidden states to logits."""
        return ParameterSpec(
            (self.vocab_size, self.dim),
            "float32",
            (VOCAB_AXES, "fsdp"),
            initializer=self._init,
            roles=("vocab", "in"),
            # Also for a tied table: the embedding does not gather it.
            gathered_as_fp8=self.recipe is not None and self.recipe.is_idempotent,
        )

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the spec of table [V, D]; {} when tied: the model declares the tie and passes the embedding table."""
        return {} if self.tied else {"table": self.table_spec()}

    def prepare(self, params: Nested, ctx: Context) -> Nested:
        """Prepare a tied table in the same way as a separate one."""
        # `param_specs` cannot be used here: it omits a tied table.
        table = prepare_params({"table": self.table_spec()}, params, ctx)
        norm = self.norm.prepare(params["norm"], ctx)
        return {**table, "norm": norm}

    def apply_norm(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """Return the hidden states whose product with the table are the logits, [B, S, D]: the final norm's output."""
        h_BSD = self.norm(weights["norm"], x_BSD, ctx)
        # All losses start from here, and the width is smaller than the vocabulary.
        return h_BSD if self.logit_divisor is None else scale(h_BSD, 1.0 / self.logit_divisor)

    def logits(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """Return the float32 logits_BSV of x_BSD; differentiable."""
        h_BSD = self.apply_norm(weights, x_BSD, ctx)
        product_BSV = compute_logits(self._product(ctx), h_BSD, weights["table"], self._rounding_key(ctx))
        return apply_softcap(product_BSV, self.softcap)

    def log_probs(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """Return the log-probability of each of ctx.batch["targets"], f32[B, S]; differentiable."""
        h_BSD = self.apply_norm(weights, x_BSD, ctx)
        batch, length, _ = h_BSD.shape
        chunks = self.chunks(batch, length, ctx)
        targets_BS = ctx.batch["targets"]
        return token_log_probs(
            self._product(ctx), chunks, ctx, h_BSD, weights["table"], targets_BS, self.softcap, self._rounding_key(ctx)
        )

    def map_logits(
        self,
        compute_values: Callable[..., PyTree],
        weights: Nested,
        x_BSD: jax.Array,
        ctx: Context,
        inputs: tuple[jax.Array, ...] = (),
    ) -> PyTree:
        """Return `compute_values(logits, *inputs)` for each position, see `chunked_loss.by_position`."""
        h_BSD = self.apply_norm(weights, x_BSD, ctx)
        batch, length, _ = h_BSD.shape
        chunks = self.chunks(batch, length, ctx)
        return by_position(
            compute_values, self._product(ctx), chunks, ctx, h_BSD, weights["table"], self.softcap, inputs
        )

    def sum_loss(
        self, compute_loss: ComputeLoss[Inputs], weights: Nested, x_BSD: jax.Array, ctx: Context, inputs: Inputs
    ) -> LossAndMetrics:
        """Sum `compute_loss(product, inputs)` over chunks of positions, see `chunked_loss.compute_chunked_loss`."""
        h_BSD = self.apply_norm(weights, x_BSD, ctx)
        batch, length, _ = h_BSD.shape
        chunks = self.chunks(batch, length, ctx)
        return compute_chunked_loss(
            compute_loss, self._product(ctx), chunks, ctx, h_BSD, weights["table"], inputs, self._rounding_key(ctx)
        )

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[None, Out]:
        """Return the mean loss over counted targets.

        This is the sum of weights * nll / ctx.num_targets plus the z-loss, or the objective.
        """
        assert ctx.num_targets is not None
        own_metrics = {} if ctx.training else self.sum_metrics(weights, carry, ctx)
        if self.objective is not None:
            loss, metrics = compute_objective(self.objective, self, weights, carry, ctx)
            return None, Out(loss=loss, metrics={**metrics, **own_metrics})
        compute_loss = partial(token_loss, softcap=self.softcap, z_loss=self.z_loss)
        # Divided here by the targets of the global batch, so that the microbatches add up to its mean.
        token_weights_BS = ctx.batch["weights"] / ctx.num_targets
        loss, metrics = self.sum_loss(compute_loss, weights, carry, ctx, (ctx.batch["targets"], token_weights_BS))
        return None, Out(loss=loss, metrics={**metrics, **own_metrics})

    def sum_metrics(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        """Return the sums of the user's metrics over the counted targets, as {"own/NAME": f32 scalar}."""
        if not self.metrics:
            return {}

        def compute_values(logits: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
            values = {}
            for name, metric in self.metrics.items():
                value = jnp.asarray(metric.instantiate(logits=logits, targets=targets))
                if value.shape != targets.shape:
                    # A ConfigError, because JAX removes frames of other errors, and then they seem to be bugs.
                    raise ConfigError(
                        f"expected a number for each target, {targets.shape}, given {value.shape}",
                        path=f"model.head.metrics.{name}",
                    )
                values[name] = value.astype(jnp.float32)
            return values

        values = self.map_logits(compute_values, weights, x_BSD, ctx, (ctx.batch["targets"],))
        target_weights_BS = ctx.batch["weights"]
        # A value that is not finite must not count where the target does not.
        sums = jax.tree.map(lambda x: jnp.sum(jnp.where(target_weights_BS != 0, x * target_weights_BS, 0.0)), values)
        return {f"own/{name}": value for name, value in sums.items()}

    def chunks(self, batch: int, length: int, ctx: Context) -> Chunks:
        """Split the positions into chunks, and the chunks into groups, with as few of both as possible.

        The number of chunks divides a device's positions and keeps its tokens per chunk within `chunk_tokens`. The
        number of groups divides the number of chunks and keeps a device's tokens per group within `gradient_tokens`.
        """
        shards = {} if ctx.mesh is None else ctx.mesh.shape
        num_shards = batch_shards(shards) if shards else 1
        local_batch = max(1, batch // num_shards)
        local_length = max(1, length // shards.get("seq", 1))
        tokens = local_batch * local_length
        count = 1
        # A negated floor division rounds up.
        if self.chunk_tokens > 0:
            min_chunks = -(-tokens // self.chunk_tokens)
            count = _smallest_divisor(local_length, min_chunks)
        groups = 1
        if self.gradient_tokens > 0:
            min_groups = -(-tokens // self.gradient_tokens)
            groups = _smallest_divisor(count, min_groups)
        return Chunks(count, groups)

    def _product(self, ctx: Context) -> LogitsProduct:
        return LogitsProduct(self.recipe, ctx.platform)

    def _rounding_key(self, ctx: Context) -> jax.Array | None:
        if self.recipe is None or not self.recipe.stochastic or ctx.rng is None:
            return None
        return fold_in_name(ctx.rng, self.path)

    def flops_per_token(self, seq_len: int) -> float:
        """Count the product with the table: 2 V D."""
        return 2.0 * self.vocab_size * self.dim


def _check_metric(name: str, metric: Config) -> None:
    """Raise ConfigError if a metric's name cannot be one in metrics.jsonl, or its function lacks an argument."""
    path = f"metrics.{name}"
    if not name or "/" in name or name in _OWN_NAMES:
        raise ConfigError(f"{name!r} is not a name for a metric of your own; expected another, without '/'", path=path)
    function = get_dotted_name(get_target(metric))
    for argument in ("logits", "targets"):
        if not metric.takes(argument):
            raise ConfigError(f"{function} has no argument {argument!r}; expected f(logits, targets, ...)", path=path)
    missing = metric.missing("logits", "targets")
    if missing:
        raise ConfigError(f"{function}: required, and not set: {', '.join(missing)}", path=path)


@component
def top_k_accuracy(*, logits: jax.Array, targets: jax.Array, k: PositiveInt = 1) -> jax.Array:
    """Return 1 for each target that is among the k most likely tokens, else 0: a metric of `LMHead.metrics`."""
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    num_above = jnp.sum(logits > target_logits, axis=-1)
    return (num_above < k).astype(jnp.float32)


def _smallest_divisor(number: int, least: int) -> int:
    """Return the smallest divisor of `number` that is at least `least`; `number` itself if `least` is larger."""
    for divisor in range(min(least, number), number + 1):
        if number % divisor == 0:
            return divisor
    return 1
