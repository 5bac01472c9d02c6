"""Leaves of any pytree by path, such as "layers/attention/query", selected by a regex as in `learner.rules`.

Imports jax and `framework.layout`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

import jax

from plimsoll.framework.layout import path_name


def find_leaves(tree: Any) -> dict[str, Any]:
    """Return {path: leaf} for any pytree, in the tree's own order; None has no leaf."""
    return {path_name(keypath): leaf for keypath, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def matching_paths(pattern: str, paths: Iterable[str], argument: str) -> list[str]:
    """Return the paths in which a regex is found (`re.search`).

    Args:
        pattern: the regex.
        paths: paths of all leaves that it may match.
        argument: name of the argument that holds the pattern, for error messages.

    Raises:
        ValueError: the pattern is not a valid regex, or matches no path; the message lists the closest paths.
    """
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument} = {pattern!r} is not a regular expression: {error}") from error
    all_paths = list(paths)
    matched = [path for path in all_paths if regex.search(path)]
    if not matched:
        nearest = ", ".join(map(repr, nearest_paths(pattern, all_paths)))
        raise ValueError(f"{argument} = {pattern!r} matches none of {len(all_paths)} leaves; nearest: {nearest}")
    return matched


def nearest_paths(pattern: str, paths: list[str], count: int = 3) -> list[str]:
    """Return up to `count` of the paths that are most similar to a pattern, best match first."""
    # Parts are compared, because a pattern is often one part of a path and much shorter than the whole path.
    words = re.findall(r"\w+", pattern.lower())

    def similarity(path: str) -> float:
        parts = re.findall(r"\w+", path.lower())
        total = 0.0
        for word in words:
            total += max((difflib.SequenceMatcher(None, word, part).ratio() for part in parts), default=0.0)
        return total

    return sorted(paths, key=similarity, reverse=True)[:count]
