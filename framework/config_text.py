"""Values as text: read from the command line by a field's type hint, and written back. Nothing is evaluated.

Imports `framework.config_schema`. Names of components are read in `framework.config`.
"""

import ast
import contextlib
import json
import math
import re
from typing import Any, Literal

from framework.config_errors import ConfigError, join
from framework.config_names import name_of
from framework.config_schema import LISTS, REQUIRED, ConfigBase, Mark, arms, convert, element_hint, split

_PLAIN = re.compile(r"[\w./:*+-]+\Z")
_WORDS = {"none": None, "null": None, "true": True, "false": False, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def parse_text(hint: Any, text: str, path: str) -> Any:
    """The value that `text` stands for under this hint: `12`, `3e-4`, `true`, `none`, a choice, text with or without
    quotes, JSON, a Python literal, or `a,b,c` where a list may stand. Raises as `convert` does."""
    kinds = [split(arm) for arm in arms(hint)]
    chosen = any(base is Literal and text in choices for base, choices in kinds)  # "none" may be a choice
    try:
        return convert(hint, text if chosen else literal(text), path)
    except ConfigError as error:
        failure = error
    with contextlib.suppress(ConfigError):
        return convert(hint, text, path)
    if text.startswith(("[", "(", "{")) or not any(base in (*LISTS, tuple) for base, _ in kinds):
        raise failure
    parts = enumerate(text.split(",") if text else [])
    return convert(hint, [parse_text(element_hint(hint, i), part.strip(), join(path, i)) for i, part in parts], path)


def literal(text: str) -> Any:
    """JSON, else a Python literal, else none, true, false, inf or nan in any case, else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return text


def as_text(value: Any) -> str:
    """A value as one writes it on the command line: a config by its name; "?" for an unset one, "-" for none at all."""
    if isinstance(value, ConfigBase):
        return name_of(value._target)
    if isinstance(value, Mark):
        return "?" if value is REQUIRED else "-"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and literal(value) == value and _PLAIN.match(value) else repr(value)
