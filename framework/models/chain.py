"""Chain: a model as stages one after the other. What flows between them is one pytree, the carry.

The chain is what lets a schedule stop the backward pass between stages, and within a Stack between its units, so
nothing here differentiates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from framework.layers.base import Context, Layer, Out
from framework.layers.lora import LoRA
from framework.layers.stack import Stack
from framework.layout import Nested, ParameterSpec, fetch_tree, flatten, unflatten

Places = dict[str, dict[str, Any]]  # {stage: {path: spec, or what else has a memory_kind}}


class Chain:
    """The base of models. A subclass's constructor sets these; the first stage is given no carry (None), the last
    returns none, and the loss.

    Attributes:
        stages: in order. A `Stack` is run unit by unit, any other in one piece.
        ties: {path where a stage reads: path where the parameter lives}. The gradient of a tie is the sum of its uses'.
        lora: adapters, beside which all else is frozen.
        param_dtype: dtype of the parameters that the forward pass reads.
        compute_dtype: dtype of weights and activations inside layers.
        calibrates: it has `calibrate`, which sets first values by the first batch (a flow's ActNorm).
        draws_images: it has `sample`, `encode`, `decode` and `quantize` (a flow).
    """

    stages: dict[str, Layer]
    ties: dict[str, str] = {}
    lora: LoRA | None = None
    param_dtype: Any
    compute_dtype: Any
    calibrates: bool = False
    draws_images: bool = False

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        """The stages that are stacks."""
        return {name: stage for name, stage in self.stages.items() if isinstance(stage, Stack)}

    def check(self, mesh: Mesh | AbstractMesh, data: Any) -> None:
        """Raises ValueError when model, mesh and data (a pipeline) do not fit each other."""
        raise NotImplementedError

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """Inside jit: what an evaluation sums over batches; `out` was made without training, see `Context`."""
        raise NotImplementedError

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """What an evaluation reports of these sums; "loss" among it."""
        raise NotImplementedError

    # --- parameters --------------------------------------------------------------------------------------------------

    def _specs(self) -> Nested:
        specs = {name: stage.parameter_specs() for name, stage in self.stages.items()}
        shared = {key: spec for stack in self.stacks.values() for key, spec in stack.shared_specs().items()}
        return {name: spec for name, spec in {**specs, "shared": shared}.items() if spec}

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

    def split_units(self, params: Nested, remat: str) -> Nested:
        """Parameters as they are best differentiated: those of an unrolled stack as a list of its units'."""
        split = {name: stack for name, stack in self.stacks.items() if stack.is_unrolled(remat) and name in params}
        return {**params, **{name: stack.split(params[name]) for name, stack in split.items()}}

    def join_units(self, grads: Nested) -> Nested:
        """The inverse of `split_units`, for gradients."""

        def joined(stage: Any) -> Any:
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stage) if isinstance(stage, list) else stage

        return {name: joined(stage) for name, stage in grads.items()}

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

    # --- computing ---------------------------------------------------------------------------------------------------

    def run(
        self, name: str, params: Nested, carry: Any, ctx: Context, buffers: Nested, specs: Places | None = None
    ) -> tuple[Any, Out]:
        """One stage: (carry, Out). Parameters that `specs` (of `stage_specs`) have in host memory come to the device,
        of a stack a unit's at a time. Scopes give the compiler's buffers the names of layers."""

        def fetch(stage: str, tree: Nested) -> Nested:
            return tree if specs is None else fetch_tree(specs[stage], tree)

        stage, own, state = self.stages[name], self.stage_params(params, name), buffers.get(name, {})
        with jax.named_scope(name):
            if not isinstance(stage, Stack):
                return stage.apply(stage.prepare(fetch(name, own), ctx), carry, ctx.fold(name), state)

            def fetch_unit(unit: Nested) -> Nested:
                return {**unit, **fetch(name, {key: unit[key] for key in unit if key not in stage.shared})}

            shared = fetch("shared", params.get("shared", {})) if stage.shared else {}
            return stage.forward(own, carry, ctx.fold(name), state, fetch_unit, shared)

    def loss(self, params: Nested, ctx: Context, buffers: Nested, specs: Places | None = None) -> tuple[jax.Array, Out]:
        """The objective of ctx.batch, and all that leaves the model besides.

        Args:
            params: nested dict of arrays as `parameter_specs()`.
            ctx: with batch and num_targets.
            buffers: nested dict of arrays as `buffer_specs()`.
            specs: as for `run`.

        Returns:
            (f32 scalar, Out): losses are divided by ctx.num_targets, so microbatches add up to their batch.
        """
        carry, outs = None, {}
        for name in self.stages:
            carry, outs[name] = self.run(name, params, carry, ctx, buffers, specs)
        out = Out.merge(outs)
        assert out.loss is not None
        return out.loss, out

    def forward_flops_per_token(self, seq_len: int) -> float:
        """The forward pass's matrix products."""
        return sum(stage.flops_per_token(seq_len) for stage in self.stages.values())

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward: three times the forward pass's matrix products. Recomputation is not counted."""
        forward, weights_alone = (self.forward_flops_per_token(length) for length in (seq_len, 0))
        return 3.0 * forward - (0.0 if self.lora is None else weights_alone)  # frozen weights have no gradient
