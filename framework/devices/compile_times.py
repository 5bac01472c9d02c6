"""Records how long each program took to compile on this machine, to show what to expect the next time.

Each program has a file with a single number, in seconds, next to the compile cache. The key of a program is its lowered
text and the devices that it is compiled for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from plimsoll.framework.terminal import phases
from plimsoll.framework.terminal.phase_views import human_seconds

_CACHE_HIT = "/jax/compilation_cache/cache_hits"
# Programs that compile faster than this are not recorded.
_MIN_SECONDS = 0.5


class _Hits:
    """Counts the programs that JAX has loaded from its compile cache."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_listener(self._count_event)

    def _count_event(self, event: str, **_: str | int) -> None:
        self.count += event == _CACHE_HIT


_hits: list[_Hits] = []


def folder() -> Path | None:
    """Return the folder of the times, next to the programs of the compile cache; None if there is no cache."""
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Path(cache) / "times" if cache else None


def read(times: Path, key: str) -> float | None:
    """Return the seconds that a program took the last time; None if it was never compiled here."""
    try:
        return float((times / key).read_text())
    except (OSError, ValueError):
        return None


def write(times: Path, key: str, seconds: float) -> None:
    """Store the seconds that a program took. On a full or read-only disk, they are lost."""
    with contextlib.suppress(OSError):
        times.mkdir(parents=True, exist_ok=True)
        # Rename the file when it is complete, because another process may read it in the meantime.
        temporary = times / f".{key}-{os.getpid()}"
        temporary.write_text(f"{seconds:.2f}\n")
        temporary.replace(times / key)


@contextlib.contextmanager
def compiling(what: str, lowered: jax.stages.Lowered, *, about: str = "", times: Path | None = None) -> Iterator[None]:
    """Show that a program is being compiled until the context exits, and how long it took the last time.

    If phases are not shown, this does nothing.

    Args:
        what: name of the program, such as "the training step".
        lowered: the lowered program.
        about: description of the devices that it is compiled for, if not those of this process.
        times: folder of the times, if not the one next to the compile cache.
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
        about = about or f"{jax.device_count()} {jax.devices()[0].device_kind}"
        key = hashlib.sha256(f"{about}\n{lowered.as_text()}".encode()).hexdigest()[:32]
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
    # Do not record the time of a cache hit, which does not predict the compile time.
    if times is not None and not is_cached and seconds >= _MIN_SECONDS:
        write(times, key, seconds)
