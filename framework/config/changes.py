"""Differences between two configs, or between two saved configs."""

import json
from collections.abc import Mapping

from plimsoll.framework.config.config import Config, config_for
from plimsoll.framework.config.migrations import migrate_fields
from plimsoll.framework.config.names import get_current_name, get_dotted_name, resolve
from plimsoll.framework.config.schema import ABSENT

_MISSING = "(absent)"


def diff(left: Config, right: Config) -> list[tuple[str, object, object]]:
    """Returns (path, left value, right value) for each path at which two configs differ.

    ABSENT stands for a value that only the other side has. Components of different classes are listed by name, at the
    path of the component.
    """
    # {dotted path: value} of each side; the value of a config is the name of its target.
    left_values: dict[str, object] = {}
    right_values: dict[str, object] = {}
    for config, values in ((left, left_values), (right, right_values)):
        for path, value in config.walk():
            values[path] = get_dotted_name(value._target) if isinstance(value, Config) else value
    differences = []
    for path in left_values | right_values:
        left_value = left_values.get(path, ABSENT)
        right_value = right_values.get(path, ABSENT)
        # Compare the types too: 1 == 1.0 == True, but they build different objects.
        if left_value != right_value or type(left_value) is not type(right_value):
            differences.append((path, left_value, right_value))
    return differences


def config_changes(old: object, new: object, *, path: str = "config") -> list[str]:
    """Returns a line for each leaf that differs between two configs, in the order of the old one.

    Tuples equal lists and 1 equals 1.0, because JSON does not distinguish them; True does not equal 1. Old names of
    components, fields and values equal the current ones. A component of Plimsoll that the old config has no field for,
    because an earlier version wrote it, is compared with its defaults.

    Args:
        old: a config as JSON data, such as that of a checkpoint.
        new: the config to compare it with, as JSON data.
        path: dotted path of the two, which the lines start with.
    """
    lines: list[str] = []
    if isinstance(old, dict) and isinstance(new, dict):
        old = _migrate(old)
        new = _migrate(new)
        for key in {**old, **new}:
            new_value = new.get(key, _MISSING)
            old_value = old[key] if key in old else _get_default(new_value)
            lines += config_changes(old_value, new_value, path=f"{path}.{key}")
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for i, (old_value, new_value) in enumerate(zip(old, new, strict=True)):
            lines += config_changes(old_value, new_value, path=f"{path}[{i}]")
    else:
        current_old = get_current_name(old) if isinstance(old, str) else old
        current_new = get_current_name(new) if isinstance(new, str) else new
        if current_old != current_new or isinstance(old, bool) != isinstance(new, bool):
            lines.append(f"{path}: {_short(old)} -> {_short(new)}")
    return lines


def _migrate(data: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the JSON data of a component with the current names of its fields and values; other dicts unchanged."""
    name = data.get("$class")
    if not isinstance(name, str):
        return data
    fields = {key: value for key, value in data.items() if key != "$class"}
    return {"$class": name, **migrate_fields(get_current_name(name), fields)}


def _get_default(value: object) -> object:
    """Returns the defaults of a component of Plimsoll, as JSON data like `value`; _MISSING for any other value."""
    name = value.get("$class") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name.startswith("plimsoll."):
        return _MISSING
    return config_for(resolve(name)).to_dict()


def _short(value: object) -> str:
    # A value may be a whole component, but a log line should fit on the screen.
    text = _MISSING if value == _MISSING else json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
