"""First values of parameters: a key for each, by its path."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from framework.layout.specs import ParameterSpec
from framework.layout.trees import Nested, path_name


def initialize(specs: Nested, key: jax.Array, layer: jax.Array | None = None) -> Nested:
    """Draws parameters from their specs.

    Each parameter's path is folded into the key, so that a new sibling changes no other parameter.

    Args:
        specs: nested dict of ParameterSpec.
        key: a typed PRNG key.
        layer: draws only this layer of stacked parameters, without the leading axis; None draws
            all.
    """

    def draw(keypath: tuple[Any, ...], spec: ParameterSpec) -> jax.Array:
        # Codes and scales of a quantized weight share a key, so that all come from one draw.
        key_path = keypath[:-1] if spec.quantized else keypath
        parameter_key = fold_in_name(key, path_name(key_path))
        return spec.draw(parameter_key, layer)

    return jax.tree_util.tree_map_with_path(draw, specs)


def name_hash(name: str) -> int:
    """Hashes a string to 32 bits by FNV-1a.

    The hash is the same in all processes and versions, which Python's own hash is not.
    """
    digest = 2166136261
    for byte in name.encode():
        digest ^= byte
        digest = digest * 16777619 & 0xFFFFFFFF
    return digest


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
    """Folds a string into a key."""
    return jax.random.fold_in(key, np.uint32(name_hash(name)))
