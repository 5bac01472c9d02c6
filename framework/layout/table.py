"""The layout: one table for everything that training keeps.

`StateLayout` maps each leaf of the training state to shape, dtype, PartitionSpec, memory kind and group. It is built
before any array exists, and it alone decides init `out_shardings`, step in/out shardings, what is moved to the device
for a step, what a checkpoint restores into, and every byte count that is reported. No other file builds a sharding for
state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from framework.layout.moves import fetch_leaf, store_leaf
from framework.layout.specs import GROUPS, Group, MemoryKind, OptStateSpec, ParameterSpec, TensorSpec
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
        unknown = set(specs) - set(GROUPS)
        assert not unknown, f"unknown groups {unknown}"
        self.mesh = mesh
        self.specs: Nested = jax.tree.map(self._fitting, specs)
        # Parameters first: a dimension that does not divide is named by the parameter, not by a moment of it.
        in_order = sorted(flatten(self.specs).items(), key=lambda item: GROUPS.index(_group(item[0])))
        self.leaves = [self._leaf(path, spec) for path, spec in in_order]

    def _parts(self, axes: Any) -> tuple[tuple[str, ...], int]:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return names, math.prod(self.mesh.shape[name] for name in names)

    def _fitting(self, spec: TensorSpec) -> TensorSpec:
        """An optimizer's leaf has its parameter's axes, but not always its sizes (a scale per block): an axis that the
        mesh does not divide is replicated."""
        if not isinstance(spec, OptStateSpec):
            return spec
        axes = zip(spec.shape, spec.mesh_axes, strict=True)
        return replace(spec, mesh_axes=tuple(None if dim % self._parts(one)[1] else one for dim, one in axes))

    def _leaf(self, path: str, spec: TensorSpec) -> Leaf:
        shard = []
        roles = spec.roles if isinstance(spec, ParameterSpec) else ("axis",) * len(spec.shape)
        for dim, axes, role in zip(spec.shape, spec.mesh_axes, roles, strict=True):
            names, parts = self._parts(axes)
            if dim % parts:
                raise ValueError(
                    f"mesh.{'*'.join(names)} = {parts} does not divide {role} = {dim} of {path}; "
                    f"nearest that do: {nearest_divisors(dim, parts)}"
                )
            shard.append(dim // parts)
        return Leaf(path, _group(path), spec, math.prod(shard) * spec.dtype.itemsize)

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self.leaves)

    @property
    def kept(self) -> Nested:
        """The specs of what a checkpoint holds: everything but the buffers of hosted gradients."""
        return {group: specs for group, specs in self.specs.items() if group != "gradient"}

    def sharding(self, spec: TensorSpec) -> NamedSharding:
        """The sharding of one leaf, memory kind included."""
        return NamedSharding(self.mesh, PartitionSpec(*spec.mesh_axes), memory_kind=spec.memory_kind)

    def shardings(self, specs: Any = None) -> Any:
        """The tree of shardings: for jit's in_shardings and out_shardings."""
        return jax.tree.map(self.sharding, self.specs if specs is None else specs)

    def abstract(self, specs: Any = None) -> Any:
        """The tree of ShapeDtypeStructs with shardings: for ahead-of-time compilation and for restoring."""
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self.sharding(spec)),
            self.specs if specs is None else specs,
        )

    def fetch(self, group: Group, tree: Any) -> Any:
        """Inside jit: a group's host leaves on the device, the others as they are.

        The move must be explicit, as arithmetic on a host array does not compile (mixed memory spaces), and must be
        decided here: a tracer does not know its sharding, so a move decided from the array silently does nothing.
        """
        return jax.tree.map(fetch_leaf, self.specs[group], tree)

    def store(self, group: Group, tree: Any) -> Any:
        """Inside jit: the inverse of `fetch`, for results on their way out."""
        return jax.tree.map(store_leaf, self.specs[group], tree)

    def check(self, state: Any) -> None:
        """Asserts that a state is where the layout says: structure, shapes, dtypes, shardings and memory kinds.

        Raises:
            ValueError: naming the first leaf that is elsewhere.
        """
        expected, actual = flatten(self.specs), flatten(state)
        if expected.keys() != actual.keys():
            raise ValueError(f"state and layout differ in leaves: {sorted(expected.keys() ^ actual.keys())[:8]}")
        for path, spec in expected.items():
            array = actual[path]
            sharding = self.sharding(spec)
            if array.shape != spec.shape or array.dtype != spec.dtype:
                raise ValueError(f"{path} is {array.dtype}{array.shape}; the layout says {spec.dtype}{spec.shape}")
            if array.sharding.memory_kind != spec.memory_kind:
                raise ValueError(f"{path} is in {array.sharding.memory_kind}; the layout says {spec.memory_kind}")
            if not array.sharding.is_equivalent_to(sharding, array.ndim):
                raise ValueError(f"{path} is sharded {array.sharding}; the layout says {sharding}")

    def bytes_per_device(self, group: Group | None = None, memory_kind: MemoryKind | None = None) -> int:
        """Bytes that one device holds (or has in its host's memory) of a group and memory kind; None means all."""
        return sum(
            leaf.bytes_per_device
            for leaf in self.leaves
            if group in (None, leaf.group) and memory_kind in (None, leaf.spec.memory_kind)
        )

    def size(self, group: Group) -> int:
        """Number of elements of a group."""
        return sum(leaf.spec.size for leaf in self.leaves if leaf.group == group)


def _group(path: str) -> Any:
    return path.split("/", 1)[0]


def nearest_divisors(number: int, wish: int) -> list[int]:
    """The divisors of `number` next to `wish`, below and above."""
    divisors = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    below, above = [d for d in divisors if d <= wish], [d for d in divisors if d > wish]
    return below[-1:] + above[:1]
