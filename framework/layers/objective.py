"""Objective: the loss that replaces the next tokens' cross-entropy in the head of a language model.

The head knows only this interface; `framework.objectives` has the objectives. An objective is a function of all
positions of a microbatch, so it can sum the log-probabilities of a sequence, or compare two sequences of a row.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp

from plimsoll.framework.config import ConfigError
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import Chunks, ComputeLoss, LossAndMetrics
from plimsoll.framework.layout import Nested

Inputs = TypeVar("Inputs")


class Head(Protocol):
    """The part of the head that an objective uses; see `plimsoll.LMHead`."""

    softcap: float | None

    def log_probs(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """Return the log-probability of each target, f32[B, S]."""
        ...

    def sum_loss(
        self, compute_loss: ComputeLoss[Inputs], weights: Nested, x_BSD: jax.Array, ctx: Context, inputs: Inputs
    ) -> LossAndMetrics:
        """Sum a loss of the logits over chunks of positions; see `chunked_loss.compute_chunked_loss`."""
        ...

    def apply_norm(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """Return the final norm's output, [B, S, D]."""
        ...

    def chunks(self, batch: int, length: int, ctx: Context) -> Chunks:
        """Return the chunks in which logits of [batch, length] positions are computed."""
        ...


class Objective:
    """Base class of objectives.

    Attributes:
        arrays: names of the batch's arrays that it reads, in addition to tokens, targets and weights.
        unit: unit of the reported loss, such as "nats per pair".
        depends_on_microbatches: whether learner.accumulate affects the loss beyond rounding; see `Layer`.
        reads_scores: whether it is for a `plimsoll.ScoreHead` instead of a language model's head.
    """

    arrays: tuple[str, ...] = ()
    unit: str = "nats per token"
    depends_on_microbatches: bool = False
    reads_scores: bool = False

    def check_labels(self, num_labels: int) -> None:
        """Raise ValueError if the objective is not for a score head with this number of labels."""
        raise ValueError(
            f"objective = {type(self).__name__} is for a language model's head; expected one of "
            "plimsoll.framework.objectives.rewards for a score head"
        )

    def counts(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return numbers of a global batch that the loss or metrics are divided by.

        These are in addition to counted targets and sequences.

        Returns:
            {name: f32 scalar}: a training step passes them to `loss` as ctx.counts, each at least 1; an evaluation
            sums them for `summary`. The names differ from those of metrics.
        """
        return {}

    def loss(self, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context) -> LossAndMetrics:
        """Return the loss of ctx.batch, and metrics by name.

        Args:
            head: the head, whose input is x_BSD.
            weights: the head's prepared weights.
            x_BSD: the output of the last layer.
            ctx: losses and metrics are divided by ctx.num_targets (counted tokens of the global batch), by
                ctx.num_sequences (counted sequences of the global batch) or by one of ctx.counts, so microbatches add
                up to their batch. In an evaluation the first two are 1 and ctx.counts is empty, so the results are
                sums.

        Returns:
            (f32 scalar, {name: f32 scalar}); metrics have no gradient.
        """
        raise NotImplementedError

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the values that an evaluation reports, including "loss".

        Args:
            totals: sums over the evaluated batches: the metrics, "loss", "tokens" and "sequences" (the numbers of
                counted tokens and sequences), and `counts`.
        """
        raise NotImplementedError


def check_objective(objective: object) -> None:
    """Raise ConfigError if a language model's head cannot use this object as its objective."""
    name = type(objective).__name__
    if not isinstance(objective, Objective):
        raise ConfigError(f"expected a subclass of plimsoll.Objective, given {name}", path="model.head.objective")
    for method in ("loss", "summary"):
        if getattr(type(objective), method) is getattr(Objective, method):
            raise ConfigError(
                f"{name} does not define the method {method!r} of plimsoll.Objective", path="model.head.objective"
            )


def compute_objective(
    objective: Objective, head: Head, weights: Nested, x_BSD: jax.Array, ctx: Context
) -> LossAndMetrics:
    """Return the objective's loss and metrics.

    Raises:
        ConfigError: one of them is not a scalar.
    """
    loss, metrics = objective.loss(head, weights, x_BSD, ctx)
    for name, value in {"a loss": loss, **{f"a metric {name!r}": x for name, x in metrics.items()}}.items():
        if jnp.shape(value) != ():
            raise ConfigError(
                f"{type(objective).__name__}.loss returned {name} of shape {jnp.shape(value)}; expected scalars",
                path="model.head.objective",
            )
    return loss, metrics
