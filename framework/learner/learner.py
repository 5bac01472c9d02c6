"""The learner turns gradients into new parameters. Configs name this component, and schedules call it.

Each layer of a stack, and each stage that is not stacked, has its own optimizer instance. `get_layer_update` returns
the update of one layer (`update.py`), which works on its weights, gradients, optimizer state (`group_optimizer.py`) and
average. Updating a whole stage is a vmap of that update, so schedules that update layers in another order compute the
same numbers. Decisions that depend on all gradients (norm, finiteness, clip factor) are made first, in `decide`
(`decisions.py`), and are passed to the updates as scalars.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.config import Config, DType, Fraction, PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layers.scale_history import HISTORY
from plimsoll.framework.layout import Nested, OptStateSpec, ParameterSpec, PyTree, TensorSpec, flatten, unflatten
from plimsoll.framework.learner.decisions import ClipMode, Clipping, Decision, SpikeDetector
from plimsoll.framework.learner.group_optimizer import GroupOptimizer, Precision, fit_optimizers, unflatten_like
from plimsoll.framework.learner.rules import (
    FROZEN,
    Optimizer,
    ParamGroup,
    distinct_learning_rates,
    get_learning_rate,
    label,
    make_groups,
    split_stack_specs,
    unstack,
)
from plimsoll.framework.learner.update import LayerTrainState, LayerUpdate, LayerUpdateFn, update_all_layers
from plimsoll.framework.optimizers.rounding import Rounding, check_dtypes, fold
from plimsoll.framework.optimizers.update_locality import UpdateLocality


@component
class Learner:
    """Turns gradients into new parameters.

    Args:
        specs: the model's parameter specs, given by the experiment.
        optimizer: any function that returns an optax transformation, for example `optax.adamw`. A norm over all
            parameters inside it would see one layer at a time: use `clip`, or `scope`.
        scope: which parameters share an instance of the optimizer. "layer": each layer, and each stage outside the
            stack, has its own. "model", for example for Prodigy: one instance for all trainable parameters that it
            updates, with separate layers; only with memory.update = after_backward, which has all gradients together.
        rules: exceptions by path; a pattern that matches nothing is an error.
        clip: the bound of `clip_mode`; None clips nothing.
        clip_mode: the quantity to bound. "global_norm": the norm of all gradients, exactly. The others also work if the
            update is part of the backward pass (memory.update = in_backward). "two_pass": the same, with a second
            backward pass. "previous_norm": gradients are divided by the factor by which the previous step's norm was
            too large. "update_rms": the RMS of each tensor's update, as in Adafactor (clip is usually 1).
            "norm_growth": the factor by which each tensor's gradient norm may grow from step to step, as in Fira and
            APOLLO (clip is usually 1.01).
        accumulate: microbatches per step.
        ema: decay of a moving average of the weights, for example 0.999; None keeps none. Averages are float32, or
            the wider dtype of the update: four bytes per trainable parameter, also with bfloat16 weights.
        master_dtype: dtype of a precise copy of the weights in the optimizer state; None updates only the parameters
            themselves.
        moment_dtype: dtype in which moments are stored; None means that of the weights that are updated. bfloat16
            moments are rounded stochastically, which is right on average.
        rounding: how weights narrower than float32 are updated without a master copy. "nearest": the update is
            computed in their own dtype. The others compute in float32. "stochastic" rounds bfloat16 up or down at
            random, right on average, and stores nothing. "kahan" stores the rounding error, in the weights' dtype.
        nonfinite: the reaction to a step with a loss or gradient that is not finite. The step updates nothing,
            except under memory.update = in_backward the layers before that gradient in the backward pass. "skip"
            counts it and continues, "stop" ends the run, "rollback" returns to the last checkpoint (or to the start)
            and skips only its batch.
        max_nonfinite: number of consecutive skipped steps (or of rollbacks in a run) that ends the run anyway.
        spike: number of standard deviations by which a loss may exceed the average of the updates before it, for
            example 8; a step above that updates nothing and is counted as skipped. None skips no step. Mean and
            deviation are moving averages over about a hundred updates; the first twenty updates are never skipped.

    Attributes:
        specs, frozen_specs: specs of the trainable and of the frozen parameters, by stage.
        groups: the groups of trainable parameters.
        draws: whether updates draw noise.
        clipping, spikes: how gradients are clipped, and which losses are skipped.
        learning_rates: learning rates to report, by the optimizer's label: "default", and "rule0" for `rules.0` if
            its rate differs.
    """

    def __init__(
        self,
        *,
        specs: Nested,
        optimizer: Optimizer,
        scope: Literal["layer", "model"] = "layer",
        rules: list[Config] = [],  # noqa: B006
        clip: PositiveFloat | None = 1.0,
        clip_mode: ClipMode = "global_norm",
        accumulate: PositiveInt = 1,
        ema: Fraction | None = None,
        master_dtype: DType | None = None,
        moment_dtype: DType | None = None,
        rounding: Rounding = "nearest",
        nonfinite: Literal["skip", "stop", "rollback"] = "skip",
        max_nonfinite: PositiveInt = 10,
        spike: PositiveFloat | None = None,
    ):
        if clip_mode == "norm_growth" and clip is not None and clip <= 1.0:
            raise ValueError(
                f"learner.clip: expected over 1 for clip_mode norm_growth (for example 1.01), given {clip}"
            )
        if rounding != "nearest" and master_dtype is not None:
            raise ValueError(
                f"learner.rounding = {rounding} with learner.master_dtype = {master_dtype}: both keep small updates "
                "from being lost; use only one: learner.master_dtype = None, or learner.rounding = nearest"
            )
        self.scope = scope
        self.clip = clip
        self.accumulate = accumulate
        self.ema = ema
        self.clip_mode: ClipMode | None = None if clip is None else clip_mode
        self.nonfinite = nonfinite
        self.max_nonfinite = max_nonfinite
        self.spike = spike
        self._precision = Precision(
            rounding,
            None if master_dtype is None else jnp.dtype(master_dtype),
            None if moment_dtype is None else jnp.dtype(moment_dtype),
        )
        self.clipping = Clipping(clip, self.clip_mode)
        self.spikes = SpikeDetector(spike)

        # The parameters: trainable or frozen, and the optimizer's label of each.
        labels, configs = label(specs, optimizer, [rule.instantiate() for rule in rules])
        flat_specs = flatten(specs)
        self.specs = unflatten({path: flat_specs[path] for path, name in labels.items() if name != FROZEN})
        self.frozen_specs = unflatten({path: flat_specs[path] for path, name in labels.items() if name == FROZEN})
        if not self.specs:
            raise ValueError("learner.rules freeze every parameter; nothing would be trained")
        check_dtypes(rounding, {spec.dtype for spec in jax.tree.leaves(self.specs)})
        self.groups = make_groups(self.specs, labels, across_stages=scope == "model")

        # The optimizers, each fitted to the parameters of its groups.
        learning_rates = {name: get_learning_rate(config) for name, config in configs.items()}
        labels_in_use = {group.label for group in self.groups}
        self.learning_rates = distinct_learning_rates(configs, learning_rates, labels_in_use)
        fitted: list[GroupOptimizer] = []
        for name, config in configs.items():
            specs_by_group = {group: self.select(self.specs, group) for group in self.groups if group.label == name}
            keeps_norms = self.clip_mode == "norm_growth" and name != HISTORY
            fitted += fit_optimizers(
                config, learning_rates[name], specs_by_group, self._precision, keeps_norms=keeps_norms
            )
        self.draws = self._precision.draws or any(group_optimizer.transformation.draws for group_optimizer in fitted)
        # The update of one layer, by stage and label of the group.
        self._updates: dict[tuple[str, str], LayerUpdateFn] = {}
        for group_optimizer in fitted:
            group = group_optimizer.group
            update = LayerUpdateFn(group_optimizer, self.clipping, ema, self.draws)
            if group.label == HISTORY:
                # Scales are not gradients, and their averages would be too small for the arrays.
                update = replace(update, clipping=Clipping(None, None), ema=None if ema is None else 0.0)
            self._updates[group.stage, group.label] = update

    def split_into_ranges(self, layer_ranges: Iterable[LayerRange]) -> Learner:
        """Return the learner for stacks that are split into layer ranges, which keep the stack's optimizers.

        Args:
            layer_ranges: the layer ranges; those of one stack are in order.
        """
        learner = copy.copy(self)
        learner.specs = split_stack_specs(self.specs, layer_ranges)
        learner.frozen_specs = split_stack_specs(self.frozen_specs, layer_ranges)
        learner.groups = []
        learner._updates = dict(self._updates)
        for group in self.groups:
            group_ranges = [layer_range for layer_range in layer_ranges if layer_range.home == group.stage]
            if not group_ranges:
                learner.groups.append(group)
            for layer_range in group_ranges:
                name = layer_range.name
                range_group = replace(group, stage=name, length=layer_range.count, layer_range=layer_range)
                learner.groups.append(range_group)
                update = self.get_layer_update(group)
                range_specs = learner.select(learner.specs, range_group)
                range_optimizer = replace(update.optimizer, group=range_group, specs=range_specs)
                learner._updates[name, group.label] = replace(update, optimizer=range_optimizer)
        return learner

    # --- state: specs and initialization -----------------------------------------------------------------------------

    def gradient_dtype(self, spec: ParameterSpec) -> np.dtype:
        """Return the dtype in which gradients are summed over microbatches: that of the update, at least float32."""
        return self._precision.sum_dtype(spec)

    def gradient_specs(self) -> Nested:
        """Return the specs of buffers for all gradients, on the device.

        Without gradient accumulation nothing is summed, and the buffers have the dtypes of the parameters.
        """
        buffers = {}
        for path, spec in flatten(self.specs).items():
            dtype = spec.dtype if self.accumulate == 1 else self.gradient_dtype(spec)
            buffers[path] = TensorSpec(spec.shape, dtype, spec.mesh_axes)
        return unflatten(buffers)

    def optimizer_specs(self) -> Nested:
        """Return OptStateSpecs as {stage: {label: {"state": ..., "master": ...}}}, on the device.

        The path of a moment in the training state is, for example,
        optimizer/stack/default/state/0/mu/block0/mlp/up/weight.
        """
        tree: Nested = {}
        for group in self.groups:
            specs = self.get_layer_update(group).optimizer.entry_specs()
            tree.setdefault(group.stage, {})[group.label] = specs
        return tree

    def ema_specs(self) -> Nested:
        """Return the specs of the averages of trainable parameters, on the device; {} without `ema`."""
        if self.ema is None:
            return {}
        averages = {}
        for path, spec in flatten(self.specs).items():
            averages[path] = OptStateSpec(spec.shape, self._precision.sum_dtype(spec), spec.mesh_axes)
        return unflatten(averages)

    def init(self, precise: Nested) -> LayerUpdate:
        """Return the initial parameters, optimizer state and averages.

        Args:
            precise: freshly initialized trainable parameters, not cast.
        """
        leaves = self.init_part(flatten(precise))
        return LayerUpdate(
            weights=unflatten_like(self.specs, leaves["parameter"]),
            entry=unflatten_like(self.optimizer_specs(), leaves["optimizer"]),
            average=unflatten_like(self.ema_specs(), leaves["ema"]),
        )

    def init_part(
        self, precise: dict[str, jax.Array], *, single_layer: bool = False
    ) -> dict[str, dict[str, jax.Array]]:
        """Initialize the state of some of the parameters, as `init` does.

        The model is initialized part by part, so that its initial values never all exist in full precision together.

        Args:
            precise: initial values by path, float32 or wider, for one of the parts of `init_parts` or for all
                parameters.
            single_layer: whether the arrays are one layer's, without the leading axis.

        Returns:
            {"parameter": ..., "optimizer": ..., "ema": ...}, each by path.
        """
        flat_specs = flatten(self.specs)
        precision = self._precision
        weights = {path: x.astype(precision.update_dtype(flat_specs[path])) for path, x in precise.items()}
        optimizer: dict[str, jax.Array] = {}
        for group in self.groups:
            paths = tuple(path for path in group.paths if f"{group.path_prefix}{path}" in precise)
            if not paths:
                continue
            part = self.get_layer_update(group).optimizer.restrict(paths)
            is_stacked = group.length is not None and not single_layer
            optimizer |= part.init(self.select(unflatten(weights), part.group), stacked=is_stacked)
        params = {path: x.astype(flat_specs[path].dtype) for path, x in precise.items()}
        averages = {}
        if self.ema is not None:
            averages = {path: x.astype(precision.sum_dtype(flat_specs[path])) for path, x in weights.items()}
        return {"parameter": params, "optimizer": optimizer, "ema": averages}

    def init_parts(self) -> list[tuple[str, ...]]:
        """Return the paths of trainable parameters for calls of `init_part`, in the smallest possible parts."""
        parts = []
        for group in self.groups:
            paths = tuple(f"{group.path_prefix}{path}" for path in group.paths)
            if self.get_layer_update(group).optimizer.separable():
                parts += [(path,) for path in paths]
            else:
                parts.append(paths)
        return parts

    # --- groups and their parts --------------------------------------------------------------------------------------

    def select(self, tree: Nested, group: ParamGroup) -> Nested:
        """Return a group's part of a tree of all trainable parameters, without the stage.

        For scope = model, stacks are split into separate layers.

        Args:
            tree: arrays or specs of all trainable parameters, or at least of the group's stage.
            group: the group to select.
        """
        if group.spans_stages:
            return self._select_across_stages(tree, group)
        leaves = flatten(tree[group.stage])
        return unflatten({path: leaves[path] for path in group.paths})

    def _select_across_stages(self, tree: Nested, group: ParamGroup) -> Nested:
        leaves = flatten(tree)
        flat_specs = flatten(self.specs)
        selected = {}
        for path in group.paths:
            leaf = leaves[path]
            num_layers = flat_specs[path].num_layers
            if num_layers is None:
                selected[path] = leaf
                continue
            for index in range(num_layers):
                is_spec = isinstance(leaf, ParameterSpec)
                selected[f"{path}/{index}"] = unstack(leaf, num_layers) if is_spec else leaf[index]
        return unflatten(selected)

    def _unselect(self, tree: Nested, group: ParamGroup) -> dict[str, PyTree]:
        """Return {path in the model: leaf}; the inverse of `select`.

        Args:
            tree: the group's part of a tree; {} for averages if the learner has none.
            group: the selected group.
        """
        leaves = flatten(tree)
        if group.spans_stages and leaves:
            return self._unselect_across_stages(leaves, group)
        return {f"{group.stage}/{path}": leaf for path, leaf in leaves.items()}

    def _unselect_across_stages(self, leaves: dict[str, PyTree], group: ParamGroup) -> dict[str, PyTree]:
        flat_specs = flatten(self.specs)
        model_leaves = {}
        for path in group.paths:
            num_layers = flat_specs[path].num_layers
            if num_layers is None:
                model_leaves[path] = leaves[path]
            else:
                model_leaves[path] = jnp.stack([leaves[f"{path}/{index}"] for index in range(num_layers)])
        return model_leaves

    def update_locality(self, group: ParamGroup) -> UpdateLocality:
        """Return the smallest part of a layer of the group that can be updated independently; measured on first use."""
        return self.get_layer_update(group).measure_locality()

    def measure_localities(self) -> None:
        """Measure the update locality of each optimizer, for schedules that split a layer into chunks.

        These schedules need it again while a step is traced. A measurement at that point would compile each of its
        operations separately.
        """
        for group in self.groups:
            self.update_locality(group)

    def check_update_locality(self) -> None:
        """Check that no optimizer mixes parameters: with an instance per layer, its updates would be silently wrong.

        Raises:
            ValueError: the update of one parameter depends on gradients of other parameters.
        """
        if self.scope != "layer":
            return
        for group in self.groups:
            self.get_layer_update(group).optimizer.check_independent_updates()

    # --- one step ----------------------------------------------------------------------------------------------------

    @staticmethod
    def norm(grads: Nested) -> jax.Array:
        """Return the norm of all gradients together, f32 or wider; the scales of histories are none."""
        wide_grads = []
        for path, grad in flatten(grads).items():
            if path.rpartition("/")[2] != HISTORY:
                wide_grads.append(grad.astype(jnp.promote_types(grad.dtype, jnp.float32)))
        return optax.tree.norm(wide_grads)

    def decide(self, loss: jax.Array, norm: jax.Array, counter: Nested) -> Decision:
        """Make the decision that depends on all gradients, from their norm.

        It holds the factor that clips the gradients, and whether the step counts: loss and norm are finite, and the
        loss is not a spike.

        Args:
            loss, norm: f32 scalars.
            counter: the state's counters.
        """
        factor = self.clipping.factor(norm, counter)
        ok = jnp.isfinite(norm) & jnp.isfinite(loss)
        count = counter["step"] - counter["skipped"]
        ok = self.spikes.check_spike(ok, loss, counter, count)
        seed = fold(*counter["rng"]) if self.draws else jnp.uint32(0)
        return Decision(norm, factor, ok, count, seed, layer=jnp.int32(0))

    def recall_decision(self, counter: Nested, factor: jax.Array) -> Decision:
        """Return the decision of the last step, which is counted already.

        Args:
            counter: the state's counters after the step.
            factor: scalar, the factor that clips the gradients; 0 if the step did not count.
        """
        count = counter["step"] - 1 - counter["skipped"]
        seed = fold(*counter["rng"]) if self.draws else jnp.uint32(0)
        return Decision(counter["grad_norm"], factor, factor > 0, count, seed, layer=jnp.int32(0))

    def update(
        self,
        params: Nested,
        grads: Nested,
        optimizer: Nested,
        ema: Nested,
        decision: Decision,
        run: Callable[[LayerUpdateFn, LayerTrainState, Decision], LayerUpdate] = update_all_layers,
        stage: str | None = None,
    ) -> LayerUpdate:
        """Return the new parameters, optimizer state and averages, unchanged if the decision is not ok.

        Args:
            params, grads, optimizer, ema: trees of all trainable parameters.
            decision: see `decide`.
            run: applies the update of one layer to a group's weights, gradients, state and averages, of one layer or
                stacked; by default to all layers at once.
            stage: update only this stage; the gradients of other stages may be missing.
        """
        new_params = flatten(params)
        new_ema = flatten(ema)
        new_optimizer = dict(optimizer)
        for group in self.groups:
            if stage not in (None, group.stage):
                continue
            train_state = LayerTrainState(
                weights=self.select(params, group),
                grads=self.select(grads, group),
                entry=optimizer[group.stage][group.label],
                average=self.select(ema, group) if self.ema is not None else {},
            )
            # Layers are counted from the first layer of the whole stack, so that a layer range draws the same noise as
            # its part of an unsplit stack.
            group_decision = decision
            if group.layer_range is not None and group.layer_range.first:
                group_decision = replace(decision, layer=decision.layer + group.layer_range.first)
            updated = run(self.get_layer_update(group), train_state, group_decision)
            new_params |= self._unselect(updated.weights, group)
            new_ema |= self._unselect(updated.average, group)
            # Copied, so that the caller's dict of the stage does not change.
            new_optimizer[group.stage] = {**new_optimizer[group.stage], group.label: updated.entry}
        return LayerUpdate(unflatten_like(params, new_params), new_optimizer, unflatten_like(ema, new_ema))

    def get_layer_update(self, group: ParamGroup) -> LayerUpdateFn:
        """Return the update of one layer of a group."""
        return self._updates[group.stage, group.label]
