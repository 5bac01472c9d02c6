"""Health: each process reports its status while it runs, and exits when its loop hangs.

A thread writes WORKDIR/health/process-00000.json every few seconds, for `plimsoll status` and for the next start, and
checks whether the loop still makes progress.
"""

from __future__ import annotations

import contextlib
import faulthandler
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

from plimsoll.framework.config import PositiveFloat, PositiveInt, component
from plimsoll.framework.devices.host import peak_rss_bytes, rss_bytes
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.metrics.goodput import Goodput
from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.exit_codes import COMPLETED, ExitCode

# Use the descriptor, because in a test sys.stderr may be an object without one.
_STDERR = 2
# Phases without a time limit: they may tokenize a corpus, compile a large program or read weights.
UNLIMITED = ("start", "data", "compile", "restore")

# Fields that `read` checks, by type.
_NUMBERS = ("process", "num_processes", "pid", "attempt", "time", "moved", "interval")
_TEXTS = ("host", "phase")
_OPTIONAL = ("step", "max_steps", "loss", "exit", "reason", "hang_seconds", "tokens_per_second", "images_per_second")


@component
class Health:
    """Health checks of processes, by themselves and by each other.

    Args:
        connect_seconds: time limit for all processes of a run to find each other.
        heartbeat_seconds: a process without a heartbeat for this long counts as dead, and the others exit, too.
        hang_seconds: time limit for a step, a batch of an evaluation, or a save. After it, the process writes its
            stacks to WORKDIR/health and exits. None means no limit. The first evaluation also compiles within that
            time.
        replica_check_every: number of steps between comparisons of state that is replicated on several devices. It is
            also compared before every save. None disables the check.
        status_seconds: seconds between updates of WORKDIR/health.
        offload_self_test: if anything is offloaded, run the offload self-test first, which checks on a small model that
            the results do not change; see framework.run.offload_self_test.
    """

    def __init__(
        self,
        *,
        connect_seconds: PositiveFloat = 300.0,
        heartbeat_seconds: PositiveFloat = 100.0,
        hang_seconds: PositiveFloat | None = 1800.0,
        replica_check_every: PositiveInt | None = 500,
        status_seconds: PositiveFloat = 10.0,
        offload_self_test: bool = True,
    ):
        self.connect_seconds = connect_seconds
        self.heartbeat_seconds = heartbeat_seconds
        self.hang_seconds = hang_seconds
        self.replica_check_every = replica_check_every
        self.status_seconds = status_seconds
        self.offload_self_test = offload_self_test


