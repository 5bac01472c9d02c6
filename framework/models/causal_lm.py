"""CausalLM: a decoder-only language model as a chain of three stages, embed -> stack -> head.

What flows between stages is one pytree, the carry (x_BSD). The chain is what lets a schedule stop the backward pass
between stages, so nothing here differentiates. May import: framework.config, framework.layout, framework.layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from framework.config import Config, DType, PositiveInt, config_for
from framework.layers.attention import Attention
from framework.layers.base import Context, Layer, Out
from framework.layers.embedding import Embedding
from framework.layers.head import LMHead
from framework.layers.lora import LoRA
from framework.layers.stack import Stack
from framework.layout import Nested, ParameterSpec, fetch_tree, flatten, nearest_divisors, unflatten

Places = dict[str, dict[str, Any]]  # {stage: {path: spec, or what else has a memory_kind}}


class CausalLM:
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
        self.stages: dict[str, Layer] = {"embed": self.embed, "stack": self.stack, "head": self.head}
        self.base_specs: dict[str, ParameterSpec] = flatten(self._specs())  # by path; without adapters, as published
        self.lora: LoRA | None = None if lora is None else lora.instantiate()
        if self.lora is not None:
            self.lora.wrap({**self.stages, "stack": self.stack.unit})
        # {path where a stage reads: path where the parameter lives}. The gradient of a tie is the sum of its uses'.
        self.ties: dict[str, str] = {"head/table": "embed/token"} if self.head.tied else {}

    def _specs(self) -> Nested:
        specs = {name: stage.parameter_specs() for name, stage in self.stages.items()}
        return {**specs, "shared": self.stack.shared_specs()} if self.stack.shared_specs() else specs

    def parameter_specs(self) -> Nested:
        """{stage: nested dict of ParameterSpec} in `param_dtype`; what the stack's units share is "shared"."""

        def in_model(spec: ParameterSpec) -> ParameterSpec:
            spec = spec if spec.own_dtype else replace(spec, dtype=self.param_dtype)
            return spec if self.lora is None else replace(spec, trainable="rank" in spec.roles)  # adapters alone

        return jax.tree.map(in_model, self._specs())

    def buffer_specs(self) -> Nested:
        """{stage: nested dict of TensorSpec}, stages without buffers left out."""
        specs = {name: stage.buffer_specs() for name, stage in self.stages.items()}
        return {name: spec for name, spec in specs.items() if spec}

    def check(self, mesh: Mesh | AbstractMesh, seq_len: int) -> None:
        """Raises ValueError when the mesh cuts through a head, axes are unused, or sequences are too long."""
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

    def split_units(self, params: Nested, remat: str) -> Nested:
        """Parameters as they are best differentiated: those of an unrolled stack as a list of its units'."""
        if not self.stack.is_unrolled(remat) or "stack" not in params:
            return params
        return {**params, "stack": self.stack.split(params["stack"])}

    def join_units(self, grads: Nested) -> Nested:
        """The inverse of `split_units`, for gradients."""
        stack = grads.get("stack")
        if not isinstance(stack, list):
            return grads
        return {**grads, "stack": jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack)}

    def stage_params(self, params: Nested, stage: str) -> Nested:
        """A stage's parameters, the shared ones that it reads included."""
        own = params.get(stage, {})
        for reader, home in self.ties.items():
            if reader.startswith(f"{stage}/"):
                own = {**own, reader.split("/", 1)[1]: flatten(params)[home]}
        return own

    def stage_specs(self, *groups: Nested) -> Places:
        """{stage: {path: spec}} of all parameters that it reads, of the specs of some groups (trained, frozen)."""
        specs = unflatten({path: spec for group in groups for path, spec in flatten(group).items()})
        return {stage: flatten(self.stage_params(specs, stage)) for stage in (*self.stages, "shared")}

    def hidden(
        self, params: Nested, ctx: Context, buffers: Nested, specs: Places | None = None
    ) -> tuple[jax.Array, dict[str, Out]]:
        """Everything before the head: x_BSD, and the Out of each stage. Parameters that `specs` (of `stage_specs`) have
        in host memory come to the device, of the stack a unit's at a time."""

        def fetch(stage: str, tree: Nested) -> Nested:
            return tree if specs is None else fetch_tree(specs[stage], tree)

        def fetch_unit(unit: Nested) -> Nested:
            return {**unit, **fetch("stack", {name: unit[name] for name in unit if name not in self.stack.shared})}

        with jax.named_scope("embed"):  # scopes give the compiler's buffers the names of layers
            weights = self.embed.prepare(fetch("embed", self.stage_params(params, "embed")), ctx)
            x_BSD, embed = self.embed.apply(weights, None, ctx.fold("embed"), buffers.get("embed", {}))
        with jax.named_scope("stack"):
            own, shared = self.stage_params(params, "stack"), fetch("shared", params.get("shared", {}))
            state = buffers.get("stack", {})
            x_BSD, stack = self.stack.forward(own, x_BSD, ctx.fold("stack"), state, fetch_unit, shared)
        return x_BSD, {"embed": embed, "stack": stack}

    def head_weights(self, params: Nested, ctx: Context, specs: Places | None = None) -> Nested:
        """The head's prepared weights; `specs` as for `hidden`."""
        own = self.stage_params(params, "head")
        return self.head.prepare(own if specs is None else fetch_tree(specs["head"], own), ctx)

    def loss(self, params: Nested, ctx: Context, buffers: Nested, specs: Places | None = None) -> tuple[jax.Array, Out]:
        """The objective of ctx.batch, and all that leaves the model besides.

        Args:
            params: nested dict of arrays as `parameter_specs()`.
            ctx: with batch and num_targets.
            buffers: nested dict of arrays as `buffer_specs()`.
            specs: as for `hidden`.

        Returns:
            (f32 scalar, Out): losses are divided by ctx.num_targets, so microbatches add up to their batch.
        """
        carry, outs = self.hidden(params, ctx, buffers, specs)
        with jax.named_scope("head"):
            weights = self.head_weights(params, ctx, specs)
            _, outs["head"] = self.head.apply(weights, carry, ctx.fold("head"), buffers.get("head", {}))
        out = Out.merge(outs)
        assert out.loss is not None
        return out.loss, out

    def logits(self, params: Nested, ctx: Context, buffers: Nested) -> jax.Array:
        """float32 logits_BSV of ctx.batch["tokens"]: for sampling and tests; training never holds them."""
        carry, _ = self.hidden(params, ctx, buffers)
        return self.head.logits(self.head_weights(params, ctx), carry, ctx)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward: three times the forward pass's matrix products. Recomputation is not counted."""
        forward, weights_alone = (sum(s.flops_per_token(n) for s in self.stages.values()) for n in (seq_len, 0))
        return 3.0 * forward - (0.0 if self.lora is None else weights_alone)  # frozen weights have no gradient


def _uses_axis(specs: Nested, axis: str) -> bool:
    leaves: list[ParameterSpec] = jax.tree.leaves(specs)
    return any(axis in (axes if isinstance(axes, tuple) else (axes,)) for spec in leaves for axes in spec.mesh_axes)
