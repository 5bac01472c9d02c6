"""Choices on disk, beside the plans: the same question is answered at once, and an interrupted search goes on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from framework.config import Config
from framework.plan import cache
from framework.plan.auto.choice import Choice, Machine
from framework.plan.auto.settings import Setting, Settings, flags


class Question(NamedTuple):
    """What is asked for.

    Attributes:
        config: resolved for the machine.
        machine: where it is to run.
        mode: "memory" or "batch".
        fixed: paths of fields that stay as they are.
        allowed: names of what may be changed of the training.
        estimate: whether the closed form alone answers.
    """

    config: Config
    machine: Machine
    mode: str
    fixed: Sequence[str]
    allowed: Sequence[str]
    estimate: bool

    def path(self, part: str) -> Path:
        """The file of a part of the answer."""
        about = self._asdict()
        del about["config"]
        about["machine"] = self.machine._asdict()
        about["fixed"] = sorted(self.fixed)
        about["allowed"] = list(self.allowed)
        return cache.path_of(self.config, auto=part, **about)


def load(path: Path) -> Choice | None:
    """The choice in a file; None where there is none, or one of another version."""
    stored = cache.load(path)
    try:
        return None if stored is None else Choice.from_json(stored)
    except (KeyError, TypeError, ValueError):
        return None


def store(path: Path, choice: Choice) -> None:
    """Keeps a choice."""
    cache.store(path, choice.to_json())


class CompiledBytes:
    """What the compiler said of candidates, kept as soon as it has said it.

    Args:
        question: of the search.
        fresh: forget what earlier searches have kept.
    """

    def __init__(self, question: Question, *, fresh: bool):
        self._path = question.path("compiled")
        self._bytes: dict[str, int] = {}
        if not fresh:
            self._bytes = cache.load(self._path) or {}

    def get(self, settings: Settings) -> int | None:
        """The bytes of settings; None where they were not compiled."""
        return self._bytes.get(flags(settings))

    def items(self) -> list[tuple[Settings, int]]:
        """All settings that were compiled, in that order, with their bytes."""
        compiled_settings = []
        for text, compiled in self._bytes.items():
            pairs = [word.removeprefix("--config.").partition("=") for word in shlex.split(text)]
            settings = tuple(Setting(path, value) for path, _, value in pairs)
            compiled_settings.append((settings, compiled))
        return compiled_settings

    def keep(self, settings: Settings, compiled: int) -> None:
        """Keeps the bytes of settings."""
        self._bytes[flags(settings)] = compiled
        cache.store(self._path, self._bytes)
