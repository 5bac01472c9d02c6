"""Predicates for the leaves of any pytree: arrays, float arrays, or other leaves such as activation functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array or the shape of one; Python's own numbers are neither."""
    return isinstance(leaf, _ARRAY_TYPES)


def is_float(leaf: Any) -> bool:
    """Return whether a leaf is an array of real or complex floats, which has a gradient."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_real_float(leaf: Any) -> bool:
    """Return whether a leaf is an array of real floats."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed keys (jax.random.key), or the spec of one."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
