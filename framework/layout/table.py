"""The layout: one table of the whole training state.

`StateLayout` maps each leaf of the training state to its shape, dtype, PartitionSpec, memory kind and group. It is
built before any array exists. It is the only source of init `out_shardings`, step in/out shardings, transfers to the
device for a step, restore targets of checkpoints, and every reported byte count. No other file builds a sharding for
state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.layout.specs import (
    MemoryKind,
    MeshAxis,
    OptStateSpec,
    ParameterSpec,
    TensorSpec,
    axis_names,
    count_shards,
    fetch_leaf,
    fit_axes,
    store_leaf,
)
from plimsoll.framework.layout.train_state import GROUPS, UNSAVED_GROUPS, Group, TrainState
from plimsoll.framework.layout.trees import Nested, PyTree, flatten

Spec = TypeVar("Spec", bound=TensorSpec)


@dataclass(frozen=True)
class StateLeaf:
    """One row of the layout: a leaf of the training state.

    Attributes:
        path: path of the leaf, whose first name is the group.
        group: group of the state.
        spec: spec of the array.
        bytes_per_device: bytes of one shard.
    """

    path: str
    group: Group
    spec: TensorSpec
    bytes_per_device: int


class StateLayout:
    """The sharding and memory kind of each leaf of the training state.

    Args:
        specs: the state, with TensorSpecs as leaves.
        mesh: the devices.

    Raises:
        ValueError: a mesh axis does not divide the dimension of a parameter that it shards.

    Attributes:
        leaves: all leaves, the parameters first.
        checkpoint_specs: specs of a checkpoint's leaves: everything except UNSAVED_GROUPS.
    """

    def __init__(self, specs: TrainState, mesh: Mesh):
        self.mesh = mesh
        # Asked for each dimension of each leaf.
        self._shard_counts: dict[MeshAxis, int] = {}
        self.specs: TrainState = jax.tree.map(self.fit, specs)
        # Parameters come first, so that an error about a dimension that is not divisible names the parameter, not one
        # of its moments.
        self.leaves: list[StateLeaf] = []
        for group in GROUPS:
            for path, spec in flatten(self.specs[group]).items():
                self.leaves.append(self._build_leaf(f"{group}/{path}", group, spec))
        self.checkpoint_specs = self.specs.select([group for group in GROUPS if group not in UNSAVED_GROUPS])

    def _num_shards(self, axes: MeshAxis) -> int:
        """Return the number of shards of a dimension with these mesh axes; 1 if replicated."""
        if axes not in self._shard_counts:
            self._shard_counts[axes] = count_shards(axes, self.mesh.shape)
        return self._shard_counts[axes]

    def fit(self, spec: Spec) -> Spec:
        """Return the spec of an array as the mesh shards it, see `fit_axes`.

        Axes of an optimizer state leaf that the mesh does not divide are replicated: such a leaf has its parameter's
        mesh axes, but not always its sizes (a scale per block).
        """
        axes = fit_axes(spec.mesh_axes, spec.run_counts, self.mesh.shape)
        if isinstance(spec, OptStateSpec):
            dims = zip(spec.shape, axes, strict=True)
            axes = tuple(names if dim % self._num_shards(names) == 0 else None for dim, names in dims)
        return spec if axes == spec.mesh_axes else replace(spec, mesh_axes=axes)

    def _build_leaf(self, path: str, group: Group, spec: TensorSpec) -> StateLeaf:
        # Only parameters declare what their axes are.
        roles = spec.roles if isinstance(spec, ParameterSpec) else ("axis",) * len(spec.shape)
        shard_shape = []
        for dim, axes, role, num_runs in zip(spec.shape, spec.mesh_axes, roles, spec.run_counts, strict=True):
            num_shards = self._num_shards(axes)
            if num_runs % num_shards:
                mesh_field = "*".join(name for name in axis_names(axes) if self.mesh.shape[name] > 1)
                divisors = nearest_divisors(num_runs, num_shards)
                raise ValueError(
                    f"mesh.{mesh_field} = {num_shards} does not divide {role} = {num_runs} of {path}; "
                    f"nearest that do: {divisors}"
                )
            shard_shape.append(dim // num_shards)
        shard_bytes = math.prod(shard_shape) * spec.dtype.itemsize
        return StateLeaf(path, group, spec, shard_bytes)

    def __iter__(self) -> Iterator[StateLeaf]:
        return iter(self.leaves)

    def partition(self, spec: TensorSpec) -> PartitionSpec:
        """Return the PartitionSpec of one leaf."""
        return PartitionSpec(*self.fit(spec).mesh_axes)

    def sharding(self, spec: TensorSpec) -> NamedSharding:
        """Return the sharding of one leaf, including its memory kind."""
        return NamedSharding(self.mesh, self.partition(spec), memory_kind=spec.memory_kind)

    def shardings(self, specs: PyTree = None) -> PyTree:
        """Return the tree of shardings, for jit's in_shardings and out_shardings."""
        specs = self.specs if specs is None else specs
        return jax.tree.map(self.sharding, specs)

    def abstract(self, specs: PyTree = None) -> PyTree:
        """Return the tree of ShapeDtypeStructs with shardings.

        Ahead-of-time compilation and restoring take it instead of arrays.
        """
        specs = self.specs if specs is None else specs
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self.sharding(spec)), specs
        )

    def fetch(self, group: Group, tree: Nested) -> Nested:
        """Inside jit: move a group's offloaded leaves to the device, and leave the others unchanged.

        The move must be explicit, because arithmetic on a host array does not compile (mixed memory spaces). The
        specs must decide it: a tracer does not know its sharding, so a move decided from the array silently does
        nothing.
        """
        return jax.tree.map(fetch_leaf, self.specs[group], tree)

    def store(self, group: Group, tree: Nested) -> Nested:
        """Inside jit: move results to the memory that the layout gives them; the inverse of `fetch`."""
        return jax.tree.map(store_leaf, self.specs[group], tree)

    def check(self, state: TrainState) -> None:
        """Check that a state matches the layout.

        Compares structure, shapes, dtypes, shardings and memory kinds.

        Raises:
            ValueError: the state does not match; the error names leaves that differ.
        """
        spec_by_path = flatten(self.specs)
        array_by_path = flatten(state)
        if spec_by_path.keys() != array_by_path.keys():
            differing_paths = sorted(spec_by_path.keys() ^ array_by_path.keys())
            raise ValueError(f"state and layout differ in leaves: {differing_paths[:8]}")
        for path, spec in spec_by_path.items():
            array = array_by_path[path]
            sharding = array.sharding
            layout_sharding = self.sharding(spec)
            if array.shape != spec.shape or array.dtype != spec.dtype:
                raise ValueError(f"{path} is {array.dtype}{array.shape}; the layout says {spec.dtype}{spec.shape}")
            if sharding.memory_kind != spec.memory_kind:
                raise ValueError(f"{path} is in {sharding.memory_kind}; the layout says {spec.memory_kind}")
            # Not equality: many PartitionSpecs describe the same sharding, because axes of size 1 make no difference.
            if not sharding.is_equivalent_to(layout_sharding, array.ndim):
                raise ValueError(f"{path} is sharded {sharding}; the layout says {layout_sharding}")

    def bytes_per_device(self, group: Group | None = None, memory_kind: MemoryKind | None = None) -> int:
        """Return the bytes per device of a group and memory kind; None means all of them.

        The bytes are in the device's memory, or in the memory of its host.
        """
        total = 0
        for leaf in self.leaves:
            if group in (None, leaf.group) and memory_kind in (None, leaf.spec.memory_kind):
                total += leaf.bytes_per_device
        return total

    def size(self, group: Group) -> int:
        """Return the number of elements of a group."""
        return sum(leaf.spec.size for leaf in self.leaves if leaf.group == group)


def nearest_divisors(number: int, wish: int) -> list[int]:
    """Return the divisors of `number` nearest to `wish`, below and above."""
    # Tries only numbers up to 4096, which is enough for a mesh axis: a vocabulary may be huge.
    limit = min(number, 4096)
    divisors = [d for d in range(1, limit + 1) if number % d == 0]
    smaller = [d for d in divisors if d <= wish]
    larger = [d for d in divisors if d > wish]
    return smaller[-1:] + larger[:1]
