"""Plain data, as JSON has it: nested lists and dicts, and a value inside of them."""

from collections.abc import Sequence
from typing import Any


def replaced(value: Any, keys: Sequence[Any], element: Any) -> Any:
    """Returns a copy of nested lists and dicts in which `element` stands where `keys` lead."""
    if not keys:
        return element
    key, *inner_keys = keys
    if isinstance(value, dict):
        return {**value, key: replaced(value.get(key), inner_keys, element)}
    elements = list(value)
    elements[key] = replaced(elements[key], inner_keys, element)
    return elements


def part_at(value: Any, path: str) -> Any:
    """The part of nested lists and dicts at a dotted path, such as "rules.0.optimizer"; None where there is none."""
    for name in path.split("."):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value
