"""The learner turns gradients into new parameters: rules, clipping, skipping, master weights, moving averages.

Each unit (one layer of a stacked stage, or a stage that is not stacked) has an optimizer instance. The state of a
stacked stage is `vmap(init)` over its layers, counters included. `unit_update` gives the update of one unit, which
works on a bundle of weights, gradients, optimizer state and average. Updating a whole stage is its vmap, so every
schedule that updates units in another order computes the same numbers. Decisions that concern all gradients (norm,
finiteness, clip factor) are taken first, in `decide`, and reach the units as scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from framework.config import (
    Config,
    DType,
    Fraction,
    PositiveFloat,
    PositiveInt,
    component,
)
from framework.layout import (
    MemoryKind,
    Nested,
    OptStateSpec,
    ParameterSpec,
    TensorSpec,
    flatten,
    move_to_host,
    unflatten,
)
from framework.learner.rules import (
    DEFAULT,
    FROZEN,
    Optimizer,
    groups,
    label,
)
from framework.learner.units import (
    Bundle,
    Decision,
    Group,
    UnitUpdate,
    Update,
    all_units,
    apart,
    chosen,
    in_structure,
    unstack,
)
from framework.optimizers.clipping import limit_norm_growth, limit_update_rms
from framework.optimizers.dependence import keeps_apart
from framework.optimizers.partition import PartitionedGradientTransformation, mirrors_parameter, partitioned
from framework.optimizers.reach import Reach, probe
from framework.optimizers.rounding import (
    Rounding,
    check_dtypes,
    cut_off,
    fold,
    fold_name,
    rounded,
    upcast,
)

ClipMode = Literal["global_norm", "two_pass", "previous_norm", "update_rms", "norm_growth"]
# Names of the counters that hold the moving averages of the loss and of its square.
_LOSS_AVERAGES = ("loss_mean", "loss_square")
# The averages of the loss cover about 1 / (1 - 0.99) = 100 updates.
_LOSS_DECAY = 0.99
# So many first updates are never skipped as spikes, because the averages mean little yet.
_SPIKE_FREE = 20
# The results of `probe` in this process, by the optimizer's config and the unit's shapes: a trial compiles programs.
_reaches: dict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], Reach] = {}


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
        moment_dtype: dtype in which moments are kept; None means that of the weights that are updated.
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
        self.rounding: Rounding = rounding
        self.scope = scope
        self.clip = clip
        self.accumulate = accumulate
        self.ema = ema
        self.clip_mode: ClipMode | None = None if clip is None else clip_mode
        self.nonfinite = nonfinite
        self.max_nonfinite = max_nonfinite
        self.spike = spike
        self.moment_dtype = None if moment_dtype is None else jnp.dtype(moment_dtype)
        self.master_dtype = None if master_dtype is None else jnp.dtype(master_dtype)
        labels, configs = label(specs, optimizer, [rule.instantiate() for rule in rules])
        self._set_parameters(specs, labels)
        self._set_optimizers(labels, configs)

    def _set_parameters(self, specs: Nested, labels: dict[str, str]) -> None:
        """Divides the parameter specs into trainable and frozen ones.

        Args:
            specs: the specs of all parameters of the model.
            labels: by path, the label of the parameter's optimizer, or FROZEN.
        """
        flat_specs = flatten(specs)
        trainable = {}
        frozen = {}
        for path, name in labels.items():
            if name == FROZEN:
                frozen[path] = flat_specs[path]
            else:
                trainable[path] = flat_specs[path]
        self.specs = unflatten(trainable)
        self.frozen_specs = unflatten(frozen)

    def _set_optimizers(self, labels: dict[str, str], configs: dict[str, Config]) -> None:
        """Instantiates the optimizers and fits each to the parameters of its groups.

        Args:
            labels: by path, the label of the parameter's optimizer, or FROZEN.
            configs: by label, the optimizer's config.

        Raises:
            ValueError: no parameter is trainable, or weights of their dtype cannot be rounded as asked.
        """
        self._configs = {name: config.to_json() for name, config in configs.items()}
        self._rates = {name: _schedule(config) for name, config in configs.items()}
        if not self.specs:
            raise ValueError("learner.rules freeze every parameter; nothing would be trained")
        check_dtypes(self.rounding, {spec.dtype for spec in jax.tree.leaves(self.specs)})
        self.groups = groups(self.specs, labels, across_stages=self.scope == "model")
        self.learning_rate = self._rates[DEFAULT]
        # The keys are (stage, label), as one label may be used in several stages.
        self.optimizers: dict[tuple[str, str], PartitionedGradientTransformation] = {}
        for name, config in configs.items():
            optimizer = _build(config)
            users = [group for group in self.groups if group.label == name]
            if optimizer.at_rest is not None and users:
                # Below, `at_rest` leaves the moves of the state to the layout and checks no pattern. Its pattern is
                # of the whole model: it must match in one of the stages, not in each. This call raises if it does not.
                optimizer.partition({group.stage: self.unit_specs(group) for group in users})
            for group in users:
                fitted = optimizer
                if optimizer.of_specs is not None:
                    fitted = optimizer.of_specs(self.unit_specs(group))
                self.optimizers[group.stage, name] = fitted.at_rest or fitted
        self.draws = self.rounding == "stochastic" or any(fitted.draws for fitted in self.optimizers.values())

    # --- state: specs and first values -------------------------------------------------------------------------------

    def gradient_dtype(self, spec: ParameterSpec) -> Any:
        """The dtype in which gradients are summed over microbatches: that of the update, float32 at least."""
        return _wide(self._reference_dtype(spec))

    def gradient_specs(self, memory_kind: MemoryKind) -> Nested:
        """Specs of buffers for all gradients, large ones tagged with `memory_kind`.

        Without gradient accumulation nothing is summed, and the buffers have the dtypes of the parameters.
        """

        def buffer(spec: ParameterSpec) -> TensorSpec:
            dtype = spec.dtype if self.accumulate == 1 else self.gradient_dtype(spec)
            device_buffer = TensorSpec(spec.shape, dtype, spec.mesh_axes)
            return move_to_host(device_buffer, memory_kind, stacked=spec.num_layers is not None)

        return unflatten({path: buffer(spec) for path, spec in flatten(self.specs).items()})

    def _reference_dtype(self, spec: ParameterSpec) -> Any:
        """The dtype in which a parameter's update is computed."""
        if self.rounding != "nearest":
            return jnp.promote_types(spec.dtype, jnp.float32)
        return spec.dtype if self.master_dtype is None else self.master_dtype

    def optimizer_specs(self, memory_kind: MemoryKind = "device") -> Nested:
        """{stage: {label: {"state": ..., "master": ...}}}: OptStateSpecs, large leaves tagged with `memory_kind`."""
        tree: Nested = {}
        for group in self.groups:
            specs = self._group_specs(group)
            if memory_kind != "device":
                specs = move_to_host(specs, memory_kind, stacked=group.length is not None)
            tree.setdefault(group.stage, {})[group.label] = specs
        return tree

    def _group_specs(self, group: Group) -> Nested:
        """The specs of a group's entry in the optimizer state, all on the device."""
        flat_specs = flatten(self.select(self.specs, group))
        state = self.optimizers[group.stage, group.label].partition(self.unit_specs(group))
        entry = {"state": jax.tree.map(lambda spec: self._store_spec(spec, group.length), state)}
        if self._keeps_master(group):
            masters = {}
            for path, spec in flat_specs.items():
                masters[path] = _spec_like(spec, self._reference_dtype(spec), path)
            entry["master"] = unflatten(masters)
        if self._compensates(group):
            compensations = {}
            for path, spec in flat_specs.items():
                compensations[path] = _spec_like(spec, spec.dtype, path)
            entry["compensation"] = unflatten(compensations)
        if self.clip_mode == "norm_growth":
            # One norm per tensor and layer, as `limit_norm_growth` runs under the vmap over the layers.
            shape = () if group.length is None else (group.length,)
            norms = {path: OptStateSpec(shape, "float32", owner=path) for path in flat_specs}
            entry["norm"] = unflatten(norms)
        return entry

    def unit_specs(self, group: Group) -> Nested:
        """The parameter specs of one unit of a group, in the dtype in which their update is computed."""

        def precise(spec: ParameterSpec) -> ParameterSpec:
            unit_spec = unstack(spec, group.length)
            return replace(unit_spec, dtype=self._reference_dtype(spec))

        return jax.tree.map(precise, self.select(self.specs, group))

    def part(self, group: Group, paths: tuple[str, ...], entry: Nested) -> Nested:
        """The part of a group's optimizer state that an update of some of its parameters needs, counters included.

        Args:
            group: the group of the parameters.
            paths: the parameters' paths within the group.
            entry: the group's optimizer state, as arrays or specs.

        Raises:
            KeyError: the optimizer names its state in another way when it sees only these.
        """
        unit = flatten(self.unit_specs(group))
        abstract = {path: jax.ShapeDtypeStruct(unit[path].shape, unit[path].dtype) for path in paths}
        optimizer = self.optimizers[group.stage, group.label]
        state_of_paths = jax.eval_shape(optimizer.init, unflatten(abstract))
        state = flatten(entry["state"])
        state_leaves = {path: state[path] for path in flatten(state_of_paths)}
        part: Nested = {"state": in_structure(state_of_paths, state_leaves)}
        # All entries but the optimizer's own state have the structure of the parameters.
        for name in entry.keys() - {"state"}:
            leaves = flatten(entry[name])
            part[name] = unflatten({path: leaves[path] for path in paths})
        return part

    def separable(self, group: Group) -> bool:
        """Whether the optimizer's state for one parameter is a part of its state for all of the group."""
        entry = self._group_specs(group)
        if group.stage == "model":
            return False
        try:
            for path in group.paths:
                self.part(group, (path,), entry)
        except KeyError:
            return False
        return True

    def _keeps_master(self, group: Group) -> bool:
        """Whether a group's optimizer state holds a master copy: one of its parameters has another dtype."""
        if self.master_dtype is None:
            return False
        specs: list[ParameterSpec] = jax.tree.leaves(self.select(self.specs, group))
        return any(spec.dtype != self.master_dtype for spec in specs)

    def _compensates(self, group: Group) -> bool:
        """Whether a group's optimizer state holds what rounding cut off from its weights (Kahan)."""
        if self.rounding != "kahan":
            return False
        specs: list[ParameterSpec] = jax.tree.leaves(self.select(self.specs, group))
        return any(spec.dtype != self._reference_dtype(spec) for spec in specs)

    def _store_spec(self, spec: OptStateSpec, length: int | None) -> OptStateSpec:
        """A state leaf as it is stored between steps: moments in `moment_dtype`, layers stacked along a first axis."""
        if self.moment_dtype is not None and mirrors_parameter(spec):
            spec = replace(spec, dtype=self.moment_dtype)
        if length is None:
            return spec
        return replace(spec, shape=(length, *spec.shape), mesh_axes=(None, *spec.mesh_axes))

    def ema_specs(self, memory_kind: MemoryKind = "device") -> Nested:
        """The specs of the averages of trainable parameters, large ones tagged with `memory_kind`; {} without `ema`."""
        if self.ema is None:
            return {}

        def average(spec: ParameterSpec) -> TensorSpec:
            # In float32 at least: a bfloat16 average whose decay is over 0.99 is moved by less than it can hold, and
            # stays at its first value.
            device_spec = _spec_like(spec, _wide(self._reference_dtype(spec)))
            return move_to_host(device_spec, memory_kind, stacked=spec.num_layers is not None)

        return jax.tree.map(average, self.specs)

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
        specs = flatten(self.specs)
        optimizer = {}
        references = {path: x.astype(self._reference_dtype(specs[path])) for path, x in precise.items()}
        for group in self.groups:
            prefix = _path_prefix(group)
            paths = tuple(path for path in group.paths if f"{prefix}{path}" in precise)
            if paths:
                optimizer |= self._init_group(replace(group, paths=paths), references, unit)
        params = {path: x.astype(specs[path].dtype) for path, x in precise.items()}
        average = {}
        if self.ema is not None:
            average = {path: x.astype(_wide(x.dtype)) for path, x in references.items()}
        return {
            "parameter": params,
            "optimizer": optimizer,
            "ema": average,
        }

    def _init_group(
        self,
        group: Group,
        references: dict[str, jax.Array],
        unit: bool,
    ) -> dict[str, jax.Array]:
        """The first optimizer state of a group's parameters, by path in the optimizer state.

        Args:
            group: a group, or some parameters of one.
            references: by path in the model, parameters in the dtype of their update.
            unit: the arrays are one layer's, without the leading axis.
        """
        reference = self.select(unflatten(references), group)
        init = self.optimizers[group.stage, group.label].init
        is_stacked = group.length is not None and not unit
        # Each layer has an optimizer instance, counters included, so the state is initialized layer by layer.
        state = jax.vmap(init)(reference) if is_stacked else init(reference)
        entry = {"state": state}
        if self._keeps_master(group):
            entry["master"] = reference
        if self._compensates(group):
            specs = self.select(self.specs, group)
            entry["compensation"] = jax.tree.map(lambda x, spec: cut_off(x, spec.dtype)[1], reference, specs)
        if self.clip_mode == "norm_growth":
            num_layer_axes = int(is_stacked)
            entry["norm"] = jax.tree.map(lambda x: jnp.zeros(x.shape[:num_layer_axes]), reference)
        entry_specs = flatten(self._group_specs(group))
        prefix = f"{group.stage}/{group.label}"
        leaves = {}
        for path, x in flatten(entry).items():
            leaves[f"{prefix}/{path}"] = x.astype(entry_specs[path].dtype)
        return leaves

    def init_parts(self) -> list[tuple[str, ...]]:
        """Paths of the trainable parameters that `init_part` can be called with, in the smallest possible parts."""
        parts = []
        for group in self.groups:
            prefix = _path_prefix(group)
            paths = tuple(f"{prefix}{path}" for path in group.paths)
            if self.separable(group):
                parts += [(path,) for path in paths]
            else:
                parts.append(paths)
        return parts

    def select(self, tree: Nested, group: Group) -> Nested:
        """A group's part of a tree of all trainable parameters, without the stage; layers apart for scope = model."""
        if group.stage == "model":
            leaves = flatten(tree)
            specs = flatten(self.specs)
            return unflatten({path: apart(specs[path], leaves[path]) for path in group.paths})
        leaves = flatten(tree[group.stage])
        return unflatten({path: leaves[path] for path in group.paths})

    def _unselect(self, tree: Nested, group: Group) -> dict[str, Any]:
        """The inverse of `select`: {path in the model: leaf}."""
        leaves = flatten(tree)
        # An empty tree is that of the averages where none are kept.
        if group.stage != "model" or not leaves:
            return {f"{group.stage}/{path}": leaf for path, leaf in leaves.items()}
        specs = flatten(self.specs)
        model_leaves = {}
        for path in group.paths:
            num_layers = specs[path].num_layers
            if num_layers is None:
                model_leaves[path] = leaves[path]
            else:
                model_leaves[path] = jnp.stack([leaves[f"{path}/{i}"] for i in range(num_layers)])
        return model_leaves

    def reach(self, group: Group) -> Reach:
        """The smallest part of a unit of the group that can be updated by itself; tried out on first use."""
        unit = self.unit_specs(group)
        # The same experiment is built more than once in a process: to plan it, to run it.
        shapes = tuple((path, spec.shape) for path, spec in flatten(unit).items())
        key = self._configs[group.label], shapes
        if key not in _reaches:
            # Schedules ask while a step is traced: the trial runs all the same.
            with jax.ensure_compile_time_eval():
                _reaches[key] = probe(self.optimizers[group.stage, group.label], unit)
        reach = _reaches[key]
        # These two bound a norm of a tensor, which no smaller part of it knows.
        if self.clip_mode in ("update_rms", "norm_growth") and reach in ("element", "row"):
            return "tensor"
        return reach

    def check_reach(self) -> None:
        """Raises ValueError when an optimizer mixes parameters: per layer, it would be silently wrong."""
        if self.scope != "unit":
            return
        for group in self.groups:
            # The trial compiles; most optimizers can be read.
            if keeps_apart(self.optimizers[group.stage, group.label], self.unit_specs(group)):
                continue
            if self.reach(group) == "global":
                raise ValueError(
                    f"learner.optimizer ({group.label}): the update of one parameter depends on the gradients of "
                    "others (a global norm or finiteness test inside a chain, say). Each layer has an optimizer of its "
                    "own, so this would not compute what it says. Use learner.clip and learner.nonfinite for that, or "
                    "learner.scope = model, which has one optimizer for all (with memory.update = after_backward)"
                )

    # --- one step ----------------------------------------------------------------------------------------------------

    @staticmethod
    def norm(grads: Nested) -> jax.Array:
        """The norm of all gradients together, f32 or wider."""
        wide_grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        return optax.tree.norm(wide_grads)

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
        factor = self._clip_factor(norm, counter)
        ok = jnp.isfinite(norm) & jnp.isfinite(loss)
        count = counter["step"] - counter["skipped"]
        if self.spike is not None:
            mean_name, square_name = _LOSS_AVERAGES
            mean = counter[mean_name] / _bias_correction(count)
            square = counter[square_name] / _bias_correction(count)
            # By rounding, the variance of losses that hardly differ may come out negative.
            deviation = jnp.sqrt(jnp.maximum(square - mean**2, 0.0))
            ok &= (count < _SPIKE_FREE) | (loss <= mean + self.spike * deviation)
        seed = fold(*counter["rng"]) if self.draws else jnp.uint32(0)
        return Decision(norm, factor, ok, count, seed, jnp.int32(0))

    def _clip_factor(self, norm: jax.Array, counter: Nested) -> jax.Array:
        """The factor that all gradients are multiplied by; 1 in the modes that clip each tensor by itself."""
        factor = jnp.ones_like(norm)
        if self.clip is None:
            return factor
        if self.clip_mode in ("global_norm", "two_pass"):
            return jnp.minimum(1.0, self.clip / norm)
        if self.clip_mode == "previous_norm":
            previous_norm = counter["grad_norm"].astype(norm.dtype)
            # The norm is zero before the first step, which is not clipped.
            return jnp.where(previous_norm > 0, jnp.minimum(1.0, self.clip / previous_norm), 1.0)
        return factor

    def counter_specs(self) -> dict[str, TensorSpec]:
        """The specs of the moving averages of the loss and of its square, f32, where spikes are skipped."""
        if self.spike is None:
            return {}
        return {name: TensorSpec((), "float32") for name in _LOSS_AVERAGES}

    def count_loss(
        self,
        counter: Nested,
        loss: jax.Array,
        ok: jax.Array,
    ) -> Nested:
        """The averages after a step; a skipped one leaves them."""
        if self.spike is None:
            return {}
        values = (loss, jnp.square(loss))
        averages = {}
        for name, value in zip(_LOSS_AVERAGES, values, strict=True):
            average = _LOSS_DECAY * counter[name] + (1 - _LOSS_DECAY) * value
            averages[name] = jnp.where(ok, average, counter[name])
        return averages

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
                decision,
            )
            new_params |= self._unselect(weights, group)
            new_ema |= self._unselect(average, group)
            # A copy: the caller's dict of the stage is not changed.
            new_optimizer[group.stage] = {**new_optimizer[group.stage], group.label: state}
        return in_structure(params, new_params), new_optimizer, in_structure(ema, new_ema)

    def unit_update(self, group: Group) -> UnitUpdate:
        """The update of one unit: (weights, grads, optimizer entry, average, decision) -> new ones but the grads."""
        optimizer = self.optimizers[group.stage, group.label]
        schedule = self._rates[group.label]

        def update(
            weights: Nested,
            grads: Nested,
            entry: Nested,
            average: Nested,
            decision: Decision,
        ) -> Any:
            if "master" in entry:
                reference = entry["master"]
            else:
                reference = upcast(self.rounding, weights, entry.get("compensation"))
            seed = decision.seed
            if self.draws:
                # Layers of a stack share the program, stages may share layer numbers: neither may share noise.
                seed = fold_name(fold(decision.seed, decision.layer), group.stage)
            grads = jax.tree.map(lambda g, r: g.astype(r.dtype), grads, reference)
            grads, new_norms = self._clip_grads(grads, entry, decision)
            state = self._precise(entry["state"], reference)
            extra = {"seed": seed} if optimizer.draws else {}
            updates, new_state = optimizer.update(grads, state, reference, **extra)
            if self.clip is not None and self.clip_mode == "update_rms":
                rate = 1.0 if schedule is None else schedule(decision.count)
                updates = limit_update_rms(updates, self.clip, rate)
            new_reference: Any = optax.apply_updates(reference, updates)
            new_reference, new_weights, left_out = self._new_weights(
                new_reference,
                reference,
                weights,
                seed,
                decision,
            )
            new_entry = _new_entry(entry, new_state, left_out, new_norms, decision.ok)
            if "master" in entry:
                # `_new_weights` has chosen the master already.
                new_entry["master"] = new_reference
            new_average = self._new_average(average, new_reference, decision.ok)
            return new_weights, new_entry, new_average

        return update

    def _clip_grads(
        self,
        grads: Nested,
        entry: Nested,
        decision: Decision,
    ) -> tuple[Nested, Nested | None]:
        """(clipped gradients of a unit, norms of its tensors); the norms are None in all modes but norm_growth."""
        if self.clip is not None and self.clip_mode == "norm_growth":
            return limit_norm_growth(grads, entry["norm"], self.clip)
        if self.clip_mode in ("global_norm", "two_pass", "previous_norm"):
            # The factor is cast for each leaf: a wider one would make the gradients wider, too.
            grads = jax.tree.map(lambda g: g * decision.factor.astype(g.dtype), grads)
        return grads, None

    def _new_weights(
        self,
        new_reference: Nested,
        reference: Nested,
        weights: Nested,
        seed: jax.Array,
        decision: Decision,
    ) -> tuple[Nested, Nested, Nested]:
        """A unit's weights after an update; a skipped step leaves them.

        Args:
            new_reference: the updated weights, in the dtype of the update.
            reference: those before the update.
            weights: the same in the parameters' dtype.
            seed: uint32 scalar, the unit's.
            decision: see `decide`.

        Returns:
            (new reference, new weights, what rounding cut off from them).
        """
        if self.rounding == "nearest":
            # What is chosen is the master, and the weights are its cast. Were the weights chosen for themselves,
            # XLA would compute the update twice, and read gradients and moments once more.
            new_reference = chosen(decision.ok, new_reference, reference)
            new_weights = jax.tree.map(lambda r, w: r.astype(w.dtype), new_reference, weights)
            return new_reference, new_weights, {}
        # A layer's seed is the same in every step: the number of updates makes it the step's.
        noise_seed = fold(seed, decision.count)
        rounded_weights, left_out = rounded(
            self.rounding,
            new_reference,
            weights,
            noise_seed,
            decision.origin,
        )
        new_weights = chosen(decision.ok, rounded_weights, weights)
        return new_reference, new_weights, left_out

    def _new_average(
        self,
        average: Nested,
        new_reference: Nested,
        ok: jax.Array,
    ) -> Nested:
        """A unit's moving average of the weights after an update; a skipped step leaves it."""
        if self.ema is None:
            return average
        rate = 1.0 - self.ema
        moved_average = jax.tree.map(lambda a, r: a + rate * (r.astype(a.dtype) - a), average, new_reference)
        return chosen(ok, moved_average, average)

    def _precise(self, state: Any, reference: Nested) -> Any:
        """The state with moments of a narrower `moment_dtype` in the dtype of the update; wider ones stay."""
        if self.moment_dtype is None:
            return state
        reference_dtypes = [leaf.dtype for leaf in jax.tree.leaves(reference)]
        wide = jnp.result_type(self.moment_dtype, *reference_dtypes)
        return jax.tree.map(lambda s: s.astype(wide) if s.dtype == self.moment_dtype else s, state)


