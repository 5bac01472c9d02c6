"""Nested dicts, and the paths of their leaves, such as "stack/block0/norm/scale"."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

# A pytree whose structure Python's types cannot describe: any nesting of containers with arrays or specs as leaves.
PyTree: TypeAlias = Any
# A nested dict with arrays or specs as leaves, such as the weights of a model.
Nested: TypeAlias = dict[str, PyTree]


def key_name(key: object) -> str:
    """Return the name of one pytree key: dict key, index, or attribute.

    Raises:
        TypeError: the key is of an unknown class.
    """
    # JAX has a class of keys for each kind of node, and each class has its own attribute.
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown pytree key {key!r}")


def path_name(keypath: tuple[object, ...]) -> str:
    """Return a leaf's stable name: its pytree keys joined by "/"."""
    return "/".join(key_name(key) for key in keypath)


def flatten(tree: PyTree) -> dict[str, PyTree]:
    """Flatten any pytree to {path: leaf}, in the tree's own order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(keypath): leaf for keypath, leaf in leaves}


def unflatten(flat: dict[str, PyTree]) -> Nested:
    """Convert {path: leaf} to nested dicts."""
    tree: Nested = {}
    for path, leaf in flat.items():
        *parent_names, leaf_name = path.split("/")
        node = tree
        for name in parent_names:
            node = node.setdefault(name, {})
        node[leaf_name] = leaf
    return tree


def merge(left: PyTree, right: PyTree) -> PyTree:
    """Merge two trees of dicts (and lists) with disjoint leaves, such as trainable and frozen parameters.

    Raises:
        AssertionError: a leaf is in both trees.
    """
    if isinstance(left, list) and isinstance(right, list):
        pairs = zip(left, right, strict=True)
        return [merge(left_item, right_item) for left_item, right_item in pairs]
    if isinstance(left, dict) and isinstance(right, dict):
        shared = {key: merge(left[key], right[key]) for key in left.keys() & right.keys()}
        return {**left, **right, **shared}
    raise AssertionError("merge: a leaf is in both trees")


def floats(tree: PyTree) -> PyTree:
    """Replace leaves that have no gradient with None: integers, booleans, keys, and their cotangents."""
    # The cotangent of an integer has the dtype float0, which `issubdtype` does not count as a float.
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def fill_none(part: PyTree, tree: PyTree) -> PyTree:
    """Fill in the leaves that are None in `part` from `tree`; the inverse of `floats`."""
    # None counts as a leaf, so that both trees have the same structure.
    return jax.tree.map(lambda new, old: old if new is None else new, part, tree, is_leaf=lambda x: x is None)
