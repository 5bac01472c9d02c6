"""Layout: one table for everything that training keeps.

Here live the specs (`TensorSpec`, `ParameterSpec`, `OptStateSpec`), and `StateLayout`, which maps each leaf of the
training state to shape, dtype, PartitionSpec, memory kind and group. It is built before any array exists, and it alone
decides init `out_shardings`, step in/out shardings, what is moved to the device for a step, what a checkpoint restores
into, and every byte count that is reported. No other file builds a sharding for state.

May import: jax and numpy only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MemoryKind = Literal["device", "pinned_host"]
Group = Literal["parameter", "frozen", "buffer", "optimizer", "ema", "counter", "gradient"]
GROUPS: tuple[Group, ...] = ("parameter", "frozen", "buffer", "optimizer", "ema", "counter", "gradient")
MeshAxes = tuple[str | tuple[str, ...] | None, ...]
Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Nested = dict[str, Any]  # a nested dict whose leaves are specs or arrays
_Spec = TypeVar("_Spec", bound="TensorSpec")


@dataclass(frozen=True)
class TensorSpec:
    """One array of the training state.

    Args:
        shape: the logical (global, unsharded) shape.
        dtype: anything that `jnp.dtype` accepts.
        mesh_axes: per dimension the mesh axis, tuple of axes, or None (replicated), as in a PartitionSpec.
        memory_kind: where the leaf lives between steps.
    """

    shape: tuple[int, ...]
    dtype: Any
    mesh_axes: MeshAxes = ()
    memory_kind: MemoryKind = "device"

    def __post_init__(self):
        if not self.mesh_axes:
            object.__setattr__(self, "mesh_axes", (None,) * len(self.shape))
        assert len(self.mesh_axes) == len(self.shape), f"mesh_axes {self.mesh_axes} do not match shape {self.shape}"
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Logical bytes, all shards together, each counted once."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterSpec(TensorSpec):
    """A parameter as its layer declares it.

    Args:
        initializer: `(key, shape, dtype) -> array`; called per layer for a stacked parameter.
        roles: what each axis is: "layer", "in", "out", "heads", "vocab", "position", "channel", ...
        num_heads: how many heads the axis of the role "heads" has, in queries and keys, where each stands by itself.
        trainable: whether it learns; otherwise it is frozen, as a rule of the learner would.
        own_dtype: the model's `param_dtype` does not apply.
        quantized: one of several leaves that store a weight (codes, scales). No layer casts them, and they share a key,
            that of the path above them, so that all are made of one draw.
    """

    initializer: Initializer = field(default=jax.nn.initializers.zeros, compare=False)
    roles: tuple[str, ...] = ()
    num_heads: int | None = None
    trainable: bool = True
    own_dtype: bool = False
    quantized: bool = False

    def __post_init__(self):
        super().__post_init__()
        assert len(self.roles) == len(self.shape), f"roles {self.roles} do not match shape {self.shape}"

    def stacked(self, length: int) -> ParameterSpec:
        """The same parameter for `length` layers: a leading "layer" axis, never sharded, initialized layer by layer."""
        return replace(
            self,
            shape=(length, *self.shape),
            mesh_axes=(None, *self.mesh_axes),
            roles=("layer", *self.roles),
        )

    @property
    def num_layers(self) -> int | None:
        """How many layers it is stacked for, None for a single parameter."""
        return self.shape[0] if self.roles[:1] == ("layer",) else None

    def draw(self, key: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """Its first value, or that of one layer of a stacked parameter."""
        if self.num_layers is None:
            return self.initializer(key, self.shape, self.dtype)

        def one(layer: jax.Array) -> jax.Array:
            return self.initializer(jax.random.fold_in(key, layer), self.shape[1:], self.dtype)

        return jax.vmap(one)(jnp.arange(self.num_layers)) if layer is None else one(layer)


@dataclass(frozen=True)
class OptStateSpec(TensorSpec):
    """A leaf of an optimizer's state. `owner` is the path of the parameter it belongs to, None for a counter."""

    owner: str | None = None


# --- paths -----------------------------------------------------------------------------------------------------------


def key_name(key: Any) -> str:
    """The name of one pytree key: dict key, index, or attribute."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown pytree key {key!r}")


def path_name(keypath: tuple[Any, ...]) -> str:
    """A leaf's stable name: its pytree keys joined by "/"."""
    return "/".join(key_name(key) for key in keypath)


