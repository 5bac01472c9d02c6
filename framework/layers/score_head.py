"""The last stage of a model that scores sequences: final norm, and one score per label, read at a sequence's end.

A reward model has one label; a classifier has one per class. The head returns the scores of all positions. The
objective reads them where ctx.batch["ends"] is 1, at the last token of each sequence; transformers'
...ForSequenceClassification reads them at the last non-padding token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from plimsoll.framework.config import Config, DType, PositiveInt, component, config_for
from plimsoll.framework.layers.base import Context, Layer, Out
from plimsoll.framework.layers.logits_product import LogitsProduct
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layout import Nested, ParameterSpec

# The role of the label axis. A parameter with this role is trained even if everything else except adapters is frozen.
LABEL = "label"


@component
class ScoreHead(Layer):
    """Computes the loss of the scores of ctx.batch's sequences, or the scores, from x_BSD.

    Args:
        vocab_size: V, set by the model; not used here.
        dim: D, the width of the residual stream; set by the model.
        num_labels: C, the number of scores; 1 for a reward model.
        norm: config of the final norm.
        bias: whether a bias is added; published models have none.
        dtype: dtype of the weight and its bias; None means model.param_dtype.
        init: config of the initializer of the weight.
        objective: config of the loss, from framework.objectives.rewards. A model that only computes scores needs none.
    """

    # Language model heads have this attribute too. A score head has no table to tie to the embedding.
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
        # A class of framework.objectives.rewards, which imports this file.
        self.objective: Any = None if objective is None else objective.instantiate()
        if self.objective is not None:
            self.objective.check_labels(num_labels)

    def children(self) -> dict[str, Layer]:
        """Return the final norm."""
        return {"norm": self.norm}

    def param_specs(self) -> dict[str, ParameterSpec]:
        """Return the specs of score [C, D] and, with a bias, score_bias [C]."""
        score = ParameterSpec(
            (self.num_labels, self.dim), "float32", (None, "fsdp"), initializer=self._init, roles=(LABEL, "in")
        )
        specs = {"score": score}
        if self.bias:
            specs["score_bias"] = ParameterSpec((self.num_labels,), "float32", (None,), roles=(LABEL,))
        if self.dtype is None:
            return specs
        return {name: replace(spec, dtype=self.dtype, keeps_dtype=True) for name, spec in specs.items()}

    def scores(self, weights: Nested, x_BSD: jax.Array, ctx: Context) -> jax.Array:
        """Return the scores of all positions [B, S, C], float32 or wider; differentiable."""
        h_BSD = self.norm(weights["norm"], x_BSD, ctx)
        scores_BSC = LogitsProduct().multiply(h_BSD, weights["score"])
        if not self.bias:
            return scores_BSC
        return scores_BSC + weights["score_bias"].astype(scores_BSC.dtype)

    def apply(self, weights: Nested, carry: jax.Array, ctx: Context, layer_state: Nested) -> tuple[None, Out]:
        """Return the objective's loss and metrics.

        Raises:
            ValueError: there is no objective.
        """
        if self.objective is None:
            raise ValueError(
                "model.head.objective = None: training a score head needs an objective; expected one of "
                "plimsoll.framework.objectives.rewards, such as PairwiseReward or Classification"
            )
        loss, metrics = self.objective.loss(self, weights, carry, ctx)
        return None, Out(loss=loss, metrics=metrics)

    def flops_per_token(self, seq_len: int) -> float:
        """Count the product with the weight: 2 C D."""
        return 2.0 * self.num_labels * self.dim
