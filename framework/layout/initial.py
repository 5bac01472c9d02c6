"""First values of parameters: a key for each, by its path."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from framework.layout.specs import ParameterSpec
from framework.layout.trees import Nested, path_name


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
