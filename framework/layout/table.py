"""The layout: one table for everything that training keeps.

`StateLayout` maps each leaf of the training state to shape, dtype, PartitionSpec, memory kind and
group. It is built before any array exists, and it alone decides init `out_shardings`, step in/out
shardings, what is moved to the device for a step, what a checkpoint restores into, and every byte
count that is reported. No other file builds a sharding for state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from framework.layout.moves import fetch_leaf, store_leaf
from framework.layout.specs import (
    GROUPS,
    Group,
    MemoryKind,
    OptStateSpec,
    ParameterSpec,
    TensorSpec,
)
from framework.layout.trees import Nested, flatten


@dataclass(frozen=True)
class Leaf:
    """A row of the layout."""

    path: str
    group: Group
    spec: TensorSpec
    bytes_per_device: int


class StateLayout:
    """Where each leaf of the training state lives.

    Args:
        specs: nested dict; first level the groups, below it any pytree with TensorSpec leaves.
        mesh: the devices.

    Raises:
        ValueError: a mesh axis does not divide the dimension of a parameter that it shards.
    """

    def __init__(self, specs: Nested, mesh: Mesh):
        unknown_groups = set(specs) - set(GROUPS)
        assert not unknown_groups, f"unknown groups {unknown_groups}"
        self.mesh = mesh
        self.specs: Nested = jax.tree.map(self._fitting, specs)
        # Parameters first: an error about a dimension that does not divide then names the
        # parameter, not a moment of it.
        spec_by_path = flatten(self.specs)
        paths = sorted(spec_by_path, key=lambda path: GROUPS.index(_group(path)))
        self.leaves = [self._leaf(path, spec_by_path[path]) for path in paths]

    def _num_shards(self, axes: Any) -> int:
        """Returns the number of shards of a dimension with these mesh axes; 1 if replicated."""
        return math.prod(self.mesh.shape[name] for name in _axis_names(axes))

    def _fitting(self, spec: TensorSpec) -> TensorSpec:
        """Replicates the axes of an optimizer's leaf that the mesh does not divide.

        Such a leaf has its parameter's axes, but not always its sizes (a scale per block).
        """
        if not isinstance(spec, OptStateSpec):
            return spec
        fitting_axes = []
        for dim, axes in zip(spec.shape, spec.mesh_axes, strict=True):
            divides = dim % self._num_shards(axes) == 0
            fitting_axes.append(axes if divides else None)
        return replace(spec, mesh_axes=tuple(fitting_axes))

    def _leaf(self, path: str, spec: TensorSpec) -> Leaf:
        # Only parameters say what their axes are.
        roles = spec.roles if isinstance(spec, ParameterSpec) else ("axis",) * len(spec.shape)
        indivisible = spec.indivisible if isinstance(spec, ParameterSpec) else (1,) * len(spec.shape)
        shard_shape = []
        for dim, axes, role, run in zip(spec.shape, spec.mesh_axes, roles, indivisible, strict=True):
            num_shards = self._num_shards(axes)
            num_runs = dim // run
            if num_runs % num_shards:
                mesh_field = "*".join(_axis_names(axes))
                divisors = nearest_divisors(num_runs, num_shards)
                raise ValueError(
                    f"mesh.{mesh_field} = {num_shards} does not divide {role} = {num_runs} of {path}; "
                    f"nearest that do: {divisors}"
                )
            shard_shape.append(dim // num_shards)
        shard_bytes = math.prod(shard_shape) * spec.dtype.itemsize
        return Leaf(path, _group(path), spec, shard_bytes)

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self.leaves)

    @property
    def kept(self) -> Nested:
        """The specs of a checkpoint's leaves: everything but the buffers of hosted gradients."""
        return {group: specs for group, specs in self.specs.items() if group != "gradient"}

    def sharding(self, spec: TensorSpec) -> NamedSharding:
        """Returns the sharding of one leaf, memory kind included."""
        partition = PartitionSpec(*spec.mesh_axes)
        return NamedSharding(self.mesh, partition, memory_kind=spec.memory_kind)

    def shardings(self, specs: Any = None) -> Any:
        """Returns the tree of shardings, for jit's in_shardings and out_shardings."""
        specs = self.specs if specs is None else specs
        return jax.tree.map(self.sharding, specs)

    def abstract(self, specs: Any = None) -> Any:
        """Returns the tree of ShapeDtypeStructs with shardings.

        Ahead-of-time compilation and restoring take it in place of the arrays.
        """

        def abstract_array(spec: TensorSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self.sharding(spec))

        specs = self.specs if specs is None else specs
        return jax.tree.map(abstract_array, specs)

    def fetch(self, group: Group, tree: Any) -> Any:
        """Inside jit: moves a group's host leaves to the device, and leaves the others as they are.

        The move must be explicit, as arithmetic on a host array does not compile (mixed memory
        spaces), and must be decided here: a tracer does not know its sharding, so a move decided
        from the array silently does nothing.
        """
        return jax.tree.map(fetch_leaf, self.specs[group], tree)

    def store(self, group: Group, tree: Any) -> Any:
        """Inside jit: moves results to where the layout has them; the inverse of `fetch`."""
        return jax.tree.map(store_leaf, self.specs[group], tree)

    def check(self, state: Any) -> None:
        """Checks that a state is where the layout says.

        Compared are structure, shapes, dtypes, shardings and memory kinds.

        Raises:
            ValueError: the error names the first leaf that is elsewhere.
        """
        spec_by_path = flatten(self.specs)
        array_by_path = flatten(state)
        if spec_by_path.keys() != array_by_path.keys():
            differing_paths = sorted(spec_by_path.keys() ^ array_by_path.keys())
            raise ValueError(f"state and layout differ in leaves: {differing_paths[:8]}")
        for path, spec in spec_by_path.items():
            self._check_leaf(path, spec, array_by_path[path])

    def _check_leaf(self, path: str, spec: TensorSpec, array: jax.Array) -> None:
        layout_sharding = self.sharding(spec)
        if array.shape != spec.shape or array.dtype != spec.dtype:
            layout_type = f"{spec.dtype}{spec.shape}"
            raise ValueError(f"{path} is {array.dtype}{array.shape}; the layout says {layout_type}")
        sharding = array.sharding
        if sharding.memory_kind != spec.memory_kind:
            actual_kind = sharding.memory_kind
            raise ValueError(f"{path} is in {actual_kind}; the layout says {spec.memory_kind}")
        # Not equality: one sharding has many PartitionSpecs, as axes of size 1 make no difference.
        if not sharding.is_equivalent_to(layout_sharding, array.ndim):
            raise ValueError(f"{path} is sharded {sharding}; the layout says {layout_sharding}")

    def bytes_per_device(
        self,
        group: Group | None = None,
        memory_kind: MemoryKind | None = None,
    ) -> int:
        """Returns the bytes of a group and memory kind for one device; None means all of them.

        They are in the device's memory, or in its host's.
        """
        total = 0
        for leaf in self.leaves:
            if group in (None, leaf.group) and memory_kind in (None, leaf.spec.memory_kind):
                total += leaf.bytes_per_device
        return total

    def size(self, group: Group) -> int:
        """Returns the number of elements of a group."""
        return sum(leaf.spec.size for leaf in self.leaves if leaf.group == group)


def _axis_names(axes: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one dimension, of which a spec may name one, several or none."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _group(path: str) -> Any:
    return path.split("/", 1)[0]


def nearest_divisors(number: int, wish: int) -> list[int]:
    """Returns the divisors of `number` next to `wish`, below and above."""
    # Numbers up to 4096 are tried, which is enough for an axis of a mesh: a vocabulary may be huge.
    limit = min(number, 4096)
    divisors = [d for d in range(1, limit + 1) if number % d == 0]
    smaller = [d for d in divisors if d <= wish]
    larger = [d for d in divisors if d > wish]
    return smaller[-1:] + larger[:1]
