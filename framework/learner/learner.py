"""The learner turns gradients into new parameters: the component that configs name, and what schedules call.

Each unit (one layer of a stacked stage, or a stage that is not stacked) has an optimizer instance. `unit_update` gives
the update of one unit (`update.py`), which works on a bundle of weights, gradients, optimizer state (`state.py`) and
average. Updating a whole stage is its vmap, so every schedule that updates units in another order computes the same
numbers. Decisions that concern all gradients (norm, finiteness, clip factor) are taken first, in `decide`
(`decisions.py`), and reach the units as scalars.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from framework.config import (
    Config,
    DType,
    Fraction,
    PositiveFloat,
    PositiveInt,
    component,
)
from framework.layers.section import Section
from framework.layout import (
    Nested,
    ParameterSpec,
    TensorSpec,
    flatten,
    move_to_host,
    unflatten,
)
from framework.learner import decisions, groups, initial, instances
from framework.learner.clipping import ClipMode, Clipping
from framework.learner.precision import Precision
from framework.learner.reaches import check_parameters_apart, reach_of
from framework.learner.rules import (
    Optimizer,
    label,
)
from framework.learner.state import GroupState, spec_like, unit_specs
from framework.learner.units import (
    Bundle,
    Decision,
    Group,
    UnitUpdate,
    Update,
    all_units,
    in_structure,
)
from framework.learner.update import GroupUpdate
from framework.optimizers.reach import Reach
from framework.optimizers.rounding import Rounding, check_dtypes


@component
class Learner:
    """Turns gradients into new parameters.

    Args:
        specs: the model's parameter specs, given by the experiment.
        optimizer: any function that returns an optax transformation, `optax.adamw` say. A norm over all parameters
            inside it would see one layer at a time: use `clip`, or `scope`.
        scope: what has an instance of the optimizer. "model", for Prodigy say: all trainable parameters that it
            updates, layers apart; only with memory.update = after_backward, which has them all at once.
        rules: exceptions by path; a pattern that matches nothing is an error.
        clip: the bound of `clip_mode`; None clips nothing.
        clip_mode: what is bounded. "global_norm": the norm of all gradients, exactly. The others also work where the
            update is part of the backward pass (memory.update = in_backward): "two_pass", the same, by a second
            backward pass; "previous_norm", gradients are divided by what the norm of the step before was too large by;
            "update_rms", each tensor's update, as in Adafactor (clip is usually 1); "norm_growth", what each tensor's
            gradient norm may grow by from step to step, as in Fira and APOLLO (clip is usually 1.01).
        accumulate: microbatches per step.
        ema: decay of a moving average of the weights, 0.999 say; None keeps none. Averages are float32, or the wider
            dtype of the update: four bytes a trainable parameter, beside bfloat16 weights too.
        master_dtype: dtype of a precise copy of the weights in the optimizer state; None updates the parameters alone.
        moment_dtype: dtype in which moments are kept; None means that of the weights that are updated. bfloat16 is
            rounded up or down at random, right on average.
        rounding: how weights narrower than float32 take an update when they have no master copy. "nearest": the update
            is computed in their own dtype. The others compute in float32: "stochastic" rounds bfloat16 up or down at
            random, right on average, and keeps nothing; "kahan" keeps what rounding cut off, in the weights' dtype.
        nonfinite: what a step with a loss or gradient that is not finite does. It updates nothing, except under
            memory.update = in_backward the units that came before that gradient. "skip" counts
            it and goes on, "stop" ends the run, "rollback" goes back to the last checkpoint (or to the start) and
            leaves out its batch alone.
        max_nonfinite: how many skipped steps in a row (or rollbacks in a run) end the run all the same.
        spike: a step updates nothing, and is counted as skipped, when its loss is more than so many standard deviations
            above the average of the updates before it (8, say); None skips none. Both are moving averages over about a
            hundred updates; the first twenty are never skipped.

    Attributes:
        learning_rates: for reports, by the optimizer's label: "default", and "rule0" for that of `rules.0` if its rate
            is another one.
    """

    def __init__(
        self,
        *,
        specs: Nested,
        optimizer: Optimizer,
        scope: Literal["unit", "model"] = "unit",
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
            raise ValueError(f"learner.clip: expected over 1 for clip_mode norm_growth (1.01, say), given {clip}")
        if rounding != "nearest" and master_dtype is not None:
            raise ValueError(
                f"learner.rounding = {rounding} with learner.master_dtype = {master_dtype}: either keeps small updates "
                "from being lost; expected learner.master_dtype = None, or learner.rounding = nearest"
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
        self._spikes = decisions.Spikes(spike)
        labels, configs = label(specs, optimizer, [rule.instantiate() for rule in rules])
        divided = groups.divide(specs, labels)
        self.specs = divided.trainable
        self.frozen_specs = divided.frozen
        self._set_optimizers(labels, configs)

    def _set_optimizers(self, labels: dict[str, str], configs: dict[str, Config]) -> None:
        """Instantiates the optimizers and fits each to the parameters of its groups.

        Args:
            labels: by path, the label of the parameter's optimizer, or FROZEN.
            configs: by label, the optimizer's config.

        Raises:
            ValueError: no parameter is trainable, or weights of their dtype cannot be rounded as asked.
        """
        learning_rates = {name: instances.learning_rate_of(config) for name, config in configs.items()}
        if not self.specs:
            raise ValueError("learner.rules freeze every parameter; nothing would be trained")
        rounding = self._precision.rounding
        check_dtypes(rounding, {spec.dtype for spec in jax.tree.leaves(self.specs)})
        self.groups = groups.groups_of(self.specs, labels, across_stages=self.scope == "model")
        labels_in_use = {group.label for group in self.groups}
        self.learning_rates = instances.distinct_learning_rates(configs, learning_rates, labels_in_use)
        specs_of_units = {(group.stage, group.label): self.unit_specs(group) for group in self.groups}
        self._instances = instances.instances_of(configs, learning_rates, specs_of_units)
        draws = any(instance.optimizer.draws for instance in self._instances.values())
        self.draws = self._precision.draws or draws

    def in_sections(self, sections: Iterable[Section]) -> Learner:
        """The learner of the same model with sections in the place of stacks; each has the optimizers of its stack.

        Args:
            sections: those of one stack in order.
        """
        learner = copy.copy(self)
        learner.specs = groups.in_sections(self.specs, sections)
        learner.frozen_specs = groups.in_sections(self.frozen_specs, sections)
        learner.groups = groups.groups_in_sections(self.groups, sections)
        learner._instances = dict(self._instances)
        for section in sections:
            for (stage, group_label), instance in self._instances.items():
                if stage == section.home:
                    learner._instances[section.name, group_label] = instance
        return learner

    # --- state: specs and first values -------------------------------------------------------------------------------

    def gradient_dtype(self, spec: ParameterSpec) -> Any:
        """The dtype in which gradients are summed over microbatches: that of the update, float32 at least."""
        return self._precision.gradient_dtype(spec)

    def gradient_specs(self, hosted: Container[str] = ()) -> Nested:
        """Specs of buffers for all gradients; the large ones of `hosted` stages are in host memory.

        Without gradient accumulation nothing is summed, and the buffers have the dtypes of the parameters.
        """

        def buffer(spec: ParameterSpec) -> TensorSpec:
            dtype = spec.dtype if self.accumulate == 1 else self.gradient_dtype(spec)
            return TensorSpec(spec.shape, dtype, spec.mesh_axes)

        buffers = unflatten({path: buffer(spec) for path, spec in flatten(self.specs).items()})
        return self._placed(buffers, hosted)

    def _placed(self, tree: Nested, hosted: Container[str]) -> Nested:
        """Specs by stage in the structure of the parameters, with the large ones of `hosted` stages in host memory."""
        placed = {}
        for stage, specs in tree.items():
            if stage in hosted:
                is_stack = any(spec.num_layers is not None for spec in jax.tree.leaves(self.specs[stage]))
                specs = move_to_host(specs, "pinned_host", stacked=is_stack)
            placed[stage] = specs
        return placed

    def optimizer_specs(self, hosted: Container[str] = ()) -> Nested:
        """{stage: {label: {"state": ..., "master": ...}}}: OptStateSpecs.

        The large leaves of `hosted` stages are in host memory.
        """
        tree: Nested = {}
        for group in self.groups:
            specs = self.state_of(group).entry_specs()
            if group.stage in hosted:
                specs = move_to_host(specs, "pinned_host", stacked=group.length is not None)
            tree.setdefault(group.stage, {})[group.label] = specs
        return tree

    def ema_specs(self, hosted: Container[str] = ()) -> Nested:
        """The specs of the averages of trainable parameters; {} without `ema`.

        The large ones of `hosted` stages are in host memory.
        """
        if self.ema is None:
            return {}

        def average(spec: ParameterSpec) -> TensorSpec:
            return spec_like(spec, self._precision.average_dtype(spec))

        return self._placed(jax.tree.map(average, self.specs), hosted)

    def state_of(self, group: Group) -> GroupState:
        """The optimizer state of a group, or of some of a group's parameters."""
        return GroupState(
            group,
            self.select(self.specs, group),
            self._instances[group.stage, group.label].optimizer,
            self._precision,
            self.clipping.keeps_norms,
        )

    def init(self, precise: Nested) -> Update:
        """(trainable parameters, optimizer state, averages) from freshly initialized, uncast trainable parameters."""
        leaves = self.init_part(flatten(precise))
        params = in_structure(self.specs, leaves["parameter"])
        optimizer = in_structure(self.optimizer_specs(), leaves["optimizer"])
        ema = in_structure(self.ema_specs(), leaves["ema"])
        return params, optimizer, ema

    def init_part(self, precise: dict[str, jax.Array], *, unit: bool = False) -> dict[str, dict[str, jax.Array]]:
        """The state that `init` makes of some of the parameters.

        Args:
            precise: by path; those of one of `init_parts`, or all.
            unit: the arrays are one layer's, without the leading axis.

        Returns:
            {"parameter": ..., "optimizer": ..., "ema": ...}, each by path.
        """
        parts = groups.restricted(self.groups, precise)
        return initial.init_part(
            precise,
            [self.state_of(group) for group in parts],
            self.specs,
            self._precision,
            keeps_averages=self.ema is not None,
            unit=unit,
        )

    def init_parts(self) -> list[tuple[str, ...]]:
        """Paths of the trainable parameters that `init_part` can be called with, in the smallest possible parts."""
        return initial.init_parts([self.state_of(group) for group in self.groups])

    # --- groups and their parts --------------------------------------------------------------------------------------

    def select(self, tree: Nested, group: Group) -> Nested:
        """A group's part of a tree of all trainable parameters, without the stage; layers apart for scope = model."""
        return groups.select(tree, group, self.specs)

    def unit_specs(self, group: Group) -> Nested:
        """The parameter specs of one unit of a group, in the dtype in which their update is computed."""
        return unit_specs(self.select(self.specs, group), group, self._precision)

    def reach(self, group: Group) -> Reach:
        """The smallest part of a unit of the group that can be updated by itself; tried out on first use."""
        instance = self._instances[group.stage, group.label]
        return self.clipping.widened(reach_of(instance, self.unit_specs(group)))

    def try_reach(self) -> None:
        """Tries out how far each optimizer looks, for schedules that divide a unit.

        They ask for it again while a step is traced. A trial at that point would compile each of its operations by
        itself.
        """
        for group in self.groups:
            self.reach(group)

    def check_reach(self) -> None:
        """Raises ValueError when an optimizer mixes parameters: per layer, it would be silently wrong."""
        if self.scope != "unit":
            return
        for group in self.groups:
            instance = self._instances[group.stage, group.label]
            check_parameters_apart(group.label, instance, self.unit_specs(group))

    # --- one step ----------------------------------------------------------------------------------------------------

    @staticmethod
    def norm(grads: Nested) -> jax.Array:
        """The norm of all gradients together, f32 or wider."""
        return decisions.global_norm(grads)

    def decide(
        self,
        loss: jax.Array,
        norm: jax.Array,
        counter: Nested,
    ) -> Decision:
        """The decision that all gradients take together, from their norm.

        It holds the factor that clips the gradients, and whether the step counts: loss and norm are finite, and the
        loss is no spike.

        Args:
            loss, norm: f32 scalars.
            counter: the state's counters.
        """
        return decisions.decide(
            loss,
            norm,
            counter,
            clipping=self.clipping,
            spikes=self._spikes,
            draws=self.draws,
        )

    def counter_specs(self) -> dict[str, TensorSpec]:
        """The specs of the moving averages of the loss and of its square, f32, where spikes are skipped."""
        return self._spikes.counter_specs()

    def count_loss(
        self,
        counter: Nested,
        loss: jax.Array,
        ok: jax.Array,
    ) -> Nested:
        """The averages after a step; a skipped one leaves them."""
        return self._spikes.count_loss(counter, loss, ok)

    def update(
        self,
        params: Nested,
        grads: Nested,
        optimizer: Nested,
        ema: Nested,
        decision: Decision,
        run: Callable[[Group, UnitUpdate, Bundle, Decision], Update] | None = None,
        stage: str | None = None,
    ) -> Update:
        """(parameters, optimizer state, averages), unchanged where the decision says not ok.

        Args:
            params, grads, optimizer, ema: of all trainable parameters.
            decision: see `decide`.
            run: applies a unit's update to a group's bundle, one layer or stacked ones; all at once by default.
            stage: update this one only; the gradients of other stages may be missing.
        """
        run = run or all_units
        new_params = flatten(params)
        new_ema = flatten(ema)
        new_optimizer = dict(optimizer)
        for group in self.groups:
            if stage not in (None, group.stage):
                continue
            bundle = (
                self.select(params, group),
                self.select(grads, group),
                optimizer[group.stage][group.label],
                self.select(ema, group) if self.ema is not None else {},
            )
            weights, state, average = run(
                group,
                self.unit_update(group),
                bundle,
                self._at_first_layer(decision, group),
            )
            new_params |= groups.unselect(weights, group, self.specs)
            new_ema |= groups.unselect(average, group, self.specs)
            # A copy: the caller's dict of the stage is not changed.
            new_optimizer[group.stage] = {**new_optimizer[group.stage], group.label: state}
        return in_structure(params, new_params), new_optimizer, in_structure(ema, new_ema)

    @staticmethod
    def _at_first_layer(decision: Decision, group: Group) -> Decision:
        """The decision for a group, whose layers are counted from the first one of the whole stack."""
        if not group.first_layer:
            return decision
        return decision._replace(layer=decision.layer + group.first_layer)

    def unit_update(self, group: Group) -> UnitUpdate:
        """The update of one unit: (weights, grads, optimizer entry, average, decision) -> new ones but the grads."""
        return GroupUpdate(
            self.state_of(group),
            self._instances[group.stage, group.label].learning_rate,
            self.clipping,
            self.ema,
            self.draws,
        )
