"""Trees of dicts and their leaves' paths: "stack/block0/norm/scale"."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Nested = dict[str, Any]  # a nested dict whose leaves are specs or arrays


def key_name(key: Any) -> str:
    """Returns the name of one pytree key: dict key, index, or attribute. Raises TypeError."""
    # jax has a class of keys for each kind of node, and each class its own attribute.
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown pytree key {key!r}")


def path_name(keypath: tuple[Any, ...]) -> str:
    """Returns a leaf's stable name: its pytree keys joined by "/"."""
    return "/".join(key_name(key) for key in keypath)


def flatten(tree: Any) -> dict[str, Any]:
    """Returns any pytree as {path: leaf}, in the tree's own order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(keypath): leaf for keypath, leaf in leaves}


def unflatten(flat: dict[str, Any]) -> Nested:
    """Returns {path: leaf} as nested dicts."""
    tree: Nested = {}
    for path, leaf in flat.items():
        *parent_names, leaf_name = path.split("/")
        node = tree
        for name in parent_names:
            node = node.setdefault(name, {})
        node[leaf_name] = leaf
    return tree


def merge(left: Any, right: Any) -> Any:
    """Merges two trees of dicts (and lists) with disjoint leaves.

    Trainable and frozen parameters are such trees.

    Raises AssertionError: a leaf is in both trees.
    """
    if isinstance(left, list) and isinstance(right, list):
        pairs = zip(left, right, strict=True)
        return [merge(left_item, right_item) for left_item, right_item in pairs]
    if isinstance(left, dict) and isinstance(right, dict):
        shared = {key: merge(left[key], right[key]) for key in left.keys() & right.keys()}
        return {**left, **right, **shared}
    raise AssertionError("merge: a leaf is in both trees")


def floats(tree: Any) -> Any:
    """The tree with None in place of what has no gradient: integers, booleans, keys, and their cotangents."""

    # The cotangent of an integer has the dtype float0, which is no float to `issubdtype`.
    def float_or_none(x: Any) -> Any:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else None

    return jax.tree.map(float_or_none, tree)


def filled(part: Any, tree: Any) -> Any:
    """The inverse of `floats`: `tree` with those of its leaves replaced that are not None in `part`."""

    def replaced(new: Any, old: Any) -> Any:
        return old if new is None else new

    # None counts as a leaf, so that both trees have the same structure.
    return jax.tree.map(replaced, part, tree, is_leaf=lambda x: x is None)
