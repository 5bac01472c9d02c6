"""Health: what each process says of itself while it runs, and what ends it when it no longer moves.

A thread writes WORKDIR/health/process-00000.json every few seconds, for `launch.status` and for the next start, and
looks whether the loop still moves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.config import PositiveFloat, PositiveInt, component
from framework.files.workdir import write_json
from framework.metrics.goodput import Goodput
from framework.terminal import interrupts

_STDERR = 2  # the descriptor: sys.stderr may be a test's
EXIT_PEER, EXIT_HANG, EXIT_REPLICAS = 5, 6, 7
# What takes as long as it takes: a corpus to tokenize, a large program to compile, weights to be read.
UNLIMITED = ("start", "data", "compile", "restore")


@component
class Health:
    """How processes look after themselves and each other.

    Args:
        connect_seconds: all processes of a run must have found each other within that time.
        heartbeat_seconds: a process that was not heard of for so long is dead, and the others end too.
        hang_seconds: a step, a batch of an evaluation or a save that takes longer ends the process, after its stacks
            were written to WORKDIR/health; None waits for ever. The first evaluation compiles within that time.
        replica_check_every: copies of the same state on different devices are compared every so many steps, and before
            every save; None never does.
        status_seconds: how often WORKDIR/health is written.
        canary: where anything is in host memory, a small model says first whether that computes the same; see
            framework.run.canary.
    """

    def __init__(
        self,
        *,
        connect_seconds: PositiveFloat = 300.0,
        heartbeat_seconds: PositiveFloat = 100.0,
        hang_seconds: PositiveFloat | None = 1800.0,
        replica_check_every: PositiveInt | None = 500,
        status_seconds: PositiveFloat = 10.0,
        canary: bool = True,
    ):
        self.connect_seconds, self.heartbeat_seconds = connect_seconds, heartbeat_seconds
        self.hang_seconds, self.replica_check_every = hang_seconds, replica_check_every
        self.status_seconds, self.canary = status_seconds, canary


class Pulse:
    """A process's sign of life, in a thread of its own, as a context.

    Args:
        folder: WORKDIR/health.
        process: which one, of how many.
        health: the options.
        goodput: where its time goes; a phase that starts is a move of the loop.
        last_words: called before the process ends for a hang, to let go of what it holds.
    """

    def __init__(
        self,
        folder: Path,
        process: int,
        num_processes: int,
        health: Health,
        goodput: Goodput,
        last_words: Callable[[], object] = lambda: None,
    ):
        self.path = folder / f"process-{process:05d}.json"
        if before := read(self.path):  # what the last start of this process said at its end
            stopped = before.get("exit") in (0, 128 + signal.SIGINT)  # as somebody wished: not for us to count
            goodput.carry_over(before.get("goodput", {}), 0.0 if stopped else time.time() - before["time"])
        self._health, self._goodput, self._last_words = health, goodput, last_words
        self._facts: dict[str, Any] = {
            "process": process,
            "num_processes": num_processes,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
            "attempt": 1 + (before or {}).get("attempt", 0),
            "interval": health.status_seconds,
            "hang_seconds": health.hang_seconds,
        }
        self._moved, self._seen = time.monotonic(), goodput.entered
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def note(self, **facts: Any) -> None:
        """The loop has moved; `facts` are said from now on: step, loss, tokens_per_second, saved, ..."""
        self._facts |= facts
        self._moved = time.monotonic()

    def write(self, **facts: Any) -> None:
        """Writes the file now. One that cannot be written is no reason to end a run: it is out of date, and says so."""
        self._facts |= facts
        with self._lock, contextlib.suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            phase, still = self._goodput.phase, self.still_for()
            now = {
                "time": time.time(),
                "moved": time.time() - still,
                "phase": phase,
                "limited": phase not in UNLIMITED,
            }
            facts = {**self._facts, **now, "goodput": self._goodput.totals()}
            special = {name for name, value in facts.items() if isinstance(value, float) and not math.isfinite(value)}
            write_json(self.path, {name: str(x) if name in special else x for name, x in facts.items()})

    def still_for(self) -> float:
        """Seconds since the loop moved."""
        return time.monotonic() - self._moved

    def __enter__(self) -> Pulse:
        with contextlib.suppress(ValueError, OSError):  # it may be closed
            faulthandler.enable(_STDERR)  # stacks for SIGABRT, which is how JAX ends a process
            faulthandler.register(signal.SIGUSR1, _STDERR)  # and when somebody asks
        self.write()
        self._thread.start()
        self._take_back = interrupts.at_end(lambda number, line: self.write(exit=128 + number, reason=line))
        return self

    def __exit__(self, *_: object) -> None:
        self._take_back()
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        limit, written = self._health.hang_seconds, time.monotonic()
        pause = min(1.0, self._health.status_seconds, (limit or 10.0) / 10)
        while not self._stop.wait(pause):
            before, self._seen = self._seen, self._goodput.entered
            if self._seen != before:
                self._moved = time.monotonic()
            if limit is not None and self._goodput.phase not in UNLIMITED and self.still_for() > limit:
                self._end(limit)
            if time.monotonic() - written > self._health.status_seconds:
                self.write()
                written = time.monotonic()

    def _end(self, limit: float) -> None:
        """Every thread's stack to stderr and into a file, then the process is gone, as what hangs cannot be unwound."""
        where = f"in phase {self._goodput.phase!r}, after step {self._facts.get('step', 0)}"
        message = f"process {self._facts['process']} has not moved for {limit:g} s (health.hang_seconds) {where}"
        print(f"error: {message}; the stacks of its threads:", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), open(self.path.with_suffix(".stacks.txt"), "a") as file:
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {message}", file=file, flush=True)
            faulthandler.dump_traceback(file)
        with contextlib.suppress(ValueError, OSError):
            faulthandler.dump_traceback(_STDERR)
        self.write(exit=EXIT_HANG, reason=message)
        with contextlib.suppress(Exception):
            self._last_words()
        os._exit(EXIT_HANG)


def read(path: Path) -> dict[str, Any] | None:
    """What a process said last; None: nothing that makes sense."""
    try:
        facts = json.loads(path.read_bytes())
        return facts if facts["time"] and facts["attempt"] else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