class Pulse:
    """Writes a process's status file in a separate thread. Use it as a context manager.

    Args:
        folder: WORKDIR/health.
        process: number of this process.
        num_processes: number of processes.
        health: the options.
        goodput: counts the time of the process. Entering a phase counts as progress of the loop.
        on_hang: called before the process exits because of a hang, to release resources.
    """

    def __init__(
        self,
        folder: Path,
        process: int,
        num_processes: int,
        health: Health,
        goodput: Goodput,
        on_hang: Callable[[], object] = lambda: None,
    ):
        self.path = folder / f"process-{process:05d}.json"
        # The last report of the previous start of this process.
        previous = read(self.path)
        if previous:
            # If the run completed or the user stopped it, the time until this start does not count as downtime.
            is_stopped = previous.get("exit") in (*COMPLETED, ExitCode.INTERRUPTED)
            down_seconds = 0.0 if is_stopped else time.time() - previous["time"]
            goodput.carry_over(previous.get("goodput", {}), down_seconds)
        previous_attempt = previous.get("attempt", 0) if previous else 0
        self._health = health
        self._goodput = goodput
        self._on_hang = on_hang
        self._facts: dict[str, object] = {
            "process": process,
            "num_processes": num_processes,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "identity": identify_process(os.getpid()),
            "started": time.time(),
            "attempt": 1 + previous_attempt,
            "interval": health.status_seconds,
            "hang_seconds": health.hang_seconds,
        }
        # Time of the loop's last progress, by the monotonic clock.
        self._moved = time.monotonic()
        # Number of phases that the loop had entered at the thread's last check.
        self._seen = goodput.entered
        # The thread and the loop both write the file.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._cancel_write_end: Callable[[], object] = lambda: None

    def note(self, **facts: object) -> None:
        """Record progress of the loop, and facts for the file from now on: step, loss, tokens_per_second, saved, ..."""
        self._facts |= facts
        self._moved = time.monotonic()

    def write(self, **facts: object) -> None:
        """Write the file now, with additional facts.

        If the file cannot be written, the run continues. The time in the file shows that it is outdated.
        """
        self._facts |= facts
        with self._lock, contextlib.suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            phase = self._goodput.phase
            still_seconds = self.still_for()
            report = dict(self._facts)
            report["time"] = time.time()
            # Use the wall clock, because other processes read it.
            report["moved"] = time.time() - still_seconds
            report["phase"] = phase
            report["limited"] = phase not in UNLIMITED
            report["goodput"] = self._goodput.totals()
            report["rss_bytes"] = rss_bytes()
            report["rss_peak_bytes"] = peak_rss_bytes()
            # A loss may be NaN or infinite, which JSON cannot represent.
            for name, value in report.items():
                if isinstance(value, float) and not math.isfinite(value):
                    report[name] = str(value)
            write_json(self.path, report)

    def still_for(self) -> float:
        """Return the seconds since the loop's last progress."""
        return time.monotonic() - self._moved

    def __enter__(self) -> Pulse:
        # The descriptor may be closed.
        with contextlib.suppress(ValueError, OSError):
            # Dump the stacks on SIGABRT, with which JAX ends a process.
            faulthandler.enable(_STDERR)
            # Dump them on request, too.
            faulthandler.register(signal.SIGUSR1, _STDERR)
        self.write()
        self._thread.start()
        self._cancel_write_end = interrupts.register_cleanup(
            lambda number, line: self.write(exit=128 + number, reason=line)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel_write_end()
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        limit = self._health.hang_seconds
        written_at = time.monotonic()
        # Check at least every tenth of the limit, so that a hang is detected soon after it.
        pause = min(1.0, self._health.status_seconds, (limit or 10.0) / 10)
        while not self._stop.wait(pause):
            seen = self._seen
            self._seen = self._goodput.entered
            if self._seen != seen:
                self._moved = time.monotonic()
            phase = self._goodput.phase
            if limit is not None and phase not in UNLIMITED and self.still_for() > limit:
                self._end(limit)
            if time.monotonic() - written_at > self._health.status_seconds:
                self.write()
                written_at = time.monotonic()

    def _end(self, limit: float) -> None:
        """Write the stacks of all threads to stderr and to a file, and exit.

        The process exits with os._exit, because a hanging thread cannot be unwound.
        """
        where = f"in phase {self._goodput.phase!r}, after step {self._facts.get('step', 0)}"
        process = self._facts["process"]
        message = f"process {process} has made no progress for {limit:g} s (health.hang_seconds) {where}"
        print(f"error: {message}; the stacks of its threads:", file=sys.stderr, flush=True)
        stacks_path = self.path.with_suffix(".stacks.txt")
        with contextlib.suppress(OSError), open(stacks_path, "a") as file:
            now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            # Flush, because faulthandler writes to the descriptor and bypasses Python's buffer.
            print(f"{now} {message}", file=file, flush=True)
            faulthandler.dump_traceback(file)
        with contextlib.suppress(ValueError, OSError):
            faulthandler.dump_traceback(_STDERR)
        self.write(exit=ExitCode.HANG, reason=message)
        with contextlib.suppress(Exception):
            self._on_hang()
        os._exit(ExitCode.HANG)


def identify_process(pid: int) -> str:
    """Return a string that identifies a process even if its pid is reused or also occurs in a container.

    It consists of the pid namespace and the start time of the process by the kernel's clock (proc(5), field 22 of
    stat). It is "" if the process has ended.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        # The second field, the program's name, may contain spaces and parentheses.
        state, *fields = stat.rpartition(")")[2].split()
        if state in ("Z", "X"):
            return ""
        return f"{os.readlink('/proc/self/ns/pid')} {fields[18]}"
    except (OSError, IndexError):
        return ""


def has_exited(facts: dict[str, Any]) -> bool:
    """Return whether the process that wrote the facts has ended; False if that cannot be determined from here."""
    known = str(facts.get("identity", ""))
    this = identify_process(os.getpid())
    is_same_host = facts.get("host") == socket.gethostname()
    if not known or not this or not is_same_host or known.split()[0] != this.split()[0]:
        return False
    return identify_process(facts["pid"]) != known


def read(path: Path) -> dict[str, Any] | None:
    """Return the last report of a process; None if there is no valid one."""
    try:
        facts = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict):
        return None
    are_numbers = all(isinstance(facts.get(name), int | float) for name in _NUMBERS)
    are_texts = all(isinstance(facts.get(name), str) for name in _TEXTS)
    seconds = facts.get("goodput") or {}
    are_seconds = isinstance(seconds, dict) and all(isinstance(value, int | float) for value in seconds.values())
    others_fit = all(isinstance(facts.get(name), int | float | str | None) for name in _OPTIONAL)
    return facts if are_numbers and are_texts and are_seconds and others_fit else None
