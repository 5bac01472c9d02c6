"""Specs: what is known of an array of the training state before it exists."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from framework.layout.trees import flatten, path_name

MemoryKind = Literal["device", "pinned_host"]
Group = Literal["parameter", "frozen", "buffer", "optimizer", "ema", "counter", "gradient"]
GROUPS: tuple[Group, ...] = ("parameter", "frozen", "buffer", "optimizer", "ema", "counter", "gradient")
MeshAxes = tuple[str | tuple[str, ...] | None, ...]
Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


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
