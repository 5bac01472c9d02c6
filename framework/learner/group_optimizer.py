"""The optimizer of one parameter group: its dtypes, the specs and initialization of its state, and how that splits.

The group's entry in the training state is {"state": the optimizer's own, "master": ..., "compensation": ..., "norm":
...}. All but the first have the structure of the parameters, and exist only if the learner needs them. The state of a
stack is `vmap(init)` over its layers, counters included.

An update is computed in the dtype of the master copy if there is one, otherwise in the dtype of the weights. If
weights narrower than float32 are not rounded to nearest, it is computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework.config import Config
from plimsoll.framework.layout import Nested, OptStateSpec, ParameterSpec, PyTree, flatten, path_name, unflatten
from plimsoll.framework.learner.rules import LearningRate, ParamGroup, unstack
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, add_partition, mirrors_parameter
from plimsoll.framework.optimizers.rounding import (
    BlockOrigin,
    Rounding,
    fold_name,
    noise,
    round_stochastically,
    split_rounding_error,
)
from plimsoll.framework.optimizers.update_locality import UpdateLocality, probe, proves_independence

# The parts of an entry, under the names that checkpoints use.
STATE = "state"
MASTER = "master"
COMPENSATION = "compensation"
NORM = "norm"
# Results of `probe` in this process, by the optimizer's config as JSON, and paths and shapes of a layer's parameters. A
# process builds the same experiment more than once, to plan it and to run it, and a measurement compiles programs.
_localities: dict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], UpdateLocality] = {}


@dataclass(frozen=True)
class Precision:
    """The dtypes of updates, and the rounding of narrow weights.

    Attributes:
        rounding, master_dtype, moment_dtype: see `Learner`; dtypes are NumPy's, or None.
    """

    rounding: Rounding
    master_dtype: np.dtype | None
    moment_dtype: np.dtype | None

    @property
    def draws(self) -> bool:
        """Return whether updates draw noise: for weights, or for moments in bfloat16."""
        return self.rounding == "stochastic" or self.moment_dtype == jnp.bfloat16

    def update_dtype(self, spec: ParameterSpec) -> np.dtype:
        """Return the dtype in which a parameter's update is computed."""
        if self.rounding != "nearest":
            return jnp.promote_types(spec.dtype, jnp.float32)
        return spec.dtype if self.master_dtype is None else self.master_dtype

    def sum_dtype(self, spec: ParameterSpec) -> np.dtype:
        """Return the dtype of gradient sums and moving averages: that of the update, at least float32.

        With a decay over 0.99, the steps of a bfloat16 average are smaller than its resolution, and it stays at its
        initial value.
        """
        return jnp.promote_types(self.update_dtype(spec), jnp.float32)

    def keeps_master(self, specs: Iterable[ParameterSpec]) -> bool:
        """Return whether the optimizer state of these parameters has a master copy: one of them has another dtype."""
        return self.master_dtype is not None and any(spec.dtype != self.master_dtype for spec in specs)

    def compensates(self, specs: Iterable[ParameterSpec]) -> bool:
        """Return whether the optimizer state of these parameters stores their rounding errors (Kahan)."""
        return self.rounding == "kahan" and any(spec.dtype != self.update_dtype(spec) for spec in specs)

    def widen(self, state: PyTree, weights: Nested) -> PyTree:
        """Return a stored optimizer state in the dtypes in which its update is computed.

        Args:
            state: the stored state. Moments with a narrower `moment_dtype` are cast to the dtype of the update; other
                leaves keep their dtype.
            weights: weights in the dtype of the update.
        """
        if self.moment_dtype is None:
            return state
        weight_dtypes = [leaf.dtype for leaf in jax.tree.leaves(weights)]
        wide = jnp.result_type(self.moment_dtype, *weight_dtypes)
        return jax.tree.map(lambda leaf: leaf.astype(wide) if leaf.dtype == self.moment_dtype else leaf, state)

    def narrow(self, state: PyTree, in_storage: PyTree, seed: jax.Array, origin: BlockOrigin | None) -> PyTree:
        """Return an optimizer state after its update, in the dtypes in which it is stored.

        Moments in bfloat16 are rounded stochastically. An average that moves by less than 1/512 of itself, as with b2
        = 0.999, would not move at all if it were rounded to nearest.

        Args:
            state: the state after the update, in the dtypes that `widen` returns.
            in_storage: the state before the update, as it is stored; only its dtypes are used.
            seed: uint32 scalar, of this update of the layer.
            origin: positions of blocks in their tensors; None for whole tensors.
        """
        if self.moment_dtype != jnp.bfloat16:
            return jax.tree.map(lambda new, old: new.astype(old.dtype), state, in_storage)

        def round_leaf(keypath: jax.tree_util.KeyPath, new: jax.Array, old: jax.Array) -> jax.Array:
            if old.dtype != jnp.bfloat16 or new.dtype == old.dtype:
                return new.astype(old.dtype)
            # "moment" is folded in because the weights of the same name draw from the same seed.
            leaf_seed = fold_name(fold_name(seed, "moment"), path_name(keypath))
            return round_stochastically(new, old.dtype, noise(leaf_seed, new.shape, origin))

        return jax.tree_util.tree_map_with_path(round_leaf, state, in_storage)


