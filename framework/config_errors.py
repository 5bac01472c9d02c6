"""Errors of the config system, and nearest names. Imports nothing of Plimsoll.

Each says where (dotted path), what was expected, what was given, the nearest valid choice. All are ConfigError, which
is a ValueError; they are also AttributeError, KeyError or TypeError where code that probes a Config expects those.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A mistake in a config, told in one line.

    Attributes:
        path: dotted path of the field or component at fault; "" when it concerns the whole config.
    """

    def __init__(self, message: str, *, path: str = ""):
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path

    # KeyError.__str__ would otherwise print the repr of the message in the subclasses below.
    def __str__(self) -> str:
        return str(self.args[0])


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


class Mismatch(Exception):
    """Internal: a value does not fit a hint. `where` is the path inside the value, outermost key first."""

    def __init__(
        self, expected: str, given: Any, *, where: tuple[str, ...] = (), right_type: bool = False, near: str = ""
    ):
        super().__init__(expected)
        self.expected, self.given, self.where, self.right_type, self.near = expected, given, where, right_type, near

    def at(self, key: Any) -> "Mismatch":
        """The same, seen from one container further out."""
        where = (str(key), *self.where)
        return Mismatch(self.expected, self.given, where=where, right_type=self.right_type, near=self.near)

    def error(self, path: str, text: str | None = None) -> ConfigError:
        """The error for users. `text`: what they typed, where that says more than its reading."""
        given = show(self.given) if text is None or self.where else repr(text)
        kind = FieldRangeError if self.right_type else FieldTypeError
        return kind(f"expected {self.expected}, given {given}{self.near}", path=".".join((path, *self.where)))


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
