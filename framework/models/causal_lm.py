"""CausalLM: a decoder-only language model as a chain of stages, embed -> stack -> head.

If the first layers of a model differ from the others, like DeepSeek's dense layers, they form a separate stack,
`first`, between embed and stack. This keeps the pattern of the other layers short.

The carry is x_BSD.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.config import Config, DType, PositiveInt, component, config_for
from plimsoll.framework.layers.attention import KernelAttention
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layers.embedding import Embedding
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.low_precision import RECIPES, RecipeName
from plimsoll.framework.layers.precision_rules import apply_precision_rules
from plimsoll.framework.layers.rotary import Rotary
from plimsoll.framework.layers.score_head import ScoreHead
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, ParameterSpec, fetch_tree, flatten, nearest_divisors
from plimsoll.framework.models.chain import Chain, StageSpecs

# Prefix of the user's metrics among the sums of an evaluation.
_OWN = "own/"


@component
class CausalLM(Chain):
    """Predicts each next token; with a ScoreHead, the score or the class of a sequence.

    Args:
        dim: D, width of the residual stream.
        vocab_size: V, number of token ids that the model has rows for.
        embed: config of the first stage.
        first: config of a `Stack` of different layers that precede those of `stack`; none by default. Settings of
            config.memory that count layers count those of `stack`; the layers of `first` are stored like the first
            layer of `stack`.
        stack: config of the stack of all other layers.
        head: config of the last stage, an LMHead or a ScoreHead.
        lora: config of the adapters, which freeze everything else except a score head; none by default.
        precision: recipes of 8-bit matrix products, {a regex, searched in the paths of layers such as
            "stack/block0/mlp/up", or "head" for the output head: fp8_tensor, fp8_row, int8_row or, except for the head,
            fp8_delayed, fp8_block and mxfp8}; the first one that matches decides. Other layers use compute_dtype. See
            `framework.layers.low_precision`.
        param_dtype: dtype of the parameters that the forward pass reads.
        compute_dtype: dtype of weights and activations inside layers.
    """

    def __init__(
        self,
        *,
        dim: PositiveInt,
        vocab_size: PositiveInt,
        embed: Config = config_for(Embedding),
        first: Config | None = None,
        stack: Config = config_for(Stack),
        head: Config = config_for(LMHead),
        lora: Config | None = None,
        precision: dict[str, RecipeName] = {},  # noqa: B006  (a config's default is copied)
        param_dtype: DType = "float32",
        compute_dtype: DType = "float32",
    ):
        self.dim = dim
        self.vocab_size = vocab_size
        self.param_dtype = jnp.dtype(param_dtype)
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.embed: Embedding = embed.instantiate(dim=dim, vocab_size=vocab_size)
        self.first: Stack | None = None
        if first is None:
            self.stack: Stack = stack.instantiate(dim=dim)
        else:
            depth = first.num_layers + stack.num_layers
            first_stack: Stack = first.instantiate(dim=dim, depth=depth, is_first=True)
            if first_stack.shared:
                raise ValueError(f"first.shared = {first.shared}; expected none: only layers of `stack` may share")
            self.first = first_stack
            self.stack = stack.instantiate(dim=dim, depth=depth)
        self.head: LMHead | ScoreHead = head.instantiate(dim=dim, vocab_size=vocab_size)
        # The whole stacks by stage, in order, even if they run as several layer ranges.
        self._stacks: dict[str, Stack] = {} if self.first is None else {"first": self.first}
        self._stacks["stack"] = self.stack
        self.stages = {"embed": self.embed, **self._stacks, "head": self.head}
        # By path. These are collected before the adapters replace layers: published weights have no adapters.
        self.base_specs: dict[str, ParameterSpec] = flatten(self._specs())
        # A stack has no children; its layers are those of its pattern.
        layers = {**self.stages, **{name: stack.pattern for name, stack in self._stacks.items()}}
        self.precision = precision
        apply_precision_rules(precision, layers)
        self.lora = None if lora is None else lora.instantiate()
        if self.lora is not None:
            self.lora.wrap(layers)
        self.ties = {"head/table": "embed/token"} if self.head.tied else {}

    @property
    def language_head(self) -> LMHead:
        """The head of a language model. Raises ValueError if the model scores sequences and predicts no tokens."""
        if not isinstance(self.head, LMHead):
            raise ValueError(
                f"model.head is a {type(self.head).__name__}, which predicts no tokens; expected an LMHead "
                "(run `plimsoll score --texts` for its scores)"
            )
        return self.head

    @property
    def score_head(self) -> ScoreHead:
        """The head that scores sequences. Raises ValueError if the model has another head."""
        if not isinstance(self.head, ScoreHead):
            raise ValueError(
                f"model.head is a {type(self.head).__name__}, which scores no texts; expected a ScoreHead, as in a "
                "reward model or a classifier"
            )
        return self.head

    def check(self, mesh: Mesh | AbstractMesh, data: Any) -> None:
        """Raise ValueError if the model does not fit the mesh or the data.

        It does not fit if the mesh splits a head, axes are unused, sequences are too long, or the data has more token
        ids than the vocabulary.
        """
        if getattr(data, "tokenizer", None) is None:
            raise ValueError(f"data is a {type(data).__name__}, which has no tokens; a CausalLM expects a DataPipeline")
        seq_len = data.seq_len
        vocab_size = data.tokenizer.vocab_size
        self.embed.check_length(seq_len)
        for name in self.precision.values():
            blocks = RECIPES[name].blocks
            if blocks is None:
                continue
            multiple = blocks.size * (mesh.shape["seq"] if blocks.in_shards else 1)
            if seq_len % multiple:
                raise ValueError(
                    f"data.seq_len = {seq_len}: expected a multiple of {multiple} with model.precision = {name}"
                )
        for stack in self._stacks.values():
            for layer in stack.pattern.walk():
                layer.check_mesh(mesh)
        for rotary in self._rotaries():
            rotary.check_length(seq_len)
        # With an axis that no parameter uses, several devices would compute the same thing.
        if mesh.shape["expert"] > 1:
            parameter_axes = set()
            for spec in flatten(self.parameter_specs()).values():
                for axes in spec.mesh_axes:
                    parameter_axes.update(axes if isinstance(axes, tuple) else (axes,))
            if "expert" not in parameter_axes:
                raise ValueError(f"mesh.expert = {mesh.shape['expert']}, but the model has no experts; expected 1")
        seq_shards = mesh.shape["seq"]
        if seq_len % seq_shards:
            raise ValueError(
                f"mesh.seq = {seq_shards} does not divide data.seq_len = {seq_len}; "
                f"nearest that do: {nearest_divisors(seq_len, seq_shards)}"
            )
        for stack in self._stacks.values():
            for layer in stack.pattern.walk():
                if isinstance(layer, KernelAttention) and seq_shards > 1:
                    layer.check_length(seq_len, seq_shards)
        if isinstance(self.head, ScoreHead):
            if getattr(data, "scored_source", self) is None:
                source = type(data.train_leaves[0].source).__name__
                raise ValueError(
                    f"data.source is a {source}, but model.head is a ScoreHead, which reads the last token of a whole "
                    "sequence; expected a LabeledSource, or a RankedSource of pairs"
                )
            classes = getattr(data, "classes", None)
            if classes is not None and len(classes) != self.head.num_labels:
                raise ValueError(
                    f"model.head.num_labels = {self.head.num_labels}, but the data has {len(classes)} classes "
                    f"({', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}); expected as many labels"
                )
        # A vocabulary may be padded: more rows than ids are fine.
        if vocab_size > self.vocab_size:
            raise ValueError(
                f"data.tokenizer has {vocab_size} ids, but model.vocab_size = {self.vocab_size}; "
                "expected at least as many"
            )

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model's positions support; None for any."""
        limits = [self.embed.max_positions, *(rotary.max_positions for rotary in self._rotaries())]
        return min((limit for limit in limits if limit is not None), default=None)

    def _rotaries(self) -> Iterator[Rotary]:
        """Yield the rotary positions of all attention layers, of every stack."""
        for stack in self._stacks.values():
            for layer in stack.pattern.walk():
                # A variant of attention has this field; other layers do not.
                rotary = getattr(layer, "rotary", None)
                if isinstance(rotary, Rotary):
                    yield rotary

    def compute_hidden(
        self, params: Nested, ctx: Context, buffers: Nested, specs: StageSpecs | None = None
    ) -> tuple[jax.Array, dict[str, Out]]:
        """Run everything before the head; returns x_BSD, and the Out of each stage. For `specs` see `run`."""
        carry = None
        outs: dict[str, Out] = {}
        for name in self.stages:
            if name != "head":
                carry, outs[name] = self.run(name, params, carry, ctx, buffers, specs)
        assert carry is not None
        return carry, outs

    def head_weights(self, params: Nested, ctx: Context, specs: StageSpecs | None = None) -> Nested:
        """Return the head's prepared weights. For `specs` see `run`."""
        head_params = self.stage_params(params, "head")
        if specs is not None:
            head_params = fetch_tree(specs["head"], head_params)
        return self.head.prepare(head_params, ctx)

    def logits(self, params: Nested, ctx: Context, buffers: Nested) -> jax.Array:
        """Return the float32 logits_BSV of ctx.batch["tokens"], for sampling and tests; training never holds them."""
        carry, _ = self.compute_hidden(params, ctx, buffers)
        weights = self.head_weights(params, ctx)
        return self.language_head.logits(weights, carry, ctx)

    def log_probs(self, params: Nested, ctx: Context, buffers: Nested, specs: StageSpecs | None = None) -> jax.Array:
        """Return the log-probability of each of ctx.batch["targets"], f32[B, S]. For `specs` see `run`."""
        carry, _ = self.compute_hidden(params, ctx, buffers, specs)
        weights = self.head_weights(params, ctx, specs)
        return self.language_head.log_probs(weights, carry, ctx)

    def counts(self, batch: Nested) -> dict[str, jax.Array]:
        """Return the counts of the head's objective."""
        objective = self.head.objective
        return {} if objective is None else objective.counts(batch)

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """Return nats over counted targets, their number, and their bytes if the batch has those.

        With an objective: its loss and metrics, the numbers of counted targets and sequences, and its own counts.
        """
        if self.head.objective is not None:
            assert out.loss is not None
            sums = {"loss": out.loss, "tokens": jnp.sum(batch["weights"]), **self.counts(batch)}
            if "ends" in batch:
                sums["sequences"] = jnp.sum(batch["ends"])
            for name, value in out.metrics.items():
                if name.startswith("head/"):
                    sums[name.removeprefix("head/")] = value
            return sums
        sums = {"nll": out.metrics["head/nll"], "tokens": jnp.sum(batch["weights"])}
        for name, value in out.metrics.items():
            if name.startswith(f"head/{_OWN}"):
                sums[name.removeprefix("head/")] = value
        if "bytes" in batch:
            sums["bytes"] = jnp.sum(batch["bytes"])
        return sums

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return {"loss": nats per token, "perplexity": exp(loss), "tokens": their number}.

        If tokens stand for text, "bits_per_byte" is added. With an objective, the result is the objective's summary.
        The means of the user's metrics are added by name.
        """
        num_targets = max(totals["tokens"], 1.0)
        own = {name: value / num_targets for name, value in totals.items() if name.startswith(_OWN)}
        totals = {name: value for name, value in totals.items() if name not in own}
        return {**self._summary(totals), **{name.removeprefix(_OWN): value for name, value in own.items()}}

    def _summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the summary without the user's metrics."""
        if self.head.objective is not None:
            return self.head.objective.summary(totals)
        # The maximum avoids 0 / 0 in an evaluation without any counted target.
        loss = totals["nll"] / max(totals["tokens"], 1.0)
        # The exponential of more than that does not fit into a float64.
        perplexity = math.inf if loss > 700 else math.exp(loss)
        row = {"loss": loss, "perplexity": perplexity, "tokens": totals["tokens"]}
        if totals.get("bytes"):
            bits = totals["nll"] / math.log(2)
            row["bits_per_byte"] = bits / totals["bytes"]
        return row
