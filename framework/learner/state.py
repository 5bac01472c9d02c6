"""The optimizer state of one parameter group: its specs, its initialization, and how it splits into parts.

The group's entry in the training state is {"state": the optimizer's own, "master": ..., "compensation": ..., "norm":
...}. All but the first have the structure of the parameters, and exist only if the learner needs them. The state of a
stack is `vmap(init)` over its layers, counters included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested, OptStateSpec, ParameterSpec, flatten, unflatten
from plimsoll.framework.learner.groups import unstack
from plimsoll.framework.learner.precision import Precision
from plimsoll.framework.learner.update_types import ParamGroup, unflatten_like
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation
from plimsoll.framework.optimizers.rounding import split_rounding_error

# The parts of an entry, under the names that checkpoints use.
STATE = "state"
MASTER = "master"
COMPENSATION = "compensation"
NORM = "norm"


def layer_specs(specs: Nested, group: ParamGroup, precision: Precision) -> Nested:
    """Return the parameter specs of one layer of a group, in the dtype in which the update is computed.

    Args:
        specs: specs of the group's parameters, stacked if the stage is a stack.
        group: the parameter group.
        precision: dtypes of the update.
    """

    def precise(spec: ParameterSpec) -> ParameterSpec:
        layer_spec = unstack(spec, group.length)
        return replace(layer_spec, dtype=precision.update_dtype(spec))

    return jax.tree.map(precise, specs)


def spec_like(spec: ParameterSpec, dtype: Any, owner: str | None = None) -> OptStateSpec:
    """Return a spec with the shape and mesh axes of a parameter, in another dtype.

    Args:
        spec: spec of the parameter.
        dtype: dtype of the new spec.
        owner: path of the parameter, if the leaf belongs to one in the optimizer state.
    """
    return OptStateSpec(spec.shape, dtype, spec.mesh_axes, owner=owner)


@dataclass(frozen=True)
class GroupState:
    """The optimizer state of one parameter group.

    Attributes:
        group: the parameter group.
        specs: specs of the group's parameters, stacked if the stage is a stack.
        optimizer: the optimizer, fitted to one layer of the group.
        precision: dtypes of the update.
        keeps_norms: whether the state has gradient norms, one per tensor and layer.
    """

    group: ParamGroup
    specs: Nested
    optimizer: PartitionedGradientTransformation
    precision: Precision
    keeps_norms: bool

    def layer_specs(self) -> Nested:
        """Return the parameter specs of one layer, in the dtype in which the update is computed."""
        return layer_specs(self.specs, self.group, self.precision)

    def _optimizer_specs(self) -> Any:
        """Return the OptStateSpecs of the optimizer's own state for one layer, in the structure of that state."""
        return self.optimizer.partition(self.layer_specs())

    def counters(self) -> frozenset[str]:
        """Return the paths of update counters in the entry, which are the same in all layers."""
        specs = flatten({STATE: self._optimizer_specs()})
        return frozenset(path for path, spec in specs.items() if spec.counts_updates)

    def entry_specs(self) -> Nested:
        """Return the specs of the group's entry, all on the device, with layers stacked along the first axis."""
        flat_specs = flatten(self.specs)
        entry = {STATE: jax.tree.map(self._storage_spec, self._optimizer_specs())}
        if self._keeps_master():
            masters = {}
            for path, spec in flat_specs.items():
                masters[path] = spec_like(spec, self.precision.update_dtype(spec), path)
            entry[MASTER] = unflatten(masters)
        if self._compensates():
            compensations = {}
            for path, spec in flat_specs.items():
                compensations[path] = spec_like(spec, spec.dtype, path)
            entry[COMPENSATION] = unflatten(compensations)
        if self.keeps_norms:
            # One norm per tensor and layer, because `limit_norm_growth` runs under the vmap over the layers.
            shape = () if self.group.length is None else (self.group.length,)
            norms = {path: OptStateSpec(shape, "float32", owner=path) for path in flat_specs}
            entry[NORM] = unflatten(norms)
        return entry

    def _storage_spec(self, spec: OptStateSpec) -> OptStateSpec:
        """Return the storage spec of a leaf between steps, stacked over layers; `spec` describes one layer's leaf."""
        stored_spec = self.precision.in_storage(spec)
        length = self.group.length
        if length is None:
            return stored_spec
        return replace(stored_spec, shape=(length, *stored_spec.shape), mesh_axes=(None, *stored_spec.mesh_axes))

    def _keeps_master(self) -> bool:
        return self.precision.keeps_master(jax.tree.leaves(self.specs))

    def _compensates(self) -> bool:
        return self.precision.compensates(jax.tree.leaves(self.specs))

    def part(self, paths: tuple[str, ...], entry: Nested) -> Nested:
        """Return the part of the entry that an update of some of the parameters needs, counters included.

        Args:
            paths: the parameters' paths within the group.
            entry: the group's entry, as arrays or specs.

        Raises:
            KeyError: the optimizer names its state differently when it sees only these parameters.
        """
        flat_layer_specs = flatten(self.layer_specs())
        abstract = {
            path: jax.ShapeDtypeStruct(flat_layer_specs[path].shape, flat_layer_specs[path].dtype) for path in paths
        }
        state_of_paths = jax.eval_shape(self.optimizer.init, unflatten(abstract))
        state = flatten(entry[STATE])
        state_leaves = {path: state[path] for path in flatten(state_of_paths)}
        part: Nested = {STATE: unflatten_like(state_of_paths, state_leaves)}
        # Everything but the optimizer's own state has the structure of the parameters.
        for name in entry.keys() - {STATE}:
            leaves = flatten(entry[name])
            part[name] = unflatten({path: leaves[path] for path in paths})
        return part

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
        init = self.optimizer.init
        # Each layer has its own optimizer instance, counters included, so the state is initialized layer by layer.
        state = jax.vmap(init)(weights) if stacked else init(weights)
        entry = {STATE: state}
        if self._keeps_master():
            entry[MASTER] = weights
        if self._compensates():
            entry[COMPENSATION] = jax.tree.map(
                lambda x, spec: split_rounding_error(x, spec.dtype)[1], weights, self.specs
            )
        if self.keeps_norms:
            num_layer_axes = int(stacked)
            entry[NORM] = jax.tree.map(lambda x: jnp.zeros(x.shape[:num_layer_axes]), weights)
        entry_specs = flatten(self.entry_specs())
        prefix = f"{self.group.stage}/{self.group.label}"
        leaves = {}
        for path, x in flatten(entry).items():
            leaves[f"{prefix}/{path}"] = x.astype(entry_specs[path].dtype)
        return leaves