@dataclass(frozen=True, eq=False)
class GroupOptimizer:
    """The optimizer of one parameter group, with a separate instance and state for each layer.

    Attributes:
        group: the parameter group.
        specs: specs of the group's parameters, stacked if the stage is a stack.
        layer_specs: specs of one layer's parameters, in the dtype in which the update is computed.
        transformation: the optimizer, fitted to one layer of the group.
        config: the optimizer's config, as JSON.
        learning_rate: the learning rate in the config; None if it has none.
        precision: dtypes of the update.
        keeps_norms: whether the state has gradient norms, one per tensor and layer.
    """

    group: ParamGroup
    specs: Nested
    layer_specs: Nested
    transformation: PartitionedGradientTransformation
    config: str
    learning_rate: LearningRate | None
    precision: Precision
    keeps_norms: bool

    # --- how the update can be split ---------------------------------------------------------------------------------

    def measure_locality(self) -> UpdateLocality:
        """Return the smallest part of a layer that the optimizer can update independently; measured on first use."""
        shapes = tuple((path, spec.shape) for path, spec in flatten(self.layer_specs).items())
        key = (self.config, shapes)
        if key not in _localities:
            _localities[key] = probe(self.transformation, self.layer_specs)
        return _localities[key]

    def check_independent_updates(self) -> None:
        """Check that the update of one parameter does not depend on gradients of other parameters.

        Raises:
            ValueError: the update depends on them.
        """
        # The measurement compiles programs; for most optimizers, inspecting the update is enough.
        if proves_independence(self.transformation, self.layer_specs):
            return
        if self.measure_locality() == "global":
            raise ValueError(
                f"learner.optimizer ({self.group.label}): the update of one parameter depends on the gradients of "
                "others, for example through a global norm or a finiteness test inside a chain. Each layer has its own "
                "optimizer instance, which would see only the gradients of that layer. Use learner.clip and "
                "learner.nonfinite for that, or learner.scope = model, which has one instance for all parameters (with "
                "memory.update = after_backward)"
            )

    # --- the state ---------------------------------------------------------------------------------------------------

    def counters(self) -> frozenset[str]:
        """Return the paths of update counters in the entry, which are the same in all layers."""
        specs = flatten({STATE: self.transformation.partition(self.layer_specs)})
        return frozenset(path for path, spec in specs.items() if spec.counts_updates)

    def entry_specs(self) -> Nested:
        """Return the specs of the group's entry, all on the device, with layers stacked along the first axis."""
        flat_specs: dict[str, ParameterSpec] = flatten(self.specs)
        length = self.group.length
        precision = self.precision
        # All parameters of a stack shard their layers alike.
        layer_axis = next(iter(flat_specs.values())).mesh_axes[0] if length is not None else None

        def make_storage_spec(spec: OptStateSpec) -> OptStateSpec:
            if precision.moment_dtype is not None and mirrors_parameter(spec):
                spec = replace(spec, dtype=precision.moment_dtype)
            if length is None:
                return spec
            return replace(spec, shape=(length, *spec.shape), mesh_axes=(layer_axis, *spec.mesh_axes))

        entry: Nested = {STATE: jax.tree.map(make_storage_spec, self.transformation.partition(self.layer_specs))}
        if precision.keeps_master(flat_specs.values()):
            masters = {}
            for path, spec in flat_specs.items():
                masters[path] = OptStateSpec(spec.shape, precision.update_dtype(spec), spec.mesh_axes, owner=path)
            entry[MASTER] = unflatten(masters)
        if precision.compensates(flat_specs.values()):
            errors = {}
            for path, spec in flat_specs.items():
                errors[path] = OptStateSpec(spec.shape, spec.dtype, spec.mesh_axes, owner=path)
            entry[COMPENSATION] = unflatten(errors)
        if self.keeps_norms:
            # One norm per tensor and layer, because `limit_norm_growth` runs under the vmap over the layers.
            shape, axes = ((), ()) if length is None else ((length,), (layer_axis,))
            norms = {path: OptStateSpec(shape, "float32", axes, owner=path) for path in flat_specs}
            entry[NORM] = unflatten(norms)
        return entry

    def part(self, paths: tuple[str, ...], entry: Nested) -> Nested:
        """Return the part of the entry that an update of some of the parameters needs, counters included.

        Args:
            paths: the parameters' paths within the group.
            entry: the group's entry, as arrays or specs.

        Raises:
            KeyError: the optimizer names its state differently when it sees only these parameters.
        """
        flat_layer_specs = flatten(self.layer_specs)
        abstract = {
            path: jax.ShapeDtypeStruct(flat_layer_specs[path].shape, flat_layer_specs[path].dtype) for path in paths
        }
        state_of_paths = jax.eval_shape(self.transformation.init, unflatten(abstract))
        state = flatten(entry[STATE])
        state_leaves = {path: state[path] for path in flatten(state_of_paths)}
        part: Nested = {STATE: unflatten_like(state_of_paths, state_leaves)}
        # Everything but the optimizer's own state has the structure of the parameters.
        for name in entry.keys() - {STATE}:
            leaves = flatten(entry[name])
            part[name] = unflatten({path: leaves[path] for path in paths})
        return part

    def restrict(self, paths: tuple[str, ...]) -> GroupOptimizer:
        """Return the optimizer of some of the group's parameters, given by their paths within the group."""
        if paths == self.group.paths:
            return self
        specs = flatten(self.specs)
        layer_specs = flatten(self.layer_specs)
        return replace(
            self,
            group=replace(self.group, paths=paths),
            specs=unflatten({path: specs[path] for path in paths}),
            layer_specs=unflatten({path: layer_specs[path] for path in paths}),
        )

    def separable(self) -> bool:
        """Return whether the optimizer's state for one parameter is a part of its state for the whole group."""
        entry = self.entry_specs()
        if self.group.spans_stages:
            return False
        try:
            for path in self.group.paths:
                self.part((path,), entry)
        except KeyError:
            return False
        return True

    def init(self, weights: Nested, *, stacked: bool) -> dict[str, jax.Array]:
        """Return the initial entry, by path in the optimizer state of the model.

        Args:
            weights: the group's weights in the dtype of their update: freshly initialized, not cast.
            stacked: whether they have a leading layer axis.
        """
        init = self.transformation.init
        specs = jax.tree.leaves(self.specs)
        # Each layer has its own optimizer instance, counters included, so the state is initialized layer by layer.
        entry: Nested = {STATE: jax.vmap(init)(weights) if stacked else init(weights)}
        if self.precision.keeps_master(specs):
            entry[MASTER] = weights
        if self.precision.compensates(specs):
            entry[COMPENSATION] = jax.tree.map(
                lambda x, spec: split_rounding_error(x, spec.dtype)[1], weights, self.specs
            )
        if self.keeps_norms:
            num_layer_axes = int(stacked)
            entry[NORM] = jax.tree.map(lambda x: jnp.zeros(x.shape[:num_layer_axes]), weights)
        entry_specs = flatten(self.entry_specs())
        leaves = {}
        for path, x in flatten(entry).items():
            leaves[f"{self.group.stage}/{self.group.label}/{path}"] = x.astype(entry_specs[path].dtype)
        return leaves


