"""Chain: a model as a sequence of stages. The carry, one pytree, flows between them.

A schedule may stop the backward pass between stages, and within a Stack between its layers, so nothing here
differentiates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from plimsoll.framework.layers.base import Carry, Context, Layer, Out
from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.low_precision import RecipeName
from plimsoll.framework.layers.precision_rules import check_formats
from plimsoll.framework.layers.score_head import LABEL
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, ParameterSpec, TensorSpec, TrainState, fetch_tree, flatten, unflatten

StageSpecs = dict[str, dict[str, TensorSpec]]  # by stage and path


class Chain:
    """Base class of models. A subclass's constructor sets these attributes.

    The first stage gets no carry (None); the last returns no carry, and the loss.

    Attributes:
        stages: the stages in order. A `Stack` runs layer by layer, any other stage as a whole.
        ties: {path at which a stage reads: path at which the parameter is stored}. The gradient of a tied parameter
            is the sum over its uses.
        lora: adapters, which freeze everything else except a score head.
        precision: recipes of 8-bit matrix products by regex, see `CausalLM`.
        param_dtype: dtype of the parameters that the forward pass reads.
        compute_dtype: dtype of weights and activations inside layers.
        calibrates: whether it has `calibrate`, which initializes parameters from the first batch (a flow's ActNorm).
        generates_images: whether it has `build_image_sampler` (a flow).
    """

    stages: dict[str, Layer]
    ties: dict[str, str] = {}
    lora: LoRA | None = None
    precision: Mapping[str, RecipeName] = {}
    param_dtype: np.dtype
    compute_dtype: np.dtype
    calibrates: bool = False
    generates_images: bool = False

    def build_image_sampler(self, program: Any, state: TrainState, *, averaged: bool) -> Any:
        """Return an object whose `sample(num, temperature, seed)` draws images, uint8 [num, H, W, C].

        Args:
            program: the Program that has this model.
            state: its state.
            averaged: whether to use the averages of the weights.
        """
        raise NotImplementedError

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        """The stages that are stacks."""
        stacks = {}
        for name, stage in self.stages.items():
            if isinstance(stage, Stack):
                stacks[name] = stage
        return stacks

    def split_into_ranges(self, layer_ranges: Iterable[LayerRange]) -> Chain:
        """Return the same model with ranges of layers instead of whole stacks, each as a stage.

        Args:
            layer_ranges: the ranges; those of a stack are in order and cover it.
        """
        chain = copy.copy(self)
        # The cached property of the whole stacks must be recomputed.
        chain.__dict__.pop("stacks", None)
        chain.stages = {}
        ranges_by_stack: dict[str, list[LayerRange]] = {}
        for layer_range in layer_ranges:
            ranges_by_stack.setdefault(layer_range.home, []).append(layer_range)
        for name, stage in self.stages.items():
            if isinstance(stage, Stack) and name in ranges_by_stack:
                for layer_range in ranges_by_stack[name]:
                    chain.stages[layer_range.name] = stage.select_range(layer_range)
            else:
                chain.stages[name] = stage
        return chain

    def merge_outs(self, outs: dict[str, Out]) -> Out:
        """Merge the Outs of the stages into that of the model.

        The metrics of layer ranges are merged into those of their stack.
        """
        out = Out.merge(outs)
        metrics: dict[str, jax.Array] = {}
        for name, stage_out in outs.items():
            stage = self.stages[name]
            layer_range = stage.layer_range if isinstance(stage, Stack) else None
            for key, value in stage_out.metrics.items():
                if layer_range is None:
                    metrics[f"{name}/{key}"] = value
                    continue
                # A stack's metrics are means over its layers.
                share = value * (layer_range.count / layer_range.total)
                metric = f"{layer_range.home}/{key}"
                metrics[metric] = metrics[metric] + share if metric in metrics else share
        return replace(out, metrics=metrics)

    def check(self, mesh: Mesh | AbstractMesh, data: Any) -> None:
        """Raise ValueError if model, mesh and data (a pipeline) do not fit each other."""
        raise NotImplementedError

    def check_platform(self, platform: str, capability: str | None = None) -> None:
        """Raise ValueError if a layer requests a kernel or numbers that a device does not have.

        Args:
            platform: tpu, gpu or cpu.
            capability: compute capability of a GPU, such as "8.9"; None if unknown.
        """
        check_formats(self.precision, platform, capability)
        for stack in self.stacks.values():
            for layer in stack.pattern.walk():
                layer.check_platform(platform)

    def scores(self, out: Out, batch: Nested) -> dict[str, jax.Array]:
        """Return the values that an evaluation sums over batches, inside jit; `out` is from ctx.training = False."""
        raise NotImplementedError

    def summary(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the figures that an evaluation reports, including "loss", from sums of `scores`."""
        raise NotImplementedError

    # --- parameters --------------------------------------------------------------------------------------------------

    def _specs(self) -> Nested:
        specs = {name: stage.parameter_specs() for name, stage in self.stages.items()}
        shared = {}
        for stack in self.stacks.values():
            shared |= stack.shared_specs()
        # Separate from the stack: a stack's parameters have a leading axis of layers.
        specs["shared"] = shared
        return {name: spec for name, spec in specs.items() if spec}

    def parameter_specs(self) -> Nested:
        """Return {stage: nested dict of ParameterSpec} in `param_dtype`.

        The stage "shared" has the parameters that all layers of a stack share.
        """

        def in_model(spec: ParameterSpec) -> ParameterSpec:
            if not spec.keeps_dtype:
                spec = replace(spec, dtype=self.param_dtype)
            if self.lora is None:
                return spec
            # Only adapters are trained, which are the only ones with an axis of the role "rank", and a score head,
            # which is new when a base model is adapted (peft's modules_to_save).
            return replace(spec, trainable=not {"rank", LABEL}.isdisjoint(spec.roles))

        return jax.tree.map(in_model, self._specs())

    def buffer_specs(self) -> Nested:
        """Return {stage: nested dict of TensorSpec}; stages without buffers are left out."""
        specs = {name: stage.buffer_specs() for name, stage in self.stages.items()}
        return {name: spec for name, spec in specs.items() if spec}

    def unstack_layers(self, params: Nested, remat: str) -> Nested:
        """Split the parameters of unrolled stacks into lists per layer, the best form for differentiation."""
        split = {}
        for name, stack in self.stacks.items():
            # The parameters may be those of only some stages.
            if stack.is_unrolled(remat) and name in params:
                split[name] = stack.split(params[name])
        return {**params, **split}

    def stack_layers(self, grads: Nested) -> Nested:
        """Inverse of `unstack_layers`, for gradients."""
        stacked = {}
        for name, stage in grads.items():
            is_list = isinstance(stage, list)
            stacked[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stage) if is_list else stage
        return stacked

    def stage_params(self, params: Nested, stage: str) -> Nested:
        """Return a stage's parameters, including those that it reads through a tie."""
        stage_params = params.get(stage, {})
        for reader, home in self.ties.items():
            if reader.startswith(f"{stage}/"):
                name = reader.split("/", 1)[1]
                tied_param = flatten(params)[home]
                # A new dict, so that the caller's dict does not get a second path to the parameter.
                stage_params = {**stage_params, name: tied_param}
        return stage_params

    def stage_specs(self, *groups: Nested) -> StageSpecs:
        """Return {stage: {path: spec}} of all parameters that each stage reads, from the specs of some groups.

        The groups are, for example, trained and frozen parameters.
        """
        spec_by_path = {}
        for group in groups:
            spec_by_path |= flatten(group)
        specs = unflatten(spec_by_path)
        stage_names = (*self.stages, "shared")
        return {stage: flatten(self.stage_params(specs, stage)) for stage in stage_names}

    # --- execution ---------------------------------------------------------------------------------------------------

    def run(
        self, name: str, params: Nested, carry: Carry, ctx: Context, buffers: Nested, specs: StageSpecs | None = None
    ) -> tuple[Carry, Out]:
        """Run one stage and return (carry, Out).

        Parameters that are in host memory according to `specs` (from `stage_specs`) are moved to the device; those of
        a stack one layer at a time.
        """

        def fetch(stage: str, tree: Nested) -> Nested:
            return tree if specs is None else fetch_tree(specs[stage], tree)

        stage = self.stages[name]
        stage_params = self.stage_params(params, name)
        state = buffers.get(name, {})
        # Scopes name the compiler's buffers after layers.
        with jax.named_scope(name):
            if not isinstance(stage, Stack):
                weights = stage.prepare(fetch(name, stage_params), ctx)
                return stage.apply(weights, carry, ctx.fold(name), state)

            # Shared parameters are fetched once, outside of the loop over layers.
            def fetch_layer(params: Nested) -> Nested:
                unshared = {key: params[key] for key in params if key not in stage.shared}
                return {**params, **fetch(name, unshared)}

            shared = fetch("shared", params.get("shared", {})) if stage.shared else {}
            return stage.forward(stage_params, carry, stage.context(name, ctx), state, fetch_layer, shared)

    def counts(self, batch: Nested) -> dict[str, jax.Array]:
        """Return {name: f32 scalar}: numbers of a global batch that the loss is divided by.

        These are in addition to counted targets and sequences.
        """
        return {}

    def loss(
        self, params: Nested, ctx: Context, buffers: Nested, specs: StageSpecs | None = None
    ) -> tuple[jax.Array, Out]:
        """Return the objective for ctx.batch, and everything else that the model returns.

        Args:
            params: nested dict of arrays, in the structure of `parameter_specs()`.
            ctx: context with batch and num_targets.
            buffers: nested dict of arrays, in the structure of `buffer_specs()`.
            specs: see `run`.

        Returns:
            (f32 scalar, Out): losses are divided by ctx.num_targets, so microbatches add up to their batch.
        """
        carry = None
        outs = {}
        for name in self.stages:
            carry, outs[name] = self.run(name, params, carry, ctx, buffers, specs)
        out = self.merge_outs(outs)
        assert out.loss is not None
        return out.loss, out

    def forward_flops_per_token(self, seq_len: int) -> float:
        """Count the forward pass's matrix products."""
        return sum(stage.flops_per_token(seq_len) for stage in self.stages.values())

    def flops_per_token(self, seq_len: int) -> float:
        """Count forward and backward: three times the forward pass's matrix products. Recomputation is not counted."""
        forward = self.forward_flops_per_token(seq_len)
        if self.lora is None:
            return 3.0 * forward
        # Frozen weights have no gradient. With a context of 0, only the products with weights are counted.
        weight_products = self.forward_flops_per_token(0)
        return 3.0 * forward - weight_products
