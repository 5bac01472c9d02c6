"""An array that is stored in parts along its first axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


class _Split:
    """The properties of the whole array, from its parts along the first axis."""

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole array."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of all parts."""
        return self.parts[0].dtype

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class SplitSpec(_Split):
    """The spec of a `SplitArray`: a leaf of an abstract state, not a pytree.

    Attributes:
        parts: specs of the parts, with shardings.
    """

    parts: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Return the sharding of the whole array in host memory."""
        return self.parts[0].sharding.with_memory_kind("pinned_host")

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """Return the spec of the whole array in host memory."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def astype(self, dtype: np.dtype) -> SplitSpec:
        """Return the spec with another dtype."""
        return SplitSpec(tuple(jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding) for x in self.parts))


@dataclass(frozen=True, eq=False)
class SplitArray(_Split):
    """An array whose first axis is stored in parts, such as the weights of a stack with separate layers.

    It is a leaf of a tree, not a pytree, and has the properties of the whole array.

    Attributes:
        parts: arrays [n, ...], in order, with the same sharding of all other axes; the first axis is not sharded.
    """

    parts: tuple[jax.Array, ...]

    @property
    def nbytes(self) -> int:
        """Return the logical bytes of all shards together; copies of a shard are not counted."""
        return self.size * self.dtype.itemsize

    def delete(self) -> None:
        """Delete all parts."""
        for part in self.parts:
            part.delete()
