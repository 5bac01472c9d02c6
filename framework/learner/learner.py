"""The learner turns gradients into new parameters. Configs name this component, and schedules call it.

Each layer of a stack, and each stage that is not stacked, has its own optimizer instance. `make_layer_update` returns
the update of one layer (`update.py`), which works on its weights, gradients, optimizer state (`state.py`) and average.
Updating a whole stage is a vmap of that update, so schedules that update layers in another order compute the same
numbers. Decisions that depend on all gradients (norm, finiteness, clip factor) are made first, in `decide`
(`decisions.py`), and are passed to the updates as scalars.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from plimsoll.framework.config import Config, DType, Fraction, PositiveFloat, PositiveInt, component
from plimsoll.framework.layers.layer_range import LayerRange
from plimsoll.framework.layout import Nested, ParameterSpec, TensorSpec, flatten, move_to_host, unflatten
from plimsoll.framework.learner import decisions, groups, initialization, optimizer_instances
from plimsoll.framework.learner.clipping import ClipMode, Clipping
from plimsoll.framework.learner.precision import Precision
from plimsoll.framework.learner.rules import Optimizer, label
from plimsoll.framework.learner.state import GroupState, layer_specs, spec_like
from plimsoll.framework.learner.update import GroupUpdate
from plimsoll.framework.learner.update_locality import check_independent_updates, measure_update_locality
from plimsoll.framework.learner.update_types import (
    Decision,
    LayerTrainState,
    LayerUpdate,
    LayerUpdateFn,
    ParamGroup,
    unflatten_like,
    update_all_layers,
)
from plimsoll.framework.optimizers.rounding import Rounding, check_dtypes
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
        self._spikes = decisions.SpikeDetector(spike)
        labels, configs = label(specs, optimizer, [rule.instantiate() for rule in rules])
        divided = groups.split_frozen(specs, labels)
        self.specs = divided.trainable
        self.frozen_specs = divided.frozen
        self._set_optimizers(labels, configs)

    def _set_optimizers(self, labels: dict[str, str], configs: dict[str, Config]) -> None:
        """Instantiate the optimizers and fit each to the parameters of its groups.

        Args:
            labels: by path, the label of the parameter's optimizer, or FROZEN.
            configs: by label, the optimizer's config.

        Raises:
            ValueError: no parameter is trainable, or weights of their dtype cannot be rounded as requested.
        """
        learning_rates = {name: optimizer_instances.get_learning_rate(config) for name, config in configs.items()}
        if not self.specs:
            raise ValueError("learner.rules freeze every parameter; nothing would be trained")
        rounding = self._precision.rounding
        check_dtypes(rounding, {spec.dtype for spec in jax.tree.leaves(self.specs)})
        self.groups = groups.make_groups(self.specs, labels, across_stages=self.scope == "model")
        labels_in_use = {group.label for group in self.groups}
        self.learning_rates = optimizer_instances.distinct_learning_rates(configs, learning_rates, labels_in_use)
        specs_by_group = {(group.stage, group.label): self.layer_specs(group) for group in self.groups}
        self._instances = optimizer_instances.make_instances(configs, learning_rates, specs_by_group)
        draws = any(instance.optimizer.draws for instance in self._instances.values())
        self.draws = self._precision.draws or draws

    def split_into_ranges(self, layer_ranges: Iterable[LayerRange]) -> Learner:
        """Return the learner for stacks that are split into layer ranges, which keep the stack's optimizers.

        Args:
            layer_ranges: the layer ranges; those of one stack are in order.
        """
        learner = copy.copy(self)
        learner.specs = groups.split_into_ranges(self.specs, layer_ranges)
        learner.frozen_specs = groups.split_into_ranges(self.frozen_specs, layer_ranges)
        learner.groups = groups.split_groups(self.groups, layer_ranges)
        learner._instances = dict(self._instances)
        for layer_range in layer_ranges:
            for (stage, group_label), instance in self._instances.items():
                if stage == layer_range.home:
                    learner._instances[layer_range.name, group_label] = instance
        return learner

    # --- state: specs and initialization -----------------------------------------------------------------------------

    def gradient_dtype(self, spec: ParameterSpec) -> Any:
        """Return the dtype in which gradients are summed over microbatches: that of the update, at least float32."""
        return self._precision.gradient_dtype(spec)

    def gradient_specs(self, offloaded: Container[str] = ()) -> Nested:
        """Return the specs of buffers for all gradients.

        Without gradient accumulation nothing is summed, and the buffers have the dtypes of the parameters.

        Args:
            offloaded: names of the stages whose large buffers are in host memory.
        """

        def buffer(spec: ParameterSpec) -> TensorSpec:
            dtype = spec.dtype if self.accumulate == 1 else self.gradient_dtype(spec)
            return TensorSpec(spec.shape, dtype, spec.mesh_axes)

        buffers = unflatten({path: buffer(spec) for path, spec in flatten(self.specs).items()})
        return self._offload_stages(buffers, offloaded)

    def _offload_stages(self, tree: Nested, offloaded: Container[str]) -> Nested:
        """Move the large leaves of some stages to host memory.

        Args:
            tree: specs by stage, in the structure of the parameters.
            offloaded: names of the stages to offload.
        """
        placed = {}
        for stage, specs in tree.items():
            if stage in offloaded:
                is_stack = any(spec.num_layers is not None for spec in jax.tree.leaves(self.specs[stage]))
                specs = move_to_host(specs, "pinned_host", stacked=is_stack)
            placed[stage] = specs
        return placed

    def optimizer_specs(self, offloaded: Container[str] = ()) -> Nested:
        """Return OptStateSpecs as {stage: {label: {"state": ..., "master": ...}}}.

        Args:
            offloaded: names of the stages whose large leaves are in host memory.
        """
        tree: Nested = {}
        for group in self.groups:
            specs = self.get_group_state(group).entry_specs()
            if group.stage in offloaded:
                specs = move_to_host(specs, "pinned_host", stacked=group.length is not None)
            tree.setdefault(group.stage, {})[group.label] = specs
        return tree

    def ema_specs(self, offloaded: Container[str] = ()) -> Nested:
        """Return the specs of the averages of trainable parameters; {} without `ema`.

        Args:
            offloaded: names of the stages whose large averages are in host memory.
        """
        if self.ema is None:
            return {}

        def average(spec: ParameterSpec) -> TensorSpec:
            return spec_like(spec, self._precision.average_dtype(spec))

        return self._offload_stages(jax.tree.map(average, self.specs), offloaded)

    def get_group_state(self, group: ParamGroup) -> GroupState:
        """Return the optimizer state of a group, or of some of a group's parameters."""
        return GroupState(
            group,
            self.select(self.specs, group),
            self._instances[group.stage, group.label].optimizer,
            self._precision,
            self.clipping.keeps_norms,
        )

    def init(self, precise: Nested) -> LayerUpdate:
        """Return (trainable parameters, optimizer state, averages).

        Args:
            precise: freshly initialized trainable parameters, not cast.
        """
        leaves = self.init_part(flatten(precise))
        params = unflatten_like(self.specs, leaves["parameter"])
        optimizer = unflatten_like(self.optimizer_specs(), leaves["optimizer"])
        ema = unflatten_like(self.ema_specs(), leaves["ema"])
        return params, optimizer, ema

    def init_part(
        self, precise: dict[str, jax.Array], *, single_layer: bool = False
    ) -> dict[str, dict[str, jax.Array]]:
        """Initialize the state of some of the parameters, as `init` does.

        Args:
            precise: initial values by path, for one of the parts of `init_parts` or for all parameters.
            single_layer: whether the arrays are one layer's, without the leading axis.

        Returns:
            {"parameter": ..., "optimizer": ..., "ema": ...}, each by path.
        """
        parts = groups.restrict_groups(self.groups, precise)
        return initialization.init_part(
            precise,
            [self.get_group_state(group) for group in parts],
            self.specs,
            self._precision,
            keeps_averages=self.ema is not None,
            single_layer=single_layer,
        )

    def init_parts(self) -> list[tuple[str, ...]]:
        """Return the paths of trainable parameters for calls of `init_part`, in the smallest possible parts."""
        return initialization.init_parts([self.get_group_state(group) for group in self.groups])

    # --- groups and their parts --------------------------------------------------------------------------------------

    def select(self, tree: Nested, group: ParamGroup) -> Nested:
        """Return a group's part of a tree of all trainable parameters, without the stage.

        For scope = model, stacks are split into separate layers.

        Args:
            tree: arrays or specs of all trainable parameters, or at least of the group's stage.
            group: the group to select.
        """
        return groups.select(tree, group, self.specs)

    def layer_specs(self, group: ParamGroup) -> Nested:
        """Return the parameter specs of one layer of a group, in the dtype in which the update is computed."""
        return layer_specs(self.select(self.specs, group), group, self._precision)

    def update_locality(self, group: ParamGroup) -> UpdateLocality:
        """Return the smallest part of a layer of the group that can be updated independently; measured on first use."""
        instance = self._instances[group.stage, group.label]
        return self.clipping.adjust_locality(measure_update_locality(instance, self.layer_specs(group)))

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
            instance = self._instances[group.stage, group.label]
            check_independent_updates(group.label, instance, self.layer_specs(group))

    # --- one step ----------------------------------------------------------------------------------------------------

    @staticmethod
    def norm(grads: Nested) -> jax.Array:
        """Return the norm of all gradients together, f32 or wider."""
        return decisions.global_norm(grads)

    def decide(self, loss: jax.Array, norm: jax.Array, counter: Nested) -> Decision:
        """Make the decision that depends on all gradients, from their norm.

        It holds the factor that clips the gradients, and whether the step counts: loss and norm are finite, and the
        loss is not a spike.

        Args:
            loss, norm: f32 scalars.
            counter: the state's counters.
        """
        return decisions.decide(loss, norm, counter, clipping=self.clipping, spikes=self._spikes, draws=self.draws)

    def counter_specs(self) -> dict[str, TensorSpec]:
        """Return the specs of the moving averages of the loss and of its square, f32; {} if spikes are not skipped."""
        return self._spikes.counter_specs()

    def count_loss(self, counter: Nested, loss: jax.Array, ok: jax.Array) -> Nested:
        """Return the averages after a step; a skipped step leaves them unchanged.

        Args:
            counter: the state's counters before the step.
            loss: f32 scalar, the step's loss.
            ok: bool scalar, whether the step counts.
        """
        return self._spikes.count_loss(counter, loss, ok)

    def update(
        self,
        params: Nested,
        grads: Nested,
        optimizer: Nested,
        ema: Nested,
        decision: Decision,
        run: Callable[[ParamGroup, LayerUpdateFn, LayerTrainState, Decision], LayerUpdate] | None = None,
        stage: str | None = None,
    ) -> LayerUpdate:
        """Return (parameters, optimizer state, averages), unchanged if the decision is not ok.

        Args:
            params, grads, optimizer, ema: trees of all trainable parameters.
            decision: see `decide`.
            run: applies the update of one layer to a group's weights, gradients, state and averages, of one layer or
                stacked; by default to all layers at once.
            stage: update only this stage; the gradients of other stages may be missing.
        """
        run = run or update_all_layers
        new_params = flatten(params)
        new_ema = flatten(ema)
        new_optimizer = dict(optimizer)
        for group in self.groups:
            if stage not in (None, group.stage):
                continue
            train_state = (
                self.select(params, group),
                self.select(grads, group),
                optimizer[group.stage][group.label],
                self.select(ema, group) if self.ema is not None else {},
            )
            # Layers are counted from the first layer of the whole stack, so that a layer range draws the same noise as
            # its part of an unsplit stack.
            group_decision = decision
            if group.first_layer:
                group_decision = decision._replace(layer=decision.layer + group.first_layer)
            weights, state, average = run(group, self.make_layer_update(group), train_state, group_decision)
            new_params |= groups.unselect(weights, group, self.specs)
            new_ema |= groups.unselect(average, group, self.specs)
            # Copied, so that the caller's dict of the stage does not change.
            new_optimizer[group.stage] = {**new_optimizer[group.stage], group.label: state}
        return unflatten_like(params, new_params), new_optimizer, unflatten_like(ema, new_ema)

    def make_layer_update(self, group: ParamGroup) -> LayerUpdateFn:
        """Return the update of one layer: (weights, grads, optimizer entry, average, decision) -> new values.

        The new values are those of weights, optimizer entry and average.
        """
        return GroupUpdate(
            self.get_group_state(group),
            self._instances[group.stage, group.label].learning_rate,
            self.clipping,
            self.ema,
            self.draws,
        )