def _path_prefix(group: Group) -> str:
    """The first part of the model's paths of a group's parameters; the paths of the group lack it."""
    return "" if group.stage == "model" else f"{group.stage}/"


def _new_entry(
    entry: Nested,
    new_state: Nested,
    left_out: Nested,
    new_norms: Nested | None,
    ok: jax.Array,
) -> dict[str, Any]:
    """A unit's entry of the optimizer state after an update, but for the master; a skipped step leaves it.

    Args:
        entry: the entry before the update.
        new_state: the optimizer's new state.
        left_out: what rounding cut off from the new weights (Kahan).
        new_norms: the norms of clip_mode norm_growth.
        ok: scalar, whether the step counts.
    """
    # Moments were widened for the update (see `_precise`): they go back to the dtype in which they are stored.
    new_entry = {"state": jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, entry["state"])}
    if "compensation" in entry:
        new_entry["compensation"] = left_out
    if new_norms is not None:
        new_entry["norm"] = new_norms
    old_entry = {name: entry[name] for name in new_entry}
    return chosen(ok, new_entry, old_entry)


def _build(config: Config) -> PartitionedGradientTransformation:
    """The optimizer of a config, with its partition. Raises ValueError for what is no optax transformation."""
    optimizer = config.instantiate()
    if not isinstance(optimizer, PartitionedGradientTransformation | optax.GradientTransformation):
        raise ValueError(f"learner.optimizer: expected an optax transformation, given {type(optimizer).__name__}")
    return partitioned(optimizer)


