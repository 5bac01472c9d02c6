"""Trees of dicts and their leaves' paths: "stack/block0/norm/scale"."""

from __future__ import annotations

from typing import Any

import jax

Nested = dict[str, Any]  # a nested dict whose leaves are specs or arrays


def key_name(key: Any) -> str:
    """The name of one pytree key: dict key, index, or attribute."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown pytree key {key!r}")


def path_name(keypath: tuple[Any, ...]) -> str:
    """A leaf's stable name: its pytree keys joined by "/"."""
    return "/".join(key_name(key) for key in keypath)


def flatten(tree: Any) -> dict[str, Any]:
    """Any pytree as {path: leaf}, in the tree's own order."""
    return {path_name(keypath): leaf for keypath, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(flat: dict[str, Any]) -> Nested:
    """{path: leaf} as nested dicts."""
    tree: Nested = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def merge(left: Any, right: Any) -> Any:
    """Two trees of dicts (and lists) with disjoint leaves as one: trainable and frozen parameters, say."""
    if isinstance(left, list) and isinstance(right, list):
        return [merge(a, b) for a, b in zip(left, right, strict=True)]
    if isinstance(left, dict) and isinstance(right, dict):
        shared = {key: merge(left[key], right[key]) for key in left.keys() & right.keys()}
        return {**left, **right, **shared}
    raise AssertionError("merge: a leaf is in both trees")
