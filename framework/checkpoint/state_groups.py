"""Selects top-level groups of a state, such as "parameter" and "frozen"."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from plimsoll.framework.layout import Nested, PyTree, TrainState


def select_groups(abstract: PyTree, groups: Collection[str] | None) -> PyTree:
    """Return a state with only these groups; None for all. Raises ValueError if a group does not exist."""
    if groups is None:
        return abstract
    trees = dict(abstract.items())
    missing_groups = set(groups) - set(trees)
    if missing_groups:
        raise ValueError(f"groups: expected some of {sorted(trees)}, got {sorted(missing_groups)}")
    selected = {name: tree for name, tree in trees.items() if name in groups}
    return TrainState(**selected) if isinstance(abstract, TrainState) else selected


def split_frozen(state: PyTree) -> tuple[PyTree, Nested]:
    """Return a state without its group "frozen", and this group: {} if the state has no groups, or not this one."""
    if isinstance(state, TrainState):
        return replace(state, frozen={}), state.frozen
    if not isinstance(state, dict):
        return state, {}
    return {name: group for name, group in state.items() if name != "frozen"}, state.get("frozen", {})
