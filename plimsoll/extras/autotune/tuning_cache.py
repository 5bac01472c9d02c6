"""Tuning results on disk, next to the plans.

A repeated request is answered immediately, and an interrupted search resumes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from plimsoll.extras.autotune.settings import Setting, Settings, flags
from plimsoll.extras.autotune.tuned_settings import Machine, TunedSettings
from plimsoll.framework.config import Config
from plimsoll.framework.plan import cache


class TuningRequest(NamedTuple):
    """A tuning request. Its fields are the cache key of the result.

    Attributes:
        config: config, resolved for the machine.
        machine: the machine to tune for.
        mode: "memory" or "batch".
        fixed: paths of fields that must not change.
        allowed: names of changes to the training that are allowed.
        estimate: whether to use only the analytical estimate, without compiling.
    """

    config: Config
    machine: Machine
    mode: str
    fixed: Sequence[str]
    allowed: Sequence[str]
    estimate: bool

    def path(self, part: str) -> Path:
        """Return the file that stores a part of the result, such as "choice" or "compiled"."""
        about = self._asdict()
        del about["config"]
        about["machine"] = self.machine._asdict()
        about["fixed"] = sorted(self.fixed)
        about["allowed"] = list(self.allowed)
        return cache.cache_path(self.config, auto=part, **about)


def load(path: Path) -> TunedSettings | None:
    """Load a choice from a file; None if the file does not exist or has the format of another version."""
    stored = cache.load(path)
    try:
        return None if stored is None else TunedSettings.from_json(stored)
    except (KeyError, TypeError, ValueError):
        # Another version wrote the file. Tuning again replaces it.
        return None


def store(path: Path, choice: TunedSettings) -> None:
    """Write a choice to a file.

    Args:
        path: file to write.
        choice: the chosen settings.
    """
    cache.store(path, choice.to_json())


class CompiledBytes:
    """Compiled sizes of candidates, written to disk after each compilation.

    Args:
        request: request that the search answers.
        fresh: whether to ignore the results of earlier searches.
    """

    def __init__(self, request: TuningRequest, *, fresh: bool):
        self._path = request.path("compiled")
        self._bytes: dict[str, int] = {}
        if not fresh:
            self._bytes = cache.load(self._path) or {}

    def get(self, settings: Settings) -> int | None:
        """Return the bytes that settings need on one device; None if they were not compiled."""
        return self._bytes.get(flags(settings))

    def items(self) -> list[tuple[Settings, int]]:
        """Return all compiled settings with their bytes, in the order of compilation."""
        # The keys are command-line flags, because keys of JSON are strings.
        compiled_settings = []
        for text, compiled in self._bytes.items():
            pairs = [word.removeprefix("--config.").partition("=") for word in shlex.split(text)]
            settings = tuple(Setting(path, value) for path, _, value in pairs)
            compiled_settings.append((settings, compiled))
        return compiled_settings

    def record(self, settings: Settings, compiled: int) -> None:
        """Store the compiled size of settings.

        Args:
            settings: settings that were compiled.
            compiled: bytes that they need on one device.
        """
        self._bytes[flags(settings)] = compiled
        cache.store(self._path, self._bytes)
