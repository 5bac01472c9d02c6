"""CausalLM: a decoder-only language model as a chain of three stages, embed -> stack -> head.

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
from framework.layers.head import LMHead
from framework.layers.stack import Stack
from framework.layout import Nested, ParameterSpec, fetch_tree, flatten, nearest_divisors
from framework.models.chain import Chain, Places


@component
class CausalLM(Chain):
    """Predicts each next token.

    Args:
        dim: D, width of the residual stream.
        vocab_size: V.
        embed: first stage.
        stack: the layers between.
        head: last stage.
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
        stack: Config = config_for(Stack),
        head: Config = config_for(LMHead),
        lora: Config | None = None,
        param_dtype: DType = "float32",
        compute_dtype: DType = "float32",
    ):
        self.dim, self.vocab_size = dim, vocab_size
        self.param_dtype, self.compute_dtype = jnp.dtype(param_dtype), jnp.dtype(compute_dtype)
        self.embed: Embedding = embed.instantiate(dim=dim, vocab_size=vocab_size)
        self.stack: Stack = stack.instantiate(dim=dim)
        self.head: LMHead = head.instantiate(dim=dim, vocab_size=vocab_size)
        self.stages = {"embed": self.embed, "stack": self.stack, "head": self.head}
        self.base_specs: dict[str, ParameterSpec] = flatten(self._specs())  # by path; without adapters, as published
        self.lora = None if lora is None else lora.instantiate()
        if self.lora is not None:
            self.lora.wrap({**self.stages, "stack": self.stack.unit})
        self.ties = {"head/table": "embed/token"} if self.head.tied else {}

    def check(self, mesh: Mesh | AbstractMesh, data: Any) -> None:
        """Raises ValueError when the mesh cuts through a head, axes are unused, sequences are too long, or the data has
        more ids than the vocabulary."""
        if getattr(data, "tokenizer", None) is None:
            raise ValueError(f"data is a {type(data).__name__}, which has no tokens; a CausalLM expects a DataPipeline")
        seq_len, vocab_size = data.seq_len, data.tokenizer.vocab_size
        self.embed.check_length(seq_len)
        for layer in self.stack.unit.walk():
            if isinstance(layer, Attention):
                layer.check_mesh(mesh)
        if mesh.shape["expert"] > 1 and not _uses_axis(self.parameter_specs(), "expert"):
            raise ValueError(f"mesh.expert = {mesh.shape['expert']}, but the model has no experts; expected 1")
        if seq_len % mesh.shape["seq"]:
            raise ValueError(
                f"mesh.seq = {mesh.shape['seq']} does not divide data.seq_len = {seq_len}; "
                f"nearest that do: {nearest_divisors(seq_len, mesh.shape['seq'])}"
            )
        if vocab_size > self.vocab_size:
            raise ValueError(
                f"data.tokenizer has {vocab_size} ids, but model.vocab_size = {self.vocab_size}; expected at least as "
                "many"
            )

    def hidden(
        self, params: Nested, ctx: Context, buffers: Nested, specs: Places | None = None
    ) -> tuple[jax.Array, dict[str, Out]]:
        """Everything before the head: x_BSD, and the Out of each stage; `specs` as for `run`."""
        carry, outs = None, {}
        for name in ("embed", "stack"):
            carry, outs[name] = self.run(name, params, carry, ctx, buffers, specs)
        return carry, outs

    def head_weights(self, params: Nested, ctx: Context, specs: Places | None = None) -> Nested:
        """The head's prepared weights; `specs` as for `run`."""
        own = self.stage_params(params, "head")
        return self.head.prepare(own if specs is None else fetch_tree(specs["head"], own), ctx)

    def logits(self, params: Nested, ctx: Context, buffers: Nested) -> jax.Array:
        """float32 logits_BSV of ctx.batch["tokens"]: for sampling and tests; training never holds them."""
        carry, _ = self.hidden(params, ctx, buffers)
        return self.head.logits(self.head_weights(params, ctx), carry, ctx)

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """Nats over counted targets, their number, and their bytes if the batch has those."""
        found = {"nll": out.metrics["head/nll"], "tokens": jnp.sum(batch["weights"])}
        return {**found, "bytes": jnp.sum(batch["bytes"])} if "bytes" in batch else found

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """{"loss": nats per token, "tokens": ..., and where tokens stand for text "bits_per_byte": ...}."""
        row = {"loss": totals["nll"] / max(totals["tokens"], 1.0), "tokens": totals["tokens"]}
        if totals.get("bytes"):
            row["bits_per_byte"] = totals["nll"] / math.log(2) / totals["bytes"]
        return row


def _uses_axis(specs: Nested, axis: str) -> bool:
    leaves: list[ParameterSpec] = jax.tree.leaves(specs)
    return any(axis in (axes if isinstance(axes, tuple) else (axes,)) for spec in leaves for axes in spec.mesh_axes)
