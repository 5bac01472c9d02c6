"""Learner: who learns, and how. Rules, clipping, skipping, master weights, moving averages.

There is one optimizer instance per unit: the state of a stacked stage is `vmap(init)` over its layers, counters
included, and `update_unit` updates one unit, a bundle of weights, gradients, optimizer state and average. Updating a
whole stage is its vmap, so every schedule that updates units in another order computes the same numbers. Decisions that
concern all gradients (norm, finiteness, clip factor) are taken first, in `decide`, and reach the units as scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from framework.config import Config, DType, Fraction, PositiveFloat, PositiveInt, component
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
from framework.learner.rules import DEFAULT, FROZEN, Optimizer, groups, label
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
from framework.optimizers.rounding import Rounding, check_dtypes, cut_off, fold, fold_name, rounded, upcast

ClipMode = Literal["global_norm", "two_pass", "previous_norm", "update_rms", "norm_growth"]
_LOSS_AVERAGES, _DECAY, _SPIKE_FREE = ("loss_mean", "loss_square"), 0.99, 20
# What was tried out in this process, by the optimizer's config and the unit's shapes.
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
        self.scope, self.clip, self.accumulate, self.ema = scope, clip, accumulate, ema
        self.clip_mode: ClipMode | None = None if clip is None else clip_mode
        self.nonfinite, self.max_nonfinite, self.spike = nonfinite, max_nonfinite, spike
        self.moment_dtype = None if moment_dtype is None else jnp.dtype(moment_dtype)
        self.master_dtype = None if master_dtype is None else jnp.dtype(master_dtype)
        flat, (labels, configs) = flatten(specs), label(specs, optimizer, [rule.instantiate() for rule in rules])
        self._configs = {name: config.to_json() for name, config in configs.items()}
        self._rates = {name: _schedule(config) for name, config in configs.items()}
        self.specs = unflatten({path: flat[path] for path, name in labels.items() if name != FROZEN})
        self.frozen_specs = unflatten({path: flat[path] for path, name in labels.items() if name == FROZEN})
        if not self.specs:
            raise ValueError("learner.rules freeze every parameter; nothing would be trained")
        check_dtypes(rounding, {spec.dtype for spec in jax.tree.leaves(self.specs)})
        self.groups = groups(self.specs, labels, whole=scope == "model")
        self.learning_rate = self._rates[DEFAULT]
        self.optimizers: dict[tuple[str, str], PartitionedGradientTransformation] = {}  # by stage and label
        for name, config in configs.items():
            own, users = _build(config), [group for group in self.groups if group.label == name]
            if own.at_rest is not None and users:  # the layout moves its state; a pattern must match somewhere
                own.partition({group.stage: self.unit_specs(group) for group in users})
            for group in users:
                fitted = own.of_specs(self.unit_specs(group)) if own.of_specs is not None else own
                self.optimizers[group.stage, name] = fitted.at_rest or fitted
        self.draws = rounding == "stochastic" or any(one.draws for one in self.optimizers.values())

    # --- state: specs and first values -------------------------------------------------------------------------------

    def gradient_dtype(self, spec: ParameterSpec) -> Any:
        """What gradients are summed in over microbatches: the dtype of the update, float32 at least."""
        return _wide(self._reference_dtype(spec))

    def gradient_specs(self, memory_kind: MemoryKind) -> Nested:
        """Buffers for all gradients, large ones tagged with `memory_kind`; in their own dtype if nothing is summed."""

        def buffer(spec: ParameterSpec) -> TensorSpec:
            dtype = spec.dtype if self.accumulate == 1 else self.gradient_dtype(spec)
            like = TensorSpec(spec.shape, dtype, spec.mesh_axes)
            return move_to_host(like, memory_kind, stacked=spec.num_layers is not None)

        return unflatten({path: buffer(spec) for path, spec in flatten(self.specs).items()})

    def _reference_dtype(self, spec: ParameterSpec) -> Any:
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
        specs = self.select(self.specs, group)
        state = self.optimizers[group.stage, group.label].partition(self.unit_specs(group))
        entry = {"state": jax.tree.map(lambda spec: self._store_spec(spec, group.length), state)}
        if self._keeps_master(group):
            entry["master"] = unflatten(
                {path: _like(spec, self._reference_dtype(spec), path) for path, spec in flatten(specs).items()}
            )
        if self._compensates(group):
            entry["compensation"] = unflatten({path: _like(s, s.dtype, path) for path, s in flatten(specs).items()})
        if self.clip_mode == "norm_growth":
            shape = () if group.length is None else (group.length,)
            entry["norm"] = unflatten({path: OptStateSpec(shape, "float32", owner=path) for path in flatten(specs)})
        return entry

    def unit_specs(self, group: Group) -> Nested:
        """The parameters of one unit of a group, in the dtype in which their update is computed."""

        def precise(spec: ParameterSpec) -> ParameterSpec:
            return replace(unstack(spec, group.length), dtype=self._reference_dtype(spec))

        return jax.tree.map(precise, self.select(self.specs, group))

    def part(self, group: Group, paths: tuple[str, ...], entry: Nested) -> Nested:
        """What of a group's optimizer state the update of some of its parameters alone needs, counters included.

        Raises:
            KeyError: the optimizer names its state in another way when it sees only these.
        """
        unit = flatten(self.unit_specs(group))
        abstract = {path: jax.ShapeDtypeStruct(unit[path].shape, unit[path].dtype) for path in paths}
        alone = jax.eval_shape(self.optimizers[group.stage, group.label].init, unflatten(abstract))
        state = flatten(entry["state"])
        part: Nested = {"state": in_structure(alone, {path: state[path] for path in flatten(alone)})}
        for name in entry.keys() - {"state"}:  # in the structure of the parameters
            own = flatten(entry[name])
            part[name] = unflatten({path: own[path] for path in paths})
        return part

    def separable(self, group: Group) -> bool:
        """Whether the optimizer's state for one parameter alone is a part of that for all."""
        entry = self._group_specs(group)
        try:
            return group.stage != "model" and all(self.part(group, (path,), entry) for path in group.paths)
        except KeyError:
            return False

    def _keeps_master(self, group: Group) -> bool:
        specs: list[ParameterSpec] = jax.tree.leaves(self.select(self.specs, group))
        return self.master_dtype is not None and any(spec.dtype != self.master_dtype for spec in specs)

    def _compensates(self, group: Group) -> bool:
        specs: list[ParameterSpec] = jax.tree.leaves(self.select(self.specs, group))
        return self.rounding == "kahan" and any(spec.dtype != self._reference_dtype(spec) for spec in specs)

    def _store_spec(self, spec: OptStateSpec, length: int | None) -> OptStateSpec:
        if self.moment_dtype is not None and mirrors_parameter(spec):
            spec = replace(spec, dtype=self.moment_dtype)
        if length is None:
            return spec
        return replace(spec, shape=(length, *spec.shape), mesh_axes=(None, *spec.mesh_axes))

    def ema_specs(self, memory_kind: MemoryKind = "device") -> Nested:
        """The averages of trainable parameters, large ones tagged; {} without `ema`. In float32 at least: a bfloat16
        average whose decay is over 0.99 is moved by less than it can hold, and stays at its first value."""
        if self.ema is None:
            return {}

        def average(spec: ParameterSpec) -> TensorSpec:
            return move_to_host(
                _like(spec, _wide(self._reference_dtype(spec))), memory_kind, stacked=spec.num_layers is not None
            )

        return jax.tree.map(average, self.specs)

    def init(self, precise: Nested) -> Update:
        """(trainable parameters, optimizer state, averages) from freshly initialized, uncast trainable parameters."""
        made = self.init_part(flatten(precise))
        specs = {"parameter": self.specs, "optimizer": self.optimizer_specs(), "ema": self.ema_specs()}
        params, optimizer, ema = (in_structure(specs[name], made[name]) for name in specs)
        return params, optimizer, ema

    def init_part(self, precise: dict[str, jax.Array], *, unit: bool = False) -> dict[str, dict[str, jax.Array]]:
        """What `init` makes of some of the parameters, by group of the state and path.

        Args:
            precise: by path; those of one of `init_parts`, or all.
            unit: they are one layer's, without the leading axis.
        """
        specs, optimizer = flatten(self.specs), {}
        cast = {path: x.astype(self._reference_dtype(specs[path])) for path, x in precise.items()}
        for group in self.groups:
            prefix = "" if group.stage == "model" else f"{group.stage}/"
            group = replace(group, paths=tuple(path for path in group.paths if f"{prefix}{path}" in precise))
            if not group.paths:
                continue
            reference = self.select(unflatten(cast), group)
            init, stacked = self.optimizers[group.stage, group.label].init, group.length is not None and not unit
            entry = {"state": jax.vmap(init)(reference) if stacked else init(reference)}
            if self._keeps_master(group):
                entry["master"] = reference
            if self._compensates(group):
                entry["compensation"] = jax.tree.map(
                    lambda x, s: cut_off(x, s.dtype)[1], reference, self.select(self.specs, group)
                )
            if self.clip_mode == "norm_growth":
                entry["norm"] = jax.tree.map(lambda x, axes=int(stacked): jnp.zeros(x.shape[:axes]), reference)
            dtypes = {path: spec.dtype for path, spec in flatten(self._group_specs(group)).items()}
            home = f"{group.stage}/{group.label}"
            optimizer |= {f"{home}/{path}": x.astype(dtypes[path]) for path, x in flatten(entry).items()}
        params = {path: x.astype(specs[path].dtype) for path, x in precise.items()}
        average = {} if self.ema is None else {path: x.astype(_wide(x.dtype)) for path, x in cast.items()}
        return {"parameter": params, "optimizer": optimizer, "ema": average}

    def init_parts(self) -> list[tuple[str, ...]]:
        """Paths of the trainable parameters that `init_part` can be called with, the smallest that are possible."""
        parts = []
        for group in self.groups:
            prefix = "" if group.stage == "model" else f"{group.stage}/"
            paths = tuple(f"{prefix}{path}" for path in group.paths)
            parts += [(path,) for path in paths] if self.separable(group) else [paths]
        return parts

    def select(self, tree: Nested, group: Group) -> Nested:
        """A group's part of a tree of all trainable parameters, without the stage; layers apart for scope = model."""
        if group.stage == "model":
            flat, specs = flatten(tree), flatten(self.specs)
            return unflatten({path: apart(specs[path], flat[path]) for path in group.paths})
        flat = flatten(tree[group.stage])
        return unflatten({path: flat[path] for path in group.paths})

    def _unselect(self, tree: Nested, group: Group) -> dict[str, Any]:
        """{path in the model: leaf} of a tree that was selected."""
        flat, specs = flatten(tree), flatten(self.specs)
        if group.stage != "model" or not flat:
            return {f"{group.stage}/{path}": leaf for path, leaf in flat.items()}
        lengths = {path: specs[path].num_layers for path in group.paths}
        stacked = {path: [flat[f"{path}/{i}"] for i in range(n)] for path, n in lengths.items() if n is not None}
        return {path: jnp.stack(stacked[path]) if path in stacked else flat[path] for path in group.paths}

    def reach(self, group: Group) -> Reach:
        """The smallest part of a unit of the group that can be updated without the rest; tried out on first use."""
        unit = self.unit_specs(group)
        # The same experiment is built more than once in a process: to plan it, to run it.
        key = self._configs[group.label], tuple((path, spec.shape) for path, spec in flatten(unit).items())
        if key not in _reaches:
            # Schedules ask while a step is traced: the trial runs all the same.
            with jax.ensure_compile_time_eval():
                _reaches[key] = probe(self.optimizers[group.stage, group.label], unit)
        reach = _reaches[key]
        return "tensor" if self.clip_mode in ("update_rms", "norm_growth") and reach in ("element", "row") else reach

    def check_reach(self) -> None:
        """Raises ValueError when an optimizer mixes parameters: per layer, it would be silently wrong."""
        for group in self.groups if self.scope == "unit" else ():
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
        return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads))

    def decide(self, loss: jax.Array, norm: jax.Array, counter: Nested) -> Decision:
        """What all gradients together decide, from their norm: the factor that clips them, and whether the step counts:
        all is finite, and the loss no spike.

        Args:
            loss, norm: f32 scalars.
            counter: the state's counters.
        """
        factor = jnp.ones_like(norm)
        if self.clip is not None and self.clip_mode in ("global_norm", "two_pass"):
            factor = jnp.minimum(1.0, self.clip / norm)
        elif self.clip is not None and self.clip_mode == "previous_norm":
            before = counter["grad_norm"].astype(norm.dtype)
            factor = jnp.where(before > 0, jnp.minimum(1.0, self.clip / before), 1.0)
        ok, count = jnp.isfinite(norm) & jnp.isfinite(loss), counter["step"] - counter["skipped"]
        if self.spike is not None:
            mean, square = (counter[name] / _debias(count) for name in _LOSS_AVERAGES)
            deviation = jnp.sqrt(jnp.maximum(square - mean**2, 0.0))
            ok &= (count < _SPIKE_FREE) | (loss <= mean + self.spike * deviation)
        seed = fold(*counter["rng"]) if self.draws else jnp.uint32(0)
        return Decision(norm, factor, ok, count, seed, jnp.int32(0))

    def counter_specs(self) -> dict[str, TensorSpec]:
        """Moving averages of the loss and of its square, f32, where spikes are skipped."""
        return {} if self.spike is None else {name: TensorSpec((), "float32") for name in _LOSS_AVERAGES}

    def count_loss(self, counter: Nested, loss: jax.Array, ok: jax.Array) -> Nested:
        """The averages after a step; a skipped one leaves them."""
        if self.spike is None:
            return {}
        values = zip(_LOSS_AVERAGES, (loss, jnp.square(loss)), strict=True)
        return {n: jnp.where(ok, _DECAY * counter[n] + (1 - _DECAY) * x, counter[n]) for n, x in values}

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
            stage: update this one only; the others' gradients need not be there.
        """
        run = run or all_units
        new_params, new_ema, new_optimizer = flatten(params), flatten(ema), dict(optimizer)
        for group in self.groups:
            if stage not in (None, group.stage):
                continue
            bundle = (
                self.select(params, group),
                self.select(grads, group),
                optimizer[group.stage][group.label],
                self.select(ema, group) if self.ema is not None else {},
            )
            weights, state, average = run(group, self.unit_update(group), bundle, decision)
            new_params |= self._unselect(weights, group)
            new_ema |= self._unselect(average, group)
            new_optimizer[group.stage] = {**new_optimizer[group.stage], group.label: state}
        return in_structure(params, new_params), new_optimizer, in_structure(ema, new_ema)

    def unit_update(self, group: Group) -> UnitUpdate:
        """The update of one unit: (weights, grads, optimizer entry, average, decision) -> new ones but the grads."""
        optimizer, schedule = self.optimizers[group.stage, group.label], self._rates[group.label]

        def update(weights: Nested, grads: Nested, entry: Nested, average: Nested, decision: Decision) -> Any:
            reference = (
                entry["master"] if "master" in entry else upcast(self.rounding, weights, entry.get("compensation"))
            )
            seed = fold_name(fold(decision.seed, decision.layer), group.stage) if self.draws else decision.seed
            grads = jax.tree.map(lambda g, r: g.astype(r.dtype), grads, reference)
            new_norms = None
            if self.clip is not None and self.clip_mode == "norm_growth":
                grads, new_norms = limit_norm_growth(grads, entry["norm"], self.clip)
            elif self.clip_mode in ("global_norm", "two_pass", "previous_norm"):
                grads = jax.tree.map(lambda g: g * decision.factor.astype(g.dtype), grads)
            state = self._precise(entry["state"], reference)
            updates, new_state = optimizer.update(
                grads, state, reference, **({"seed": seed} if optimizer.draws else {})
            )
            if self.clip is not None and self.clip_mode == "update_rms":
                rate = 1.0 if schedule is None else schedule(decision.count)
                updates = limit_update_rms(updates, self.clip, rate)
            new_reference: Any = optax.apply_updates(reference, updates)
            if self.rounding == "nearest":
                # What is chosen is the master, and the weights are its cast. Were the weights chosen for themselves,
                # XLA would compute the update twice, and read gradients and moments once more.
                new_reference = chosen(decision.ok, new_reference, reference)
                new_weights, left_out = jax.tree.map(lambda r, w: r.astype(w.dtype), new_reference, weights), {}
            else:
                draws = fold(seed, decision.count)
                rounded_weights, left_out = rounded(self.rounding, new_reference, weights, draws, decision.origin)
                new_weights = chosen(decision.ok, rounded_weights, weights)
            new_entry = {"state": jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, entry["state"])}
            if "compensation" in entry:
                new_entry["compensation"] = left_out
            if new_norms is not None:
                new_entry["norm"] = new_norms
            new_entry = chosen(decision.ok, new_entry, {name: entry[name] for name in new_entry})
            if "master" in entry:
                new_entry["master"] = new_reference
            new_average = average
            if self.ema is not None:
                rate = 1.0 - self.ema
                moved = jax.tree.map(lambda a, r: a + rate * (r.astype(a.dtype) - a), average, new_reference)
                new_average = chosen(decision.ok, moved, average)
            return new_weights, new_entry, new_average

        return update

    def _precise(self, state: Any, reference: Nested) -> Any:
        """Moments kept in a narrower `moment_dtype`, in the dtype that the update is computed in; wider ones stay."""
        if self.moment_dtype is None:
            return state
        wide = jnp.result_type(self.moment_dtype, *(leaf.dtype for leaf in jax.tree.leaves(reference)))
        return jax.tree.map(lambda s: s.astype(wide) if s.dtype == self.moment_dtype else s, state)


def _build(config: Config) -> PartitionedGradientTransformation:
    optimizer = config.instantiate()
    if not isinstance(optimizer, PartitionedGradientTransformation | optax.GradientTransformation):
        raise ValueError(f"learner.optimizer: expected an optax transformation, given {type(optimizer).__name__}")
    return partitioned(optimizer)


def _schedule(optimizer: Config) -> Callable[[Any], Any] | None:
    """The learning rate as a function of the number of updates, for reports; None when the optimizer names none."""
    while "optimizer" in optimizer:  # in a wrapper
        optimizer = optimizer.optimizer
    rate = optimizer.get("learning_rate") if "learning_rate" in optimizer else None
    if isinstance(rate, Config):
        return rate.instantiate()
    return None if rate is None else lambda count: jnp.asarray(rate, jnp.float32)


def _debias(count: jax.Array) -> jax.Array:
    """What a moving average that began at zero is too small by after so many updates (as in Adam)."""
    return jnp.maximum(1.0 - _DECAY ** count.astype(jnp.float32), 1e-6)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _like(spec: ParameterSpec, dtype: Any, owner: str | None = None) -> OptStateSpec:
    return OptStateSpec(spec.shape, dtype, spec.mesh_axes, owner=owner)
