"""Transfers between device and host memory, inside jit."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from plimsoll.framework.layout.specs import TensorSpec
from plimsoll.framework.layout.trees import PyTree, path_name


def fetch_leaf(spec: TensorSpec, x: jax.Array) -> jax.Array:
    """Inside jit: move a leaf's array, or a part of it, to the device. See `StateLayout.fetch`."""
    # Decided by the spec, because a tracer does not know where its array is.
    if spec.memory_kind == "device":
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
    if spec.memory_kind == "device":
        return x
    return jax.device_put(x, jax.memory.Space.Host)
