"""Typed access to the settings of a file, which records what was read, skipped and not understood."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from plimsoll.extras.other_frameworks.foreign_run import ForeignConfigError
from plimsoll.extras.other_frameworks.shell_script import check_set

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0", "none", "null", "")


class Settings:
    """Settings by name, from one or several files and the command line.

    Args:
        values: {name: value}.
        source: name of the file, for messages.
        skipped: regex of names that change neither memory nor time; it must match the whole name.
    """

    def __init__(self, values: Mapping[str, Any], source: str, skipped: str):
        self.values = dict(values)
        self.source = source
        self.notes: list[str] = []
        self._skipped = re.compile(skipped)
        self._read: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """Return a value as the file has it, and mark it as read."""
        if name in self.values:
            self._read[name] = None
        value = self.values.get(name)
        if isinstance(value, str):
            check_set(value, name, self.source)
        return default if value is None else value

    def text(self, name: str, default: str = "") -> str:
        """Return a value as text."""
        return str(self.raw(name, default))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number.

        Raises:
            ForeignConfigError: it is missing, or it is no finite number.
        """
        value = self.raw(name, default)
        if value is None:
            raise self.error(name, "is missing; a plan needs it")
        try:
            number = float(str(value).replace("_", ""))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.error(name, f"= {value!r}; expected a number")
        return number

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer.

        Raises:
            ForeignConfigError: it is missing, or it is no integer.
        """
        number = self.number(name, default)
        if number != int(number):
            raise self.error(name, f"= {number}; expected an integer")
        return int(number)

    def positive(self, name: str, default: int | None = None) -> int:
        """Return an integer above zero.

        Raises:
            ForeignConfigError: it is missing, or it is no positive integer.
        """
        number = self.integer(name, default)
        if number < 1:
            raise self.error(name, f"= {number}; expected an integer > 0")
        return number

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean; a flag without a value is true.

        Raises:
            ForeignConfigError: it is no boolean.
        """
        value = self.raw(name, default)
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise self.error(name, f"= {value!r}; expected true or false")

    def section(self, name: str) -> dict[str, Any]:
        """Return a nested section; empty if it is missing.

        Raises:
            ForeignConfigError: it is no section.
        """
        value = self.raw(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"= {value!r}; expected a section of settings")
        return value

    def note(self, text: str) -> None:
        """Add a sentence about a setting that the plan only approximates."""
        if text not in self.notes:
            self.notes.append(text)

    def error(self, name: str, problem: str) -> ForeignConfigError:
        """Return an error about a setting."""
        return ForeignConfigError(f"{self.source}: {name} {problem}")

    def mark_read(self, names: Iterable[str]) -> None:
        """Mark settings as read that were read in another way."""
        self._read.update(dict.fromkeys(name for name in names if name in self.values))

    @property
    def read(self) -> tuple[str, ...]:
        """Names of the settings that were read."""
        return tuple(self._read)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the settings that change neither memory nor time."""
        return tuple(name for name in self.values if name not in self._read and self._is_skipped(name))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the settings that were not read and are not known to be harmless; empty ones are left out."""
        names = [name for name in self.values if name not in self._read and not self._is_skipped(name)]
        return tuple(name for name in names if self.values[name] not in (None, False, "", [], {}))

    def _is_skipped(self, name: str) -> bool:
        return self._skipped.fullmatch(name) is not None
