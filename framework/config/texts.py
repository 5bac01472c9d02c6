"""Values as text: how the command line's are read by a field's type hint, and how they are shown."""

import ast
import contextlib
import json
import re
from typing import Any, Literal

from framework.config.names import TRUSTED, ConfigError, FieldTypeError, join, name_of
from framework.config.schema import (
    LISTS,
    REQUIRED,
    ConfigBase,
    Mark,
    accepts_config,
    arms,
    convert,
    element_hint,
    short_names,
    split,
)

_PLAIN = re.compile(r"[\w./:*+-]+\Z")
# Words of the command line, in lower case: JSON and Python each read some of them, in one spelling.
_LITERALS = {
    "none": None,
    "null": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
}


def value_of_text(hint: Any, text: str, path: str) -> Any:
    """Returns the value that text other than a component's stands for, as a field stores it.

    Raises as `convert` does; where a component may stand, the error says how to name one.
    """
    try:
        return parse_text(hint, text, path)
    except FieldTypeError as error:
        if accepts_config(hint):
            packages = ", ".join(TRUSTED)
            components = short_names(hint)
            choices = f", or is one of {', '.join(components)}" if components else ""
            advice = f"a component goes by its name, or by its dotted name inside {packages}{choices}"
            error.args = (f"{error.args[0]}; {advice}",)
        raise


def parse_text(hint: Any, text: str, path: str) -> Any:
    """Returns the value that `text` stands for under this hint.

    That is `12`, `3e-4`, `true`, `none`, a choice, text with or without quotes, JSON, a Python
    literal, or `a,b,c` where a list may stand. Raises as `convert` does.
    """
    kinds = [split(arm) for arm in arms(hint)]
    # A choice is taken as it is, since "none" may be one.
    is_choice = any(base is Literal and text in choices for base, choices in kinds)
    try:
        return convert(hint, text if is_choice else literal(text), path)
    except ConfigError as error:
        failure = error
    # Text such as 12 may also be meant as text.
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


def literal(text: str) -> Any:
    """Reads text as JSON, else as a Python literal, else returns the text itself.

    none, null, true, false, inf, -inf and nan are read in any case of letters.
    """
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    for read in (json.loads, ast.literal_eval):
        # A text of many brackets exhausts either parser's memory or stack; it is then plain text.
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return text


def as_text(value: Any) -> str:
    """Returns a value as one writes it on the command line.

    A config goes by its name; "?" stands for an unset value, "-" for none at all.
    """
    if isinstance(value, ConfigBase):
        return name_of(value._target)
    if isinstance(value, Mark):
        return "?" if value is REQUIRED else "-"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    # Text that would be read back as another value, or that a shell would take apart, is quoted.
    if isinstance(value, str) and literal(value) == value and _PLAIN.match(value):
        return value
    return repr(value)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict. Raises ValueError if a key stands in it twice.

    Of two values of one key, the one that a person read might not be the one that counts.
    """
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {duplicate[:80]!r} stands twice in one object")
    return data
