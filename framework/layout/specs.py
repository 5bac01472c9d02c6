"""Specs, which describe arrays of the training state before the arrays exist, and the transfers that they cause."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from plimsoll.framework.layout.trees import PyTree, flatten, path_name

MemoryKind = Literal["device", "pinned_host"]
# The mesh axis or axes over which a dimension is sharded; None if it is replicated.
MeshAxis = str | tuple[str, ...] | None
MeshAxes = tuple[MeshAxis, ...]  # one for each dimension
# The mesh axes whose devices share a weight, and gather it to use it. Layers declare the first one. Experts declare
# "expert" for another dimension, and are not gathered over it.
WEIGHT_AXES = ("fsdp", "seq", "expert")
Initializer = Callable[[jax.Array, tuple[int, ...], np.dtype], jax.Array]


@dataclass(frozen=True)
class TensorSpec:
    """The spec of one array of the training state.

    Args:
        shape: the logical (global, unsharded) shape.
        dtype: anything that `jnp.dtype` accepts.
        mesh_axes: per dimension the mesh axis, tuple of axes, or None (replicated), as in a PartitionSpec. A layout
            shards a dimension with the axis "fsdp" over other axes too, see `fit_axes`.
        memory_kind: memory in which the leaf is stored between steps.
    """

    shape: tuple[int, ...]
    dtype: Any
    mesh_axes: MeshAxes = ()
    memory_kind: MemoryKind = "device"

    def __post_init__(self):
        # A frozen dataclass rejects assignments to itself, hence object's __setattr__.
        if not self.mesh_axes:
            replicated = (None,) * len(self.shape)
            object.__setattr__(self, "mesh_axes", replicated)
        matches = len(self.mesh_axes) == len(self.shape)
        assert matches, f"mesh_axes {self.mesh_axes} do not match shape {self.shape}"
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the logical bytes of all shards together; copies of a shard are not counted."""
        return self.size * self.dtype.itemsize

    @property
    def is_offloaded(self) -> bool:
        """Return whether the leaf is stored in host memory."""
        return self.memory_kind != "device"

    @property
    def run_counts(self) -> tuple[int, ...]:
        """Return for each axis the number of elements, or of runs of elements that no mesh may split."""
        return self.shape


