"""What the docstrings of components say about their fields, and a config written out with it, one line per leaf.

Imports `framework.config`. Understands the "Args:" section of Google-style docstrings, which optax and Plimsoll write.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from framework.config import REQUIRED, Config, target_of
from framework.config_names import name_of
from framework.config_text import literal

_FIELD = re.compile(r"(\w+)(?: \([^)]*\))?: ?(.*)")
_PLAIN = re.compile(r"[\w./:*+-]+\Z")
_SECTION = re.compile(r"[A-Z]\w*:\s*\Z")


class Line(NamedTuple):
    """One line of a description: a component (value is its dotted class name) or a field."""

    path: str
    value: str
    doc: str
    component: bool


def describe(config: Config) -> Iterator[Line]:
    """The lines of a config, depth first; the value of an unset field is "?"."""
    docs: dict[str, str] = {}
    for path, value in config.walk():
        doc = docs.get(path, "")
        if isinstance(value, Config):
            target = target_of(value)
            docs.update({f"{path}.{name}".lstrip("."): text for name, text in field_docs(target).items()})
            doc = doc or summary(target)
            yield Line(path, name_of(target), doc, True)
        else:
            yield Line(path, "?" if value is REQUIRED else as_text(value), doc, False)


def as_text(value: Any) -> str:
    """A value as one writes it on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and literal(value) == value and _PLAIN.match(value) else repr(value)


def summary(target: Callable[..., Any]) -> str:
    """The first line of a docstring; "" without one."""
    return (inspect.getdoc(target) or "").partition("\n")[0]


def field_docs(target: Callable[..., Any]) -> dict[str, str]:
    """Field name -> the first sentence that "Args:" has on it, in the class, its `__init__`, or its bases."""
    texts = [target.__doc__]
    if isinstance(target, type):
        texts = [text for cls in target.__mro__[:-1] for text in (cls.__doc__, vars(cls).get("__init__", cls).__doc__)]
    found: dict[str, str] = {}
    for text in texts:
        for name, doc in _args_section(text or ""):
            found.setdefault(name, doc)
    return found


def _args_section(text: str) -> Iterator[tuple[str, str]]:
    lines = inspect.cleandoc(text).splitlines()
    start = next((index + 1 for index, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), len(lines))
    entries: list[list[str]] = []
    indent = None
    for line in lines[start:]:
        depth = len(line) - len(line.lstrip())
        if line.strip() and (depth == 0 or _SECTION.match(line.strip())):
            break
        indent = depth if indent is None and line.strip() else indent
        match = _FIELD.match(line.strip())
        if match and depth == indent:
            entries.append([match[1], match[2]])
        elif entries and line.strip():
            entries[-1].append(line.strip())
    for name, *words in entries:
        text = re.sub(r":\w+:`", "`", " ".join(words).strip())  # without reStructuredText's roles
        yield name, re.split(r"\. (?=[A-Z])", text)[0].rstrip(".")
