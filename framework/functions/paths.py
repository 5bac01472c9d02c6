"""Leaves of any pytree by their paths, such as "layers/attention/query", chosen by a regex as `learner.rules` does.

Imports jax and `framework.layout`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

import jax

from framework.layout import path_name


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {path: leaf} of any pytree, in the tree's own order; None has no leaf."""
    return {path_name(keypath): leaf for keypath, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def matching_paths(pattern: str, paths: Iterable[str], argument: str) -> list[str]:
    """The paths in which a regex is found (`re.search`).

    Args:
        pattern: the regex.
        paths: of all leaves that it may match.
        argument: what the pattern was given as, for the message of an error.

    Raises:
        ValueError: the pattern is no regex, or is found in no path; the message has the nearest paths.
    """
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument} = {pattern!r} is no regular expression: {error}") from error
    all_paths = list(paths)
    matched = [path for path in all_paths if regex.search(path)]
    if not matched:
        nearest = ", ".join(map(repr, nearest_paths(pattern, all_paths)))
        raise ValueError(f"{argument} = {pattern!r} matches none of {len(all_paths)} leaves; nearest: {nearest}")
    return matched


def nearest_paths(pattern: str, paths: list[str], count: int = 3) -> list[str]:
    """The paths that look most like a pattern, the likest first."""
    # A pattern is often one part of a path, which is far from the whole path in length.
    words = re.findall(r"\w+", pattern.lower())

    def likeness(path: str) -> float:
        parts = re.findall(r"\w+", path.lower())
        total = 0.0
        for word in words:
            total += max((difflib.SequenceMatcher(None, word, part).ratio() for part in parts), default=0.0)
        return total

    return sorted(paths, key=likeness, reverse=True)[:count]