@dataclass(frozen=True)
class ParameterSpec(TensorSpec):
    """The spec of a parameter, as its layer declares it.

    Args:
        initializer: `(key, shape, dtype) -> array`; called per layer for a stacked parameter.
        roles: the meaning of each axis: "layer", "in", "out", "heads", "vocab", "position", "label", "channel", ...
        num_heads: number of heads on the axis with the role "heads", in queries and keys whose heads are independent.
        trainable: whether the parameter is trained; otherwise it is frozen, as by a rule of the learner.
        keeps_dtype: whether the parameter keeps its own dtype; the model's `param_dtype` then does not apply.
        quantized: whether the leaf is one of several that store a weight (codes, scales). No layer casts such leaves.
            They share the key of the path above them, so that all come from one draw.
        gathered_as_fp8: whether devices exchange the weight as 8-bit floats when they gather it. Its product
            rounds it in the same way, see `framework.layers.low_precision`.
        is_history: whether it records what the steps found, such as the scales of 8-bit arrays, instead of being
            optimized: neither rules of the learner nor clipping apply, and it is never cast.
        indivisible: for each axis, how many consecutive elements belong together, so that no mesh may split them; ()
            means one.
    """

    initializer: Initializer = field(default=jax.nn.initializers.zeros, compare=False)
    roles: tuple[str, ...] = ()
    num_heads: int | None = None
    trainable: bool = True
    keeps_dtype: bool = False
    quantized: bool = False
    gathered_as_fp8: bool = False
    is_history: bool = False
    indivisible: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if not self.indivisible:
            object.__setattr__(self, "indivisible", (1,) * len(self.shape))
        matches = len(self.roles) == len(self.shape)
        assert matches, f"roles {self.roles} do not match shape {self.shape}"

    @property
    def run_counts(self) -> tuple[int, ...]:
        """Return for each axis the number of runs of elements that no mesh may split."""
        return tuple(dim // run for dim, run in zip(self.shape, self.indivisible, strict=True))

    def stacked(self, length: int, mesh_axis: str | None = None) -> ParameterSpec:
        """Return the spec of the same parameter for `length` layers.

        It has a leading "layer" axis, sharded over `mesh_axis`, and is initialized layer by layer.
        """
        return replace(
            self,
            shape=(length, *self.shape),
            mesh_axes=(mesh_axis, *self.mesh_axes),
            roles=("layer", *self.roles),
            indivisible=(1, *self.indivisible),
        )

    @property
    def num_layers(self) -> int | None:
        """Return the number of stacked layers; None for a parameter that is not stacked."""
        is_stacked = self.roles[:1] == ("layer",)
        return self.shape[0] if is_stacked else None

    def draw(self, key: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """Initialize the parameter, or one layer of a stacked parameter."""
        if self.num_layers is None:
            return self.initializer(key, self.shape, self.dtype)

        # Layer by layer, because the variance of most initializers depends on the shape of a layer.
        def one(layer: jax.Array) -> jax.Array:
            layer_key = jax.random.fold_in(key, layer)
            return self.initializer(layer_key, self.shape[1:], self.dtype)

        if layer is not None:
            return one(layer)
        return jax.vmap(one)(jnp.arange(self.num_layers))


@dataclass(frozen=True)
class OptStateSpec(TensorSpec):
    """The spec of a leaf of an optimizer's state.

    Args:
        owner: path of the parameter that the leaf belongs to; None for a counter.
        counts_updates: whether the leaf is the number of updates so far, which is equal in all layers that are
            updated together. Such a leaf is an integer scalar for each layer.
    """

    owner: str | None = None
    counts_updates: bool = False

    def __post_init__(self):
        super().__post_init__()
        is_shared_integer = self.owner is None and jnp.issubdtype(self.dtype, jnp.integer)
        assert is_shared_integer or not self.counts_updates, f"no number of updates: {self}"


def axis_names(axes: MeshAxis) -> tuple[str, ...]:
    """Return the mesh axes of one dimension: a spec may name none, one or several."""
    return (axes,) if isinstance(axes, str) else axes or ()


def count_shards(axes: MeshAxis, sizes: Mapping[str, int]) -> int:
    """Return the number of shards of a dimension with these mesh axes; 1 if it is replicated.

    Args:
        axes: the mesh axes.
        sizes: {mesh axis: size} for all mesh axes.
    """
    return math.prod(sizes[name] for name in axis_names(axes))


def fit_axes(mesh_axes: MeshAxes, counts: Sequence[int], sizes: Mapping[str, int]) -> MeshAxes:
    """Return the mesh axes over which a mesh of these sizes shards an array.

    These are the declared ones, with further WEIGHT_AXES beside "fsdp" where they divide the dimension. So devices that
    have different tokens store different shards of the weights.

    Args:
        mesh_axes: the declared mesh axes of each dimension.
        counts: size of each dimension, see `TensorSpec.run_counts`.
        sizes: {mesh axis: size} for all mesh axes.
    """
    declared, *further_axes = WEIGHT_AXES
    if declared not in mesh_axes:
        return mesh_axes
    # An axis of one device changes nothing, and an array cannot name an axis twice.
    used_axes = {name for axes in mesh_axes for name in axis_names(axes)}
    free_axes = [axis for axis in further_axes if sizes.get(axis, 1) > 1 and axis not in used_axes]
    fitted: list[MeshAxis] = []
    for axes, count in zip(mesh_axes, counts, strict=True):
        if axes == declared:
            for axis in free_axes:
                wider = (*axis_names(axes), axis)
                if count % count_shards(wider, sizes) == 0:
                    axes = wider
        fitted.append(axes)
    return tuple(fitted)


def find_gathered_axes(axes: MeshAxis) -> tuple[str, ...]:
    """Return the mesh axes over which one dimension of a weight is gathered to use it."""
    names = axis_names(axes)
    if WEIGHT_AXES[0] not in names:
        return ()
    return tuple(name for name in names if name in WEIGHT_AXES)


@dataclass(frozen=True)
class WeightShards:
    """The shards of a weight that devices gather to use it.

    Attributes:
        dimension: the dimension that is divided.
        axes: the mesh axes that it is divided over, some of WEIGHT_AXES.
    """

    dimension: int
    axes: tuple[str, ...]


def find_weight_shards(stored_axes: MeshAxes, sizes: Mapping[str, int]) -> list[WeightShards]:
    """Return the dimensions of a weight that a mesh of these sizes divides over WEIGHT_AXES.

    Args:
        stored_axes: mesh axes of the weight as it is stored, see `fit_axes`.
        sizes: {mesh axis: size} for all mesh axes.
    """
    shards: list[WeightShards] = []
    for dimension, axes in enumerate(stored_axes):
        names = tuple(name for name in find_gathered_axes(axes) if sizes[name] > 1)
        if names:
            shards.append(WeightShards(dimension, names))
    return shards


def copy_partition(specs: PyTree, *, pattern: str, memory_kind: MemoryKind) -> PyTree:
    """Set the memory kind of every spec whose path matches `pattern` (a regex, `re.search`).

    Works on trees of ParameterSpec, OptStateSpec or TensorSpec, and can be applied again with another pattern.

    Args:
        specs: any tree of specs.
        pattern: a regex, searched in the paths of the specs.
        memory_kind: the memory kind to set.

    Raises:
        ValueError: the pattern matches no path.
    """
    spec_by_path = flatten(specs)
    paths = list(spec_by_path)
    # A pattern that matches nothing is a typo, which would otherwise only show as running out of memory.
    if not any(re.search(pattern, path) for path in paths):
        problem = f"matches none of {len(paths)} paths, such as {paths[:3]}"
        raise ValueError(f"copy_partition: pattern {pattern!r} {problem}")
    tagged = []
    for path, spec in spec_by_path.items():
        tagged.append(replace(spec, memory_kind=memory_kind) if re.search(pattern, path) else spec)
    return jax.tree.unflatten(jax.tree.structure(specs), tagged)


def move_to_host(specs: PyTree, memory_kind: MemoryKind, *, stacked: bool = False, min_bytes: int = 1 << 20) -> PyTree:
    """Set the memory kind of all specs of a tree, except those of vectors, scalars and small leaves.

    These stay on the device: they cost next to nothing there, and TPU cannot slice packed one-dimensional host
    arrays.

    Args:
        specs: any tree of TensorSpec.
        memory_kind: the memory kind to set.
        stacked: whether the leading axis counts layers; the other axes then decide whether a leaf is a vector.
        min_bytes: a leaf with fewer bytes in total stays on the device.
    """

    def tag(spec: TensorSpec) -> TensorSpec:
        # `stacked`, used as a number, skips the leading axis.
        dims = [dim for dim in spec.shape[stacked:] if dim > 1]
        if len(dims) >= 2 and spec.num_bytes >= min_bytes:
            return replace(spec, memory_kind=memory_kind)
        return spec

    return jax.tree.map(tag, specs)


# --- transfers between device and host memory, inside jit ------------------------------------------------------------


def fetch_leaf(spec: TensorSpec, x: jax.Array) -> jax.Array:
    """Inside jit: move a leaf's array, or a part of it, to the device. See `StateLayout.fetch`."""
    # Decided by the spec, because a tracer does not know where its array is.
    if not spec.is_offloaded:
        return x
    return jax.device_put(x, jax.memory.Space.Device)


def fetch_tree(specs: Mapping[str, TensorSpec], tree: PyTree) -> PyTree:
    """Inside jit: apply `fetch_leaf` to nested dicts, or to a part of them.

    Args:
        specs: {path: TensorSpec}.
        tree: arrays, at paths that are in `specs`.
    """
    return jax.tree_util.tree_map_with_path(lambda keypath, x: fetch_leaf(specs[path_name(keypath)], x), tree)


def store_leaf(spec: TensorSpec, x: jax.Array) -> jax.Array:
    """Inside jit: move a leaf's array to the memory of its spec; the inverse of `fetch_leaf`."""
    if not spec.is_offloaded:
        return x
    return jax.device_put(x, jax.memory.Space.Host)


def get_current_mesh(mesh: Mesh) -> Mesh | AbstractMesh:
    """Return a mesh as JAX requires it at this place: inside `shard_map`, with its manual axes marked as such."""
    current = jax.sharding.get_abstract_mesh()
    return current if current.manual_axes else mesh


def constrain_row_major(x: jax.Array, axes: MeshAxes, mesh: Mesh) -> jax.Array:
    """Inside jit: constrain one layer's array to the row-major layout of the stacks.

    XLA for TPU prefers some weights transposed, and would transpose the whole stack before a loop that reads it, or
    after one that writes it. With this constraint it transposes only one layer's slice. Stacks of shards with narrow
    rows are exempt: TPU stores them in another layout itself, to avoid padding to tiles of 128.

    Args:
        x: the array, without the stack's leading axis.
        axes: the mesh axes of its dimensions.
        mesh: the device mesh of the layout.
    """
    if x.ndim < 2:
        return x

    def row_major(shard: jax.Array) -> jax.Array:
        if shard.shape[-1] % 128:
            return shard
        return with_layout_constraint(shard, Layout(tuple(range(shard.ndim))))

    if mesh.size == 1 or not any(axes):
        return row_major(x)
    # Applied per shard: the partitioner cannot split the constraint, and would all-gather the weight for it.
    spec = PartitionSpec(*axes)
    return jax.shard_map(row_major, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
