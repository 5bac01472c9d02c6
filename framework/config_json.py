"""Configs as plain JSON data and back. Nothing is executed: `framework.config_names` says which names resolve.

A component is `{"$class": dotted name, field: value, ...}`. Two more keys of that kind stand for what JSON lacks:
`{"$tuple": [...]}`, only where the field's hint would not turn a list into a tuple, and `{"$float": "inf"}`.
"""

import math
from collections.abc import Callable
from typing import Any

from framework.config_errors import Mismatch
from framework.config_types import ConfigBase, convert


def encode(hint: Any, value: Any, component: Callable[[dict[str, Any], str], Any]) -> Any:
    """JSON data for a field's value, from which `decode` and the field's hint restore it."""
    plain = _encode(value, tuples=False)
    if not _has_tuple(value):
        return plain
    try:
        restored = convert(hint, decode(plain, "", component))
    except Mismatch:
        restored = None
    return plain if restored == value else _encode(value, tuples=True)


def _encode(value: Any, *, tuples: bool) -> Any:
    if isinstance(value, ConfigBase):
        return value.to_dict()
    if isinstance(value, list | tuple):
        items = [_encode(item, tuples=tuples) for item in value]
        return {"$tuple": items} if tuples and isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: _encode(item, tuples=tuples) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    return value


def _has_tuple(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, tuple) or any(map(_has_tuple, items))


def decode(data: Any, path: str, component: Callable[[dict[str, Any], str], Any]) -> Any:
    """The value of JSON data. `component(data, path)` makes the config of a dict with a "$class"."""
    if isinstance(data, list):
        return [decode(item, join(path, str(index)), component) for index, item in enumerate(data)]
    if not isinstance(data, dict):
        return data
    if "$class" in data:
        return component(data, path)
    if data.keys() == {"$tuple"} and isinstance(data["$tuple"], list):
        return tuple(decode(data["$tuple"], path, component))
    if data.keys() == {"$float"} and data["$float"] in ("inf", "-inf", "nan"):
        return float(data["$float"])
    return {key: decode(item, join(path, key), component) for key, item in data.items()}


def join(path: str, name: str) -> str:
    """The dotted path of `name` under `path`; the root's path is ""."""
    return f"{path}.{name}" if path else name