def fit_optimizers(
    config: Config,
    learning_rate: LearningRate | None,
    specs_by_group: Mapping[ParamGroup, Nested],
    precision: Precision,
    *,
    keeps_norms: bool,
) -> list[GroupOptimizer]:
    """Instantiate an optimizer, and fit it to each group that it updates.

    Args:
        config, learning_rate: the optimizer's config, and the learning rate in it.
        specs_by_group: for each group, the specs of its parameters, stacked if the stage is a stack.
        precision: dtypes of the updates.
        keeps_norms: whether the state has gradient norms, one per tensor and layer.

    Raises:
        ValueError: the config does not build an optax transformation, or it offloads state that none of its groups has.
    """
    built = config.instantiate()
    if not isinstance(built, PartitionedGradientTransformation | optax.GradientTransformation):
        raise ValueError(f"learner.optimizer: expected an optax transformation, given {type(built).__name__}")
    optimizer = add_partition(built)
    layer_specs = {}
    for group, specs in specs_by_group.items():
        layer_specs[group.stage] = jax.tree.map(
            lambda spec, length=group.length: replace(unstack(spec, length), dtype=precision.update_dtype(spec)), specs
        )
    # An optimizer that offloads its state checks its pattern in `partition`. The pattern is written for the whole
    # model: it must match in at least one stage, not in each. `without_transfers`, used below, does not check it.
    if optimizer.without_transfers is not None and layer_specs:
        optimizer.partition(layer_specs)
    fitted_optimizers = []
    for group, specs in specs_by_group.items():
        stage_specs = layer_specs[group.stage]
        fitted = optimizer.fit_to_specs(stage_specs) if optimizer.fit_to_specs is not None else optimizer
        # The layout, not the optimizer, moves the state.
        transformation = fitted.without_transfers or fitted
        fitted_optimizers.append(
            GroupOptimizer(
                group, specs, stage_specs, transformation, config.to_json(), learning_rate, precision, keeps_norms
            )
        )
    return fitted_optimizers


def unflatten_like(like: PyTree, flat: Mapping[str, PyTree]) -> PyTree:
    """Arrange leaves, given by path in any order, in the structure of the tree `like`."""
    paths = flatten(like)
    assert paths.keys() == flat.keys(), sorted(paths.keys() ^ flat.keys())
    leaves = [flat[path] for path in paths]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
