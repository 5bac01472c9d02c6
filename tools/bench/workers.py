"""Taking turns: each contestant is a separate long-lived process, and only one of them computes at a time.

In one process the thread pools of XLA and torch would compete for the cores. The driver (`Worker`) writes the number of
steps to a contestant's stdin, and reads one line of JSON when they are done; the contestant's side is a `Channel`.
Uses only Python's standard library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

ROOT = Path(__file__).parents[2]
CLOSE_S = 60.0  # a contestant that is compiling reads its stdin only afterwards


class ContestantError(RuntimeError):
    """A contestant could not start, or stopped; the message is its last output."""


@dataclass(frozen=True)
class Hello:
    """Report that a contestant sends before its first step."""

    parameters: int
    tokens_per_step: int
    versions: dict[str, str]


@dataclass(frozen=True)
class TimedRun:
    """One turn: wall-clock seconds, seconds of all cores together, and the loss of a step near its end."""

    seconds: float
    cpu_seconds: float
    loss: float


class RunClock:
    """Wall-clock and processor time since construction."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def timed_run(self, loss: float) -> TimedRun:
        """Return the turn that ends now."""
        return TimedRun(time.perf_counter() - self._wall, time.process_time() - self._cpu, loss)


class Contestant(Protocol):
    """A program that trains."""

    def hello(self) -> Hello:
        """Report the model size, tokens per step and versions."""
        ...

    def run(self, steps: int) -> float:
        """Run and finish `steps` steps; return the loss of the last one."""
        ...


class Channel:
    """The contestant's end. All other output of the contestant goes to stderr."""

    def __init__(self, source: TextIO, sink: TextIO):
        self._source, self._sink = source, sink

    @classmethod
    def from_process(cls) -> Channel:
        """Use this process's stdin and stdout; anything else written to stdout then goes to stderr."""
        sink = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(sys.stdin, sink)

    def send(self, message: Hello | TimedRun) -> None:
        """Send one line."""
        print(json.dumps(asdict(message)), file=self._sink, flush=True)

    def receive(self) -> int | None:
        """Return the number of steps of the next turn, or None if there is none."""
        line = self._source.readline().strip()
        return int(line) if line else None


def serve(contestant: Contestant, channel: Channel) -> None:
    """Take turns until the driver exits."""
    channel.send(contestant.hello())
    while (steps := channel.receive()) is not None:
        clock = RunClock()
        channel.send(clock.timed_run(contestant.run(steps)))


class Worker:
    """The driver's end: a contestant in a separate process.

    Args:
        arguments: arguments of `python`.
        log: file to write its stderr to.
        environment: variables to add to this process's environment.
    """

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str]):
        self._log = log
        self._started = time.perf_counter()
        with open(log, "w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.hello = Hello(**self._read_message())

    def run(self, steps: int) -> TimedRun:
        """Run one turn.

        Raises:
            ContestantError: the contestant died.
        """
        assert self._process.stdin is not None
        try:
            print(steps, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise ContestantError(self._last_output()) from None
        return TimedRun(**self._read_message())

    def seconds_since_start(self) -> float:
        """Return the seconds since the process was started."""
        return time.perf_counter() - self._started

    def close(self) -> None:
        """End the process and wait for it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read_message(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ContestantError(self._last_output())
        return json.loads(line)

    def _last_output(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip() if lines else 'ended without a word'} (see {self._log})"


def rotate(names: list[str], rounds: int) -> Iterator[list[str]]:
    """Yield the order of each round, forward and then reversed, so that slow changes of the machine cancel out."""
    for index in range(rounds):
        yield names if index % 2 == 0 else names[::-1]