def _schedule(optimizer: Config) -> Callable[[Any], Any] | None:
    """The learning rate as a function of the number of updates, for reports; None when the optimizer names none."""
    # A wrapper, such as offload_optimizer, has the optimizer with the learning rate in its field `optimizer`.
    while "optimizer" in optimizer:
        optimizer = optimizer.optimizer
    rate = optimizer.get("learning_rate") if "learning_rate" in optimizer else None
    if isinstance(rate, Config):
        return rate.instantiate()
    if rate is None:
        return None
    return lambda count: jnp.asarray(rate, jnp.float32)


def _bias_correction(count: jax.Array) -> jax.Array:
    """The divisor of the losses' moving averages, which began at zero: 1 - decay**count, as in Adam."""
    # Before the first update the divisor would be zero; the result is not used then (see _SPIKE_FREE).
    return jnp.maximum(1.0 - _LOSS_DECAY ** count.astype(jnp.float32), 1e-6)


def _wide(dtype: Any) -> Any:
    """The dtype, or float32 where that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def _spec_like(
    spec: ParameterSpec,
    dtype: Any,
    owner: str | None = None,
) -> OptStateSpec:
    """A spec in the shape and on the mesh axes of a parameter, in another dtype."""
    return OptStateSpec(spec.shape, dtype, spec.mesh_axes, owner=owner)
