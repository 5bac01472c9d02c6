"""Initialization of parameters, with a PRNG key for each, derived from its path."""

from __future__ import annotations

import jax
import numpy as np

from plimsoll.framework.layout.trees import Nested, path_name


def initialize(specs: Nested, key: jax.Array, layer: jax.Array | None = None) -> Nested:
    """Initialize parameters from their specs.

    Each parameter's path is folded into the key, so that a new sibling changes no other parameter.

    Args:
        specs: nested dict of ParameterSpec.
        key: a typed PRNG key.
        layer: initialize only this layer of stacked parameters, without the leading axis; None initializes all
            layers.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(specs)
    arrays = []
    for keypath, spec in leaves:
        # Codes and scales of a quantized weight share a key, so that all come from one draw.
        key_path = keypath[:-1] if spec.quantized else keypath
        parameter_key = fold_in_name(key, path_name(key_path))
        arrays.append(spec.draw(parameter_key, layer))
    return jax.tree.unflatten(structure, arrays)


def name_hash(name: str) -> int:
    """Hash a string to 32 bits with FNV-1a.

    Unlike Python's own hash, this one is the same in all processes and versions.
    """
    digest = 2166136261
    for byte in name.encode():
        digest ^= byte
        digest = digest * 16777619 & 0xFFFFFFFF
    return digest


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
    """Fold a string into a key."""
    return jax.random.fold_in(key, np.uint32(name_hash(name)))
