"""Lists what changed between two saved configs."""

import json
from typing import Any

from framework.config.names import RENAMED

_MISSING = "(absent)"


def config_changes(old: Any, new: Any, *, path: str = "config") -> list[str]:
    """Returns a line for each leaf that differs between two configs, in the order of the old one.

    The configs are JSON values. Tuples equal lists and 1 equals 1.0, as JSON does not tell them
    apart; True does not equal 1.
    """
    lines: list[str] = []
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            old_value = old.get(key, _MISSING)
            new_value = new.get(key, _MISSING)
            lines += config_changes(old_value, new_value, path=f"{path}.{key}")
    elif _are_lists(old, new) and len(old) == len(new):
        for i, (old_value, new_value) in enumerate(zip(old, new, strict=True)):
            lines += config_changes(old_value, new_value, path=f"{path}[{i}]")
    elif _current(old) != _current(new) or isinstance(old, bool) != isinstance(new, bool):
        lines.append(f"{path}: {_short(old)} -> {_short(new)}")
    return lines


def _are_lists(old: Any, new: Any) -> bool:
    return isinstance(old, list | tuple) and isinstance(new, list | tuple)


def _current(value: Any) -> Any:
    """Returns the value; for a component's former name, the one that it has today."""
    return RENAMED.get(value, value) if isinstance(value, str) else value


def _short(value: Any) -> str:
    # A line of a log should fit on a screen, and a value may be a whole component.
    text = _MISSING if value == _MISSING else json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
