"""The working directory of a run: its layout, safe names, atomic JSON files, and what changed in a config.

A workdir belongs to one job at a time: framework/workdir_lock.py.

May import: the standard library and workdir_lock. Nothing here starts JAX.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.workdir_lock import Lock, WorkdirBusyError

__all__ = ["ConfigChange", "Workdir", "WorkdirBusyError", "check_name", "config_changes", "safe_child", "write_json"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]*")
_MAX_NAME = 128
_MISSING = "(absent)"


# --- names -----------------------------------------------------------------------------------------------------------


def check_name(name: str, what: str = "name") -> str:
    """Returns `name` if it is safe as one component of a path.

    Letters, digits and `. _ = + -`, at most 128 characters, the first a letter, a digit or `_`: so neither `..`, nor a
    separator, nor an absolute path, nor a hidden file, nor something that a shell takes for a flag.

    Args:
        name: a run or step name that a person typed.
        what: how the message calls it, such as "--run_name".

    Raises:
        ValueError: it is not safe.
    """
    if not isinstance(name, str):
        raise ValueError(f"{what}: expected a string, got {name!r}")
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        suggestion = re.sub(r"[^A-Za-z0-9._=+-]+", "-", name).strip(".-=+")[:_MAX_NAME]
        hint = f"; try {suggestion!r}" if _NAME.fullmatch(suggestion) else ""
        raise ValueError(
            f"{what}: expected 1 to {_MAX_NAME} letters, digits and '._=+-', starting with a letter, digit or '_'; "
            f"got {name!r}{hint}"
        )
    return name


def safe_child(root: str | os.PathLike[str], name: str, what: str = "name") -> Path:
    """The path `root/name`, with `name` checked and no symbolic link that leads out of `root`.

    Raises:
        ValueError: the name is not safe, or the path is a symbolic link to somewhere outside of `root`.
    """
    path = Path(root) / check_name(name, what)
    real_root, real = os.path.realpath(root), os.path.realpath(path)
    if os.path.commonpath([real_root, real]) != real_root:
        raise ValueError(f"{what}: {path} is a symbolic link that leads out of {root}, to {real}")
    return path


# --- files -----------------------------------------------------------------------------------------------------------


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes JSON so that a reader, or a crash at any moment, sees the old file or the new one, never a part.

    Raises:
        TypeError, ValueError: the value is not JSON (NaN and infinity included); the old file is untouched.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)  # mkstemp makes 0600, which colleagues could not read
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must reach the disk too
    finally:
        os.close(directory)


# --- configs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigChange:
    """One field that differs: its dotted path, and both values ("(absent)" where there was none)."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {_short(self.old)} -> {_short(self.new)}"


def config_changes(old: Any, new: Any, *, path: str = "config") -> list[ConfigChange]:
    """What changed between two configs given as JSON values, leaf by leaf, in the order of the old one.

    Tuples equal lists and 1 equals 1.0, as JSON does not tell them apart; True does not equal 1.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(old) + [key for key in new if key not in old]
        return [
            change
            for key in keys
            for change in config_changes(old.get(key, _MISSING), new.get(key, _MISSING), path=f"{path}.{key}")
        ]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [change for i, (a, b) in pairs for change in config_changes(a, b, path=f"{path}[{i}]")]
    if old == new and isinstance(old, bool) == isinstance(new, bool):
        return []
    return [ConfigChange(path, old, new)]


def _short(value: Any) -> str:
    if value == _MISSING:
        return _MISSING
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- the directory ---------------------------------------------------------------------------------------------------


class Workdir:
    """A run's directory, made if it is not there.

    Args:
        path: the directory; a relative one is taken from the current directory.

    Raises:
        NotADirectoryError: something else is at `path`.
        PermissionError: it cannot be made or written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"--workdir: expected a directory, got the file {self.path}")
        for directory in (self.path, self.checkpoints, self.tensorboard):
            directory.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(f"--workdir: no permission to write in {self.path}")
        self._lock = Lock(self.path / "lock.json")

    @property
    def config(self) -> Path:
        """config.json: the resolved config of the last start."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one object per line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """checkpoints/: see framework/checkpoint.py."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """tensorboard/: event files."""
        return self.path / "tensorboard"

    @property
    def log(self) -> Path:
        """log.txt: what was printed."""
        return self.path / "log.txt"

    def claim(self) -> str | None:
        """Makes this process the directory's owner until it ends or calls `release`.

        In a job of several processes, one of them claims. Claiming what this process already holds does nothing.

        Returns:
            None, or a message for the person: whose stale lock was taken over.

        Raises:
            WorkdirBusyError (a ValueError): another job holds it; names host, process and what to do.
        """
        return self._lock.claim()

    def release(self) -> None:
        """Gives the directory back; does nothing if this process does not hold it."""
        self._lock.release()

    def __enter__(self) -> Workdir:
        self.claim()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
