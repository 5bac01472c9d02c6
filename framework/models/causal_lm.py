"""CausalLM: a decoder-only language model as a chain of stages, embed -> stack -> head.

A model whose first layers are unlike the others, as DeepSeek's without experts, has these in a stack of their own,
`first`, between embed and stack: so the pattern of the others stays short.

The carry is x_BSD.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from framework.config import Config, DType, PositiveInt, component, config_for
from framework.layers.attention import Attention
from framework.layers.base import Context, Out
from framework.layers.embedding import Embedding
from framework.layers.experts.moe import MoE
from framework.layers.head import LMHead
from framework.layers.latent_attention import LatentAttention
from framework.layers.score_head import ScoreHead
from framework.layers.stack import Stack
from framework.layout import Nested, ParameterSpec, fetch_tree, flatten, nearest_divisors
from framework.models.chain import Chain, Places


@component
class CausalLM(Chain):
    """Predicts each next token; with a ScoreHead, what a sequence is worth or which class it is of.

    Args:
        dim: D, width of the residual stream.
        vocab_size: V.
        embed: first stage.
        first: a `Stack` of layers before those of `stack`, of another kind than these; none by default. Settings of
            config.memory that count layers count those of `stack`, and these live as its first one does.
        stack: the layers between.
        head: last stage, an LMHead or a ScoreHead.
        lora: adapters, beside which all else is frozen; none by default.
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
                raise ValueError(f"first.shared = {first.shared}; expected none: layers of `stack` alone may share")
            self.first = first_stack
            self.stack = stack.instantiate(dim=dim, depth=depth)
        self.head: LMHead | ScoreHead = head.instantiate(dim=dim, vocab_size=vocab_size)
        self.stages = {"embed": self.embed, **self._stacks(), "head": self.head}
        # By path. Taken before the adapters replace layers: published weights have none.
        self.base_specs: dict[str, ParameterSpec] = flatten(self._specs())
        self.lora = None if lora is None else lora.instantiate()
        if self.lora is not None:
            # A stack has no children: its layers are those of its unit.
            units = {name: stack.unit for name, stack in self._stacks().items()}
            self.lora.wrap({**self.stages, **units})
        self.ties = {"head/table": "embed/token"} if self.head.tied else {}

    @property
    def language_head(self) -> LMHead:
        """The head of a language model. Raises ValueError: the model scores sequences, and predicts no tokens."""
        if not isinstance(self.head, LMHead):
            raise ValueError(
                f"model.head is a {type(self.head).__name__}, which predicts no tokens; expected an LMHead "
                "(`plimsoll score --texts` has its scores)"
            )
        return self.head

    @property
    def score_head(self) -> ScoreHead:
        """The head that scores sequences. Raises ValueError: the model has another."""
        if not isinstance(self.head, ScoreHead):
            raise ValueError(
                f"model.head is a {type(self.head).__name__}, which scores no texts; expected a ScoreHead: of a "
                "reward model or a classifier"
            )
        return self.head

    def _stacks(self) -> dict[str, Stack]:
        """The whole stacks by stage, in order, also where sections of them run."""
        first = {} if self.first is None else {"first": self.first}
        return {**first, "stack": self.stack}

    def check(self, mesh: Mesh | AbstractMesh, data: Any) -> None:
        """Raises ValueError when the model does not fit the mesh or the data.

        It does not fit when the mesh cuts through a head, axes are unused, sequences are too long, or the data has more
        ids than the vocabulary.
        """
        if getattr(data, "tokenizer", None) is None:
            raise ValueError(f"data is a {type(data).__name__}, which has no tokens; a CausalLM expects a DataPipeline")
        seq_len = data.seq_len
        vocab_size = data.tokenizer.vocab_size
        self.embed.check_length(seq_len)
        for stack in self._stacks().values():
            for layer in stack.unit.walk():
                if isinstance(layer, Attention | LatentAttention | MoE):
                    layer.check_mesh(mesh)
                if isinstance(layer, Attention) and layer.rotary is not None:
                    layer.rotary.check_length(seq_len)
        # An axis that no parameter uses would let devices compute the same thing.
        if mesh.shape["expert"] > 1 and not _uses_axis(self.parameter_specs(), "expert"):
            raise ValueError(f"mesh.expert = {mesh.shape['expert']}, but the model has no experts; expected 1")
        seq_shards = mesh.shape["seq"]
        if seq_len % seq_shards:
            raise ValueError(
                f"mesh.seq = {seq_shards} does not divide data.seq_len = {seq_len}; "
                f"nearest that do: {nearest_divisors(seq_len, seq_shards)}"
            )
        # A vocabulary may be padded: more rows than ids do no harm.
        self._check_classes(data)
        if vocab_size > self.vocab_size:
            raise ValueError(
                f"data.tokenizer has {vocab_size} ids, but model.vocab_size = {self.vocab_size}; "
                "expected at least as many"
            )

    def _check_classes(self, data: Any) -> None:
        """Raises ValueError when a score head is given sequences without their last token, or other classes."""
        if isinstance(self.head, ScoreHead) and getattr(data, "scored_source", self) is None:
            source = type(data.train_leaves[0].source).__name__
            raise ValueError(
                f"data.source is a {source}, but model.head is a ScoreHead, which reads the last token of a whole "
                "sequence; expected a LabelledSource, or a RankedSource of pairs"
            )
        classes = getattr(data, "classes", None)
        if classes is None or not isinstance(self.head, ScoreHead) or len(classes) == self.head.num_labels:
            return
        raise ValueError(
            f"model.head.num_labels = {self.head.num_labels}, but the data has {len(classes)} classes "
            f"({', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}); expected as many labels"
        )

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the positions of the model are for; None for any."""
        limits = [self.embed.max_positions]
        for layer in self.stack.unit.walk():
            if isinstance(layer, Attention) and layer.rotary is not None:
                limits.append(layer.rotary.max_positions)
        return min((limit for limit in limits if limit is not None), default=None)

    def hidden(
        self, params: Nested, ctx: Context, buffers: Nested, specs: Places | None = None
    ) -> tuple[jax.Array, dict[str, Out]]:
        """Runs everything before the head: x_BSD, and the Out of each stage; `specs` as for `run`."""
        outs: dict[str, Out] = {}
        carry, outs["embed"] = self.run("embed", params, None, ctx, buffers, specs)
        for name in self._stacks():
            carry, outs[name] = self.run(name, params, carry, ctx, buffers, specs)
        return carry, outs

    def head_weights(
        self,
        params: Nested,
        ctx: Context,
        specs: Places | None = None,
    ) -> Nested:
        """The head's prepared weights; `specs` as for `run`."""
        head_params = self.stage_params(params, "head")
        if specs is not None:
            head_params = fetch_tree(specs["head"], head_params)
        return self.head.prepare(head_params, ctx)

    def logits(self, params: Nested, ctx: Context, buffers: Nested) -> jax.Array:
        """float32 logits_BSV of ctx.batch["tokens"]: for sampling and tests; training never holds them."""
        carry, _ = self.hidden(params, ctx, buffers)
        weights = self.head_weights(params, ctx)
        return self.language_head.logits(weights, carry, ctx)

    def log_probs(self, params: Nested, ctx: Context, buffers: Nested, specs: Places | None = None) -> jax.Array:
        """f32[B, S], the log-probability of each of ctx.batch["targets"]; `specs` as for `run`."""
        carry = None
        for name in self.stages:
            if name != "head":
                carry, _ = self.run(name, params, carry, ctx, buffers, specs)
        assert carry is not None
        weights = self.head_weights(params, ctx, specs)
        return self.language_head.log_probs(weights, carry, ctx)

    def counts(self, batch: Nested) -> dict[str, jax.Array]:
        """Those of the head's objective."""
        objective = self.head.objective
        return {} if objective is None else objective.counts(batch)

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """Nats over counted targets, their number, and their bytes if the batch has those.

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
        if "bytes" in batch:
            sums["bytes"] = jnp.sum(batch["bytes"])
        return sums

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """{"loss": nats per token, "perplexity": its exponential, "tokens": ..., and where tokens stand for text
        "bits_per_byte": ...}; with an objective what that reports."""
        if self.head.objective is not None:
            return self.head.objective.summary(totals)
        # The maximum is for an evaluation without any counted target.
        loss = totals["nll"] / max(totals["tokens"], 1.0)
        # Beyond that, a float64 has no room for the exponential.
        perplexity = math.inf if loss > 700 else math.exp(loss)
        row = {"loss": loss, "perplexity": perplexity, "tokens": totals["tokens"]}
        if totals.get("bytes"):
            bits = totals["nll"] / math.log(2)
            row["bits_per_byte"] = bits / totals["bytes"]
        return row


def _uses_axis(specs: Nested, axis: str) -> bool:
    leaves: list[ParameterSpec] = jax.tree.leaves(specs)
    for spec in leaves:
        for axes in spec.mesh_axes:
            names = axes if isinstance(axes, tuple) else (axes,)
            if axis in names:
                return True
    return False
