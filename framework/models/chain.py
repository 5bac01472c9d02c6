"""Chain: a model as stages one after the other. What flows between them is one pytree, the carry.

The chain is what lets a schedule stop the backward pass between stages, and within a Stack between its units, so
nothing here differentiates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from framework.layers.base import Context, Layer, Out
from framework.layers.lora import LoRA
from framework.layers.score_head import LABEL
from framework.layers.section import Section
from framework.layers.stack import Stack
from framework.layout import Nested, ParameterSpec, fetch_tree, flatten, unflatten

# {stage: {path: spec}}; instead of a spec, anything with a memory_kind will do.
Places = dict[str, dict[str, Any]]


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
        stacks = {}
        for name, stage in self.stages.items():
            if isinstance(stage, Stack):
                stacks[name] = stage
        return stacks

    def in_sections(self, sections: Iterable[Section]) -> Chain:
        """The same model with sections in the place of stacks, each a stage; those of one stack are given in order."""
        chain = copy.copy(self)
        # What was computed of the whole stacks is computed again.
        chain.__dict__.pop("stacks", None)
        chain.stages = {}
        sections_by_home: dict[str, list[Section]] = {}
        for section in sections:
            sections_by_home.setdefault(section.home, []).append(section)
        for name, stage in self.stages.items():
            if isinstance(stage, Stack) and name in sections_by_home:
                for section in sections_by_home[name]:
                    chain.stages[section.name] = stage.in_section(section)
            else:
                chain.stages[name] = stage
        return chain

    def merged(self, outs: dict[str, Out]) -> Out:
        """The Out of the model from those of its stages. The metrics of sections are those of their stack."""
        out = Out.merge(outs)
        metrics: dict[str, jax.Array] = {}
        for name, stage_out in outs.items():
            stage = self.stages[name]
            section = stage.section if isinstance(stage, Stack) else None
            for key, value in stage_out.metrics.items():
                if section is None:
                    metrics[f"{name}/{key}"] = value
                    continue
                # A stack's metrics are means over its units.
                share = value * (section.count / section.total)
                metric = f"{section.home}/{key}"
                metrics[metric] = metrics[metric] + share if metric in metrics else share
        return replace(out, metrics=metrics)

    def check(self, mesh: Mesh | AbstractMesh, data: Any) -> None:
        """Raises ValueError when model, mesh and data (a pipeline) do not fit each other."""
        raise NotImplementedError

    def check_platform(self, platform: str) -> None:
        """Raises ValueError when a layer asks by name for a kernel of another platform (tpu, gpu or cpu) than this."""
        for stack in self.stacks.values():
            for layer in stack.unit.walk():
                layer.check_platform(platform)

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """The values that an evaluation sums over batches, inside jit; `out` was made with ctx.training False."""
        raise NotImplementedError

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """The figures that an evaluation reports, "loss" among them, from sums of `scores`."""
        raise NotImplementedError

    # --- parameters --------------------------------------------------------------------------------------------------

    def _specs(self) -> Nested:
        specs = {name: stage.parameter_specs() for name, stage in self.stages.items()}
        shared = {}
        for stack in self.stacks.values():
            shared |= stack.shared_specs()
        # Not within the stack: a stack's parameters have a leading axis of units.
        specs["shared"] = shared
        return {name: spec for name, spec in specs.items() if spec}

    def parameter_specs(self) -> Nested:
        """{stage: nested dict of ParameterSpec} in `param_dtype`; the stage "shared" is of all units of a stack."""

        def in_model(spec: ParameterSpec) -> ParameterSpec:
            if not spec.own_dtype:
                spec = replace(spec, dtype=self.param_dtype)
            if self.lora is None:
                return spec
            # Adapters alone are trained, and they alone have an axis of the role "rank"; and a score head, which is
            # new where a base is adapted (peft's modules_to_save).
            return replace(spec, trainable=not {"rank", LABEL}.isdisjoint(spec.roles))

        return jax.tree.map(in_model, self._specs())

    def buffer_specs(self) -> Nested:
        """{stage: nested dict of TensorSpec}, stages without buffers left out."""
        specs = {name: stage.buffer_specs() for name, stage in self.stages.items()}
        return {name: spec for name, spec in specs.items() if spec}

    def split_units(self, params: Nested, remat: str) -> Nested:
        """Takes the parameters of unrolled stacks apart into lists of their units', the best form to differentiate."""
        split = {}
        for name, stack in self.stacks.items():
            # The parameters may be those of some stages only.
            if stack.is_unrolled(remat) and name in params:
                split[name] = stack.split(params[name])
        return {**params, **split}

    def join_units(self, grads: Nested) -> Nested:
        """The inverse of `split_units`, for gradients."""

        def joined(stage: Any) -> Any:
            if not isinstance(stage, list):
                return stage
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stage)

        return {name: joined(stage) for name, stage in grads.items()}

    def stage_params(self, params: Nested, stage: str) -> Nested:
        """A stage's parameters, those included that it reads by a tie."""
        stage_params = params.get(stage, {})
        for reader, home in self.ties.items():
            if reader.startswith(f"{stage}/"):
                name = reader.split("/", 1)[1]
                tied_param = flatten(params)[home]
                # A new dict: the caller's must not get a second path to the parameter.
                stage_params = {**stage_params, name: tied_param}
        return stage_params

    def stage_specs(self, *groups: Nested) -> Places:
        """{stage: {path: spec}} of all parameters that it reads, from the specs of some groups (trained, frozen)."""
        spec_by_path = {}
        for group in groups:
            spec_by_path |= flatten(group)
        specs = unflatten(spec_by_path)
        stage_names = (*self.stages, "shared")
        return {stage: flatten(self.stage_params(specs, stage)) for stage in stage_names}

    # --- computing ---------------------------------------------------------------------------------------------------

    def run(
        self, name: str, params: Nested, carry: Any, ctx: Context, buffers: Nested, specs: Places | None = None
    ) -> tuple[Any, Out]:
        """Runs one stage: (carry, Out).

        Parameters that `specs` (of `stage_specs`) have in host memory are moved to the device; those of a stack a
        unit at a time.
        """

        def fetch(stage: str, tree: Nested) -> Nested:
            return tree if specs is None else fetch_tree(specs[stage], tree)

        stage = self.stages[name]
        stage_params = self.stage_params(params, name)
        state = buffers.get(name, {})
        # Scopes give the compiler's buffers the names of layers.
        with jax.named_scope(name):
            if not isinstance(stage, Stack):
                weights = stage.prepare(fetch(name, stage_params), ctx)
                return stage.apply(weights, carry, ctx.fold(name), state)

            # Shared parameters are fetched once, outside of the loop over units.
            def fetch_unit(unit: Nested) -> Nested:
                unshared = {key: unit[key] for key in unit if key not in stage.shared}
                return {**unit, **fetch(name, unshared)}

            shared = fetch("shared", params.get("shared", {})) if stage.shared else {}
            return stage.forward(
                stage_params,
                carry,
                stage.context(name, ctx),
                state,
                fetch_unit,
                shared,
            )

    def counts(self, batch: Nested) -> dict[str, jax.Array]:
        """{name: f32 scalar} of a global batch, which the loss is divided by beside counted targets and sequences."""
        return {}

    def loss(
        self,
        params: Nested,
        ctx: Context,
        buffers: Nested,
        specs: Places | None = None,
    ) -> tuple[jax.Array, Out]:
        """The objective of ctx.batch, and everything that leaves the model besides.

        Args:
            params: nested dict of arrays as `parameter_specs()`.
            ctx: with batch and num_targets.
            buffers: nested dict of arrays as `buffer_specs()`.
            specs: as for `run`.

        Returns:
            (f32 scalar, Out): losses are divided by ctx.num_targets, so microbatches add up to their batch.
        """
        carry = None
        outs = {}
        for name in self.stages:
            carry, outs[name] = self.run(name, params, carry, ctx, buffers, specs)
        out = self.merged(outs)
        assert out.loss is not None
        return out.loss, out

    def forward_flops_per_token(self, seq_len: int) -> float:
        """The forward pass's matrix products."""
        return sum(stage.flops_per_token(seq_len) for stage in self.stages.values())

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward: three times the forward pass's matrix products. Recomputation is not counted."""
        forward = self.forward_flops_per_token(seq_len)
        if self.lora is None:
            return 3.0 * forward
        # Frozen weights have no gradient. A context of 0 leaves the products with weights.
        weight_products = self.forward_flops_per_token(0)
        return 3.0 * forward - weight_products
