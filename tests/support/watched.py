"""What a process does while data from outside is read: an audit hook that notes files, processes and connections."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Python's audit events, by their beginnings: https://docs.python.org/3/library/audit_events.html
_EVENTS = (
    *("open", "exec", "compile", "socket.", "subprocess.", "shutil.", "tempfile.", "pickle.", "ctypes.dlopen"),
    *(f"os.{name}" for name in ("chmod", "exec", "fork", "link", "mkdir", "posix_spawn", "remove", "rename", "rmdir")),
    *(f"os.{name}" for name in ("spawn", "symlink", "system", "truncate", "utime")),
)
# What the import of a module does by itself.
_OF_IMPORTS = (".py", ".pyc", ".so", ".pth")
_active: list[list[str]] = []
_installed: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or not event.startswith(_EVENTS):
        return
    first = arguments[0] if arguments else None
    if event in ("open", "os.mkdir", "os.rename", "os.remove"):
        path = os.fspath(first) if isinstance(first, str | bytes | os.PathLike) else str(first)
        text = os.fsdecode(path)
        if "__pycache__" in text or text.endswith(_OF_IMPORTS):
            return
    if event in ("exec", "compile") and "evil" not in str(arguments):
        return  # the import of a module, what dataclasses generate, annotations of our own code
    _active[-1].append(f"{event} {arguments!r:.200}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """The events of this block. An audit hook stays for the life of a process, so it is switched on and off."""
    if not _installed:
        sys.addaudithook(_hook)
        _installed.append(True)
    _active.append([])
    try:
        yield _active[-1]
    finally:
        _active.pop()
