"""Errors of the config system, and nearest names. Imports nothing of Plimsoll.

Each says where (dotted path), what was expected, what was given, the nearest valid choice. All are ConfigError, which
is a ValueError; they are also AttributeError, KeyError or TypeError where code that probes a Config expects those.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A mistake in a config, told in one line. `path`: dotted path of what is at fault, "" for the whole config."""

    def __init__(self, message: str, *, path: str = ""):
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.args[0]}" if self.path else self.args[0]


class UnknownFieldError(ConfigError, AttributeError, KeyError):
    """A name that the constructor does not take, or a path that leads nowhere."""


class FieldTypeError(ConfigError, TypeError):
    """A value of the wrong type."""


class FieldRangeError(ConfigError):
    """A value of the right type, outside of what the field allows."""


class MissingFieldError(ConfigError, AttributeError, KeyError):
    """Required fields that were never set; all those of one level are listed."""


class UntrustedNameError(ConfigError):
    """A dotted name that a saved config or the command line may not resolve."""


def join(path: str, name: Any) -> str:
    """The dotted path of `name` under `path`; the root's path is ""."""
    return f"{path}.{name}" if path else str(name)


def show(value: Any) -> str:
    """A value as it stands in an error: its repr, cut at 80 characters, and its type."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def nearest(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """The closest of `names`, best first; empty when nothing is close."""
    by_lower = {one.lower(): one for one in names}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), list(by_lower), count, 0.6)]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error: `; did you mean 'x'?`, else all valid names when they are few, else nothing."""
    names = list(names)
    close = nearest(name, names)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if 0 < len(names) <= 40 else ""
