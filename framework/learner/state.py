"""The optimizer state of one group of parameters: its specs, its first value, and the parts that it can be taken in.

Its entry in the training state is {"state": the optimizer's own, "master": ..., "compensation": ..., "norm": ...}; all
but the first are in the structure of the parameters, and are there only where the learner keeps them. The state of a
stack is `vmap(init)` over its layers, counters included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from framework.layout import Nested, OptStateSpec, ParameterSpec, flatten, unflatten
from framework.learner.groups import unstack
from framework.learner.precision import Precision
from framework.learner.units import Group, in_structure
from framework.optimizers.partition import PartitionedGradientTransformation
from framework.optimizers.rounding import cut_off

# The parts of an entry, by which checkpoints name them.
STATE = "state"
MASTER = "master"
COMPENSATION = "compensation"
NORM = "norm"


def unit_specs(specs: Nested, group: Group, precision: Precision) -> Nested:
    """The parameter specs of one unit of a group, in the dtype in which their update is computed.

    Args:
        specs: of the group's parameters, stacked where they are.
        group: whose.
        precision: of the update.
    """

    def precise(spec: ParameterSpec) -> ParameterSpec:
        unit_spec = unstack(spec, group.length)
        return replace(unit_spec, dtype=precision.update_dtype(spec))

    return jax.tree.map(precise, specs)


def spec_like(
    spec: ParameterSpec,
    dtype: Any,
    owner: str | None = None,
) -> OptStateSpec:
    """A spec in the shape and on the mesh axes of a parameter, in another dtype."""
    return OptStateSpec(spec.shape, dtype, spec.mesh_axes, owner=owner)


@dataclass(frozen=True)
class GroupState:
    """The optimizer state of one group of parameters.

    Attributes:
      group: whose state.
      specs: of the group's parameters, stacked where they are.
      optimizer: fitted to one unit of the group.
      precision: of the update.
      keeps_norms: whether the norms of the gradients are kept, one for each tensor and layer.
    """

    group: Group
    specs: Nested
    optimizer: PartitionedGradientTransformation
    precision: Precision
    keeps_norms: bool

    def unit_specs(self) -> Nested:
        """The parameter specs of one unit, in the dtype in which their update is computed."""
        return unit_specs(self.specs, self.group, self.precision)

    def _optimizer_specs(self) -> Any:
        """The OptStateSpecs of the optimizer's own state for one unit, in the structure of that state."""
        return self.optimizer.partition(self.unit_specs())

    def counters(self) -> frozenset[str]:
        """The paths in the entry of numbers of updates, which are the same in all layers."""
        specs = flatten({STATE: self._optimizer_specs()})
        return frozenset(path for path, spec in specs.items() if spec.counts_updates)

    def entry_specs(self) -> Nested:
        """The specs of the group's entry, all on the device, layers stacked along a first axis."""
        flat_specs = flatten(self.specs)
        entry = {STATE: jax.tree.map(self._stored, self._optimizer_specs())}
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
            # One norm per tensor and layer, as `limit_norm_growth` runs under the vmap over the layers.
            shape = () if self.group.length is None else (self.group.length,)
            norms = {path: OptStateSpec(shape, "float32", owner=path) for path in flat_specs}
            entry[NORM] = unflatten(norms)
        return entry

    def _stored(self, spec: OptStateSpec) -> OptStateSpec:
        """The spec of a leaf of a unit's state as it is stored between steps, for all layers."""
        stored_spec = self.precision.stored(spec)
        length = self.group.length
        if length is None:
            return stored_spec
        return replace(
            stored_spec,
            shape=(length, *stored_spec.shape),
            mesh_axes=(None, *stored_spec.mesh_axes),
        )

    def _keeps_master(self) -> bool:
        return self.precision.keeps_master(jax.tree.leaves(self.specs))

    def _compensates(self) -> bool:
        return self.precision.compensates(jax.tree.leaves(self.specs))

    def part(self, paths: tuple[str, ...], entry: Nested) -> Nested:
        """The part of the entry that an update of some of the parameters needs, counters included.

        Args:
            paths: the parameters' paths within the group.
            entry: the group's, as arrays or specs.

        Raises:
            KeyError: the optimizer names its state in another way when it sees only these.
        """
        unit = flatten(self.unit_specs())
        abstract = {path: jax.ShapeDtypeStruct(unit[path].shape, unit[path].dtype) for path in paths}
        state_of_paths = jax.eval_shape(self.optimizer.init, unflatten(abstract))
        state = flatten(entry[STATE])
        state_leaves = {path: state[path] for path in flatten(state_of_paths)}
        part: Nested = {STATE: in_structure(state_of_paths, state_leaves)}
        # All entries but the optimizer's own state have the structure of the parameters.
        for name in entry.keys() - {STATE}:
            leaves = flatten(entry[name])
            part[name] = unflatten({path: leaves[path] for path in paths})
        return part

    def separable(self) -> bool:
        """Whether the optimizer's state for one parameter is a part of its state for all of the group."""
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
        """The first entry, by path in the optimizer state of the model.

        Args:
            weights: the group's, in the dtype of their update: freshly initialized, uncast.
            stacked: whether they have a leading axis of layers.
        """
        init = self.optimizer.init
        # Each layer has an optimizer instance, counters included, so the state is initialized layer by layer.
        state = jax.vmap(init)(weights) if stacked else init(weights)
        entry = {STATE: state}
        if self._keeps_master():
            entry[MASTER] = weights
        if self._compensates():
            entry[COMPENSATION] = jax.tree.map(lambda x, spec: cut_off(x, spec.dtype)[1], weights, self.specs)
        if self.keeps_norms:
            num_layer_axes = int(stacked)
            entry[NORM] = jax.tree.map(lambda x: jnp.zeros(x.shape[:num_layer_axes]), weights)
        entry_specs = flatten(self.entry_specs())
        prefix = f"{self.group.stage}/{self.group.label}"
        leaves = {}
        for path, x in flatten(entry).items():
            leaves[f"{prefix}/{path}"] = x.astype(entry_specs[path].dtype)
        return leaves
