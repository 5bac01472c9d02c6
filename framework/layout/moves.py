"""Transfers between device and host memory, inside jit."""

from __future__ import annotations

from typing import Any

import jax

from framework.layout.specs import TensorSpec
from framework.layout.trees import path_name


def fetch_leaf(spec: TensorSpec, x: jax.Array) -> jax.Array:
    """Inside jit: an array, or a part of it, of a leaf, on the device. See `StateLayout.fetch`."""
    return x if spec.memory_kind == "device" else jax.device_put(x, jax.memory.Space.Device)


def fetch_tree(specs: dict[str, Any], tree: Any) -> Any:
    """`fetch_leaf` of nested dicts, or of a part of them; `specs`, or what else has a memory_kind, by path."""
    return jax.tree_util.tree_map_with_path(lambda keypath, x: fetch_leaf(specs[path_name(keypath)], x), tree)


def store_leaf(spec: TensorSpec, x: jax.Array) -> jax.Array:
    """Inside jit: the inverse of `fetch_leaf`."""
    return x if spec.memory_kind == "device" else jax.device_put(x, jax.memory.Space.Host)
