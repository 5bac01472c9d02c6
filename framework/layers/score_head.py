"""The last stage of a model that scores sequences: final norm, and a number for each label, read at a sequence's end.

A reward model has one label, a classifier one for each class. The head gives scores of all positions; the objective
reads them where ctx.batch["ends"] is 1, at the last token of each sequence, as transformers'
...ForSequenceClassification does at the last token that is no padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from framework.config import Config, DType, PositiveInt, component, config_for
from framework.layers.base import Context, Layer, Out
from framework.layers.chunked_loss import logits_product
from framework.layers.norm import RMSNorm
from framework.layout import Nested, ParameterSpec

# The role of the axis of labels. A parameter that has it learns also where all else but adapters is frozen.
LABEL = "label"


@component
class ScoreHead(Layer):
    """x_BSD -> the loss of the scores of ctx.batch's sequences, or the scores.

    Args:
        vocab_size: V, given by the model, which has no use for it here.
        dim: D, given by the model.
        num_labels: C; 1 for a reward model.
        norm: config of the final norm.
        bias: whether a bias is added; published models have none.
        dtype: of the weight and its bias; None means model.param_dtype.
        init: initializer of the weight.
        objective: what is minimized, of framework.objectives.rewards; to be asked for scores alone, a model
            needs none.
    """

    # As of a head of a language model: there is no table that could be the embedding's.
    tied = False

    def __init__(
        self,
        *,
        vocab_size: PositiveInt,
        dim: PositiveInt,
        num_labels: PositiveInt = 1,
        norm: Config = config_for(RMSNorm),
        bias: bool = False,
        dtype: DType | None = None,
        init: Config = config_for(jax.nn.initializers.normal, stddev=0.02),
        objective: Config | None = None,
    ):
        self.dim = dim
        self.num_labels = num_labels
        self.bias = bias
        self.dtype = dtype
        self.norm = norm.instantiate(dim=dim)
        self._init = init.instantiate()
        # Of framework.objectives.rewards, which imports this file.
        self.objective: Any = None if objective is None else objective.instantiate()
        if self.objective is not None:
            self.objective.check_labels(num_labels)

    def children(self) -> dict[str, Layer]:
        """The final norm."""
        return {"norm": self.norm}

    def own_specs(self) -> dict[str, ParameterSpec]:
        """score [C, D], and score_bias [C] where there is one."""
        score = ParameterSpec(
            (self.num_labels, self.dim),
            "float32",
            (None, "fsdp"),
            initializer=self._init,
            roles=(LABEL, "in"),
        )
        specs = {"score": score}
        if self.bias:
            specs["score_bias"] = ParameterSpec((self.num_labels,), "float32", (None,), roles=(LABEL,))
        if self.dtype is None:
            return specs
        return {name: replace(spec, dtype=self.dtype, own_dtype=True) for name, spec in specs.items()}

    def normed(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """The final norm's output, [B, S, D]."""
        return self.norm(weights["norm"], x_BSD, ctx)

    def scores(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """x_BSD -> the scores of all positions [B, S, C], float32 or wider; differentiable."""
        h_BSD = self.normed(weights, x_BSD, ctx)
        scores_BSC = logits_product(h_BSD, weights["score"])
        if not self.bias:
            return scores_BSC
        return scores_BSC + weights["score_bias"].astype(scores_BSC.dtype)

    def apply(
        self,
        weights: Nested,
        carry: jax.Array,
        ctx: Context,
        layer_state: Nested,
    ) -> tuple[None, Out]:
        """The objective's loss and metrics.

        Raises:
            ValueError: there is no objective.
        """
        if self.objective is None:
            raise ValueError(
                "model.head.objective = None: a score head learns by an objective; expected one of "
                "framework.objectives.rewards, such as PairwiseReward or Classification"
            )
        loss, metrics = self.objective.loss(self, weights, carry, ctx)
        return None, Out(loss=loss, metrics=metrics)

    def flops_per_token(self, seq_len: int) -> float:
        """2 C D."""
        return 2.0 * self.num_labels * self.dim
