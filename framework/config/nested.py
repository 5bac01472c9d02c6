"""Access to values inside plain JSON-like data (nested lists and dicts)."""

from collections.abc import Sequence


def replace_value_at(value: object, keys: Sequence[str | int], element: object) -> object:
    """Returns a copy of nested lists and dicts with `element` at the position given by `keys`."""
    if not keys:
        return element
    key, *inner_keys = keys
    if isinstance(value, dict):
        return {**value, key: replace_value_at(value.get(key), inner_keys, element)}
    assert isinstance(value, list | tuple)
    assert isinstance(key, int)
    elements = list(value)
    elements[key] = replace_value_at(elements[key], inner_keys, element)
    return elements


def get_value_at(value: object, path: str) -> object:
    """Return the part of nested lists and dicts at a dotted path, such as "rules.0.optimizer"; None if missing."""
    for name in path.split("."):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value
