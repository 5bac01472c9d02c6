"""What changed between two saved configs."""

import json
from typing import Any

from framework.config.names import RENAMED

_MISSING = "(absent)"


def config_changes(old: Any, new: Any, *, path: str = "config") -> list[str]:
    """What changed between two configs given as JSON values: a line for each leaf, in the order of the old one.

    Tuples equal lists and 1 equals 1.0, as JSON does not tell them apart; True does not equal 1.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f".{key}", old.get(key, _MISSING), new.get(key, _MISSING)) for key in {**old, **new}]
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(zip(old, new, strict=True))]
    elif _current(old) == _current(new) and isinstance(old, bool) == isinstance(new, bool):
        return []
    else:
        return [f"{path}: {_short(old)} -> {_short(new)}"]
    return [line for key, a, b in pairs for line in config_changes(a, b, path=f"{path}{key}")]


def _current(value: Any) -> Any:
    """The value; of a component's name the one that it has today."""
    return RENAMED.get(value, value) if isinstance(value, str) else value


def _short(value: Any) -> str:
    text = _MISSING if value == _MISSING else json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