def flatten(tree: Any) -> dict[str, Any]:
    """Any pytree as {path: leaf}, in the tree's own order."""
    return {path_name(keypath): leaf for keypath, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(flat: dict[str, Any]) -> Nested:
    """{path: leaf} as nested dicts."""
    tree: Nested = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def merge(left: Any, right: Any) -> Any:
    """Two trees of dicts (and lists) with disjoint leaves as one: trainable and frozen parameters, say."""
    if isinstance(left, list) and isinstance(right, list):
        return [merge(a, b) for a, b in zip(left, right, strict=True)]
    if isinstance(left, dict) and isinstance(right, dict):
        shared = {key: merge(left[key], right[key]) for key in left.keys() & right.keys()}
        return {**left, **right, **shared}
    raise AssertionError("merge: a leaf is in both trees")


def copy_partition(specs: Any, *, pattern: str, memory_kind: MemoryKind) -> Any:
    """Re-tags every spec whose path matches `pattern` (a regex, `re.search`) with `memory_kind`.

    Works on trees of ParameterSpec, OptStateSpec or TensorSpec, and can be applied again with another pattern.

    Raises:
        ValueError: the pattern matches no path.
    """
    paths = list(flatten(specs))
    matched = [path for path in paths if re.search(pattern, path)]
    if not matched:
        raise ValueError(f"copy_partition: pattern {pattern!r} matches none of {len(paths)} paths, such as {paths[:3]}")
    return jax.tree_util.tree_map_with_path(
        lambda keypath, spec: (
            replace(spec, memory_kind=memory_kind) if re.search(pattern, path_name(keypath)) else spec
        ),
        specs,
    )


# --- the table -------------------------------------------------------------------------------------------------------


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


def fetch_leaf(spec: TensorSpec, x: jax.Array) -> jax.Array:
    """Inside jit: an array, or a part of it, of a leaf, on the device. See `StateLayout.fetch`."""
    return x if spec.memory_kind == "device" else jax.device_put(x, jax.memory.Space.Device)


def fetch_tree(specs: dict[str, Any], tree: Any) -> Any:
    """`fetch_leaf` of nested dicts, or of a part of them; `specs`, or what else has a memory_kind, by path."""
    return jax.tree_util.tree_map_with_path(lambda keypath, x: fetch_leaf(specs[path_name(keypath)], x), tree)


def store_leaf(spec: TensorSpec, x: jax.Array) -> jax.Array:
    """Inside jit: the inverse of `fetch_leaf`."""
    return x if spec.memory_kind == "device" else jax.device_put(x, jax.memory.Space.Host)


def nearest_divisors(number: int, wish: int) -> list[int]:
    """The divisors of `number` next to `wish`, below and above."""
    divisors = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    below, above = [d for d in divisors if d <= wish], [d for d in divisors if d > wish]
    return below[-1:] + above[:1]


def move_to_host(specs: Any, memory_kind: MemoryKind, *, stacked: bool = False, min_bytes: int = 1 << 20) -> Any:
    """Tags the specs of a tree with `memory_kind`, all but vectors, scalars and leaves under `min_bytes`.

    Those stay on the device: they cost next to nothing there, and TPU cannot slice packed one-dimensional host arrays.

    Args:
        specs: any tree of TensorSpec.
        memory_kind: the tag.
        stacked: the leading axis counts layers; what is left then decides whether a leaf is a vector.
        min_bytes: of the whole leaf.
    """

    def tagged(spec: TensorSpec) -> TensorSpec:
        dims = [dim for dim in spec.shape[stacked:] if dim > 1]
        return replace(spec, memory_kind=memory_kind) if len(dims) >= 2 and spec.num_bytes >= min_bytes else spec

    return jax.tree.map(tagged, specs)


def initialize(specs: Nested, key: jax.Array, layer: jax.Array | None = None) -> Nested:
    """Parameters from their specs; each key is folded in by the parameter's path, so a new sibling changes no other.

    Args:
        specs: nested dict of ParameterSpec.
        key: a typed PRNG key.
        layer: of stacked parameters, this layer's only, without the leading axis.
    """

    def draw(keypath: tuple[Any, ...], spec: ParameterSpec) -> jax.Array:
        return spec.draw(fold_in_name(key, path_name(keypath[:-1] if spec.quantized else keypath)), layer)

    return jax.tree_util.tree_map_with_path(draw, specs)


def name_hash(name: str) -> int:
    """A 32-bit number for a string that does not change between processes and versions (FNV-1a)."""
    digest = 2166136261
    for byte in name.encode():
        digest = (digest ^ byte) * 16777619 & 0xFFFFFFFF
    return digest


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
    """Folds a string into a key."""
    return jax.random.fold_in(key, np.uint32(name_hash(name)))
