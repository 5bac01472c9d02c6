"""Values as text: parses command-line values by the type hint of a field, and formats values for display."""

import ast
import contextlib
import json
import re
from typing import Literal

from plimsoll.framework.config.names import ConfigError, get_dotted_name, join
from plimsoll.framework.config.schema import (
    LISTS,
    REQUIRED,
    Annotation,
    ConfigBase,
    Mark,
    arms,
    convert,
    element_hint,
    split,
)

_PLAIN = re.compile(r"[\w./:*+-]+\Z")
# Literals of the command line, in lower case. JSON and Python each parse only some of them, in a single spelling.
_LITERALS = {
    "none": None,
    "null": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
}


def parse_text(hint: Annotation, text: str, path: str) -> object:
    """Parses `text` according to this hint.

    Accepts `12`, `3e-4`, `true`, `none`, a choice, text with or without quotes, JSON, a Python literal, or `a,b,c` if
    the hint allows a list. Raises the same errors as `convert`.
    """
    kinds = [split(arm) for arm in arms(hint)]
    # A choice is not parsed, because "none" may be one.
    is_choice = any(base is Literal and text in choices for base, choices in kinds)
    try:
        return convert(hint, text if is_choice else parse_literal(text), path)
    except ConfigError as error:
        failure = error.with_traceback(None)
    # The field may want text, such as "12", so try the raw text as well.
    with contextlib.suppress(ConfigError):
        return convert(hint, text, path)
    takes_list = any(base in (*LISTS, tuple) for base, _ in kinds)
    if text.startswith(("[", "(", "{")) or not takes_list:
        raise failure
    parts = text.split(",") if text else []
    elements = []
    for i, part in enumerate(parts):
        element = parse_text(element_hint(hint, i), part.strip(), join(path, i))
        elements.append(element)
    return convert(hint, elements, path)


def parse_literal(text: str) -> object:
    """Parses text as JSON, else as a Python literal, else returns the text itself.

    none, null, true, false, inf, -inf and nan are case-insensitive.
    """
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    for read in (json.loads, ast.literal_eval):
        # Text with many brackets can exhaust the memory or stack of either parser; treat it as plain text.
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return text


def as_text(value: object) -> str:
    """Formats a value as it is written on the command line.

    A config is shown by its name; "?" stands for an unset required value, "-" for an absent one.
    """
    if isinstance(value, ConfigBase):
        return get_dotted_name(value._target)
    if isinstance(value, Mark):
        return "?" if value is REQUIRED else "-"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    # Quote text that would be parsed as another value, or that a shell would split.
    if isinstance(value, str) and parse_literal(value) == value and _PLAIN.match(value):
        return value
    return repr(value)


def reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns a JSON object as a dict. Raises ValueError if a key occurs twice.

    With two values for a key, a reader may look at the one that is not used.
    """
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {duplicate[:80]!r} occurs twice in one object")
    return data
