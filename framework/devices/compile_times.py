"""How long each program took to compile the last time on this machine, so that a person knows what to wait for.

A file of one number, in seconds, for each program, beside the compile cache. A program is known by the text of what was
lowered and by the devices that it is for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from framework.terminal import phases
from framework.terminal.phase_views import human_seconds

_CACHE_HIT = "/jax/compilation_cache/cache_hits"
# A program that compiles faster is not worth a file.
_MIN_SECONDS = 0.5


class _Hits:
    """Counts the programs that JAX has taken from its compile cache."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_listener(self._hear)

    def _hear(self, event: str, **_: str | int) -> None:
        self.count += event == _CACHE_HIT


_hits: list[_Hits] = []


def folder() -> Path | None:
    """Where the times are: beside the programs of the compile cache; None if no program is kept either."""
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Path(cache) / "times" if cache else None


def key_of(lowered: Any, about: str) -> str:
    """The name of a program: of what was lowered, and what else it depends on, such as the devices."""
    return hashlib.sha256(f"{about}\n{lowered.as_text()}".encode()).hexdigest()[:32]


def read(times: Path, key: str) -> float | None:
    """The seconds that a program took the last time; None if it was never compiled here."""
    try:
        return float((times / key).read_text())
    except (OSError, ValueError):
        return None


def write(times: Path, key: str, seconds: float) -> None:
    """Remembers the seconds that a program took. A disk that is full or read-only costs the memory of it."""
    with contextlib.suppress(OSError):
        times.mkdir(parents=True, exist_ok=True)
        # The file is renamed when it is complete, as another process may read it meanwhile.
        temporary = times / f".{key}-{os.getpid()}"
        temporary.write_text(f"{seconds:.2f}\n")
        temporary.replace(times / key)


@contextlib.contextmanager
def compiling(what: str, lowered: Any, *, about: str = "", times: Path | None = None) -> Iterator[None]:
    """Says that a program is being compiled until the context ends, and how long that took the last time.

    Where nobody is told of phases, it does nothing.

    Args:
        what: names the program: "the training step".
        lowered: `jax.stages.Lowered`.
        about: the devices that it is for, if not those of this process.
        times: the folder of the times, if not the one beside the compile cache.
    """
    if not phases.are_shown():
        yield
        return
    if not _hits:
        _hits.append(_Hits())
    times = times or folder()
    key = ""
    text = f"compiling {what}"
    if times is not None:
        key = key_of(lowered, about or f"{jax.device_count()} {jax.devices()[0].device_kind}")
        last_seconds = read(times, key)
        if last_seconds is not None:
            text += f" ({human_seconds(last_seconds)} the last time)"
    num_hits = _hits[0].count
    start = time.monotonic()
    with phases.phase(text) as compile_phase:
        yield
        seconds = time.monotonic() - start
        is_cached = _hits[0].count > num_hits
        if is_cached:
            compile_phase.outcome = ", from the cache"
    # Reading it from the cache says nothing of how long compiling would take.
    if times is not None and not is_cached and seconds >= _MIN_SECONDS:
        write(times, key, seconds)
