"""Taking turns: each contestant is a process of its own, kept alive, and only one of them computes at a time.

In one process the thread pools of XLA and torch would fight for the cores. The driver (`Worker`) writes the number of
steps to a contestant's stdin, and reads one line of JSON when they are done; the contestant's side is a `Channel`.
Python's standard library only.
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
CLOSE_S = 60.0  # one that compiles looks at its stdin only afterwards


class ContestantError(RuntimeError):
    """A contestant could not start or stopped; the message is what it said last."""


@dataclass(frozen=True)
class Hello:
    """What a contestant says of itself before its first step."""

    parameters: int
    tokens_per_step: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Turn:
    """One turn: wall seconds, seconds of all cores together, and the loss of a step near its end."""

    seconds: float
    cpu_seconds: float
    loss: float


class Clock:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def turn(self, loss: float) -> Turn:
        """The turn that ends now."""
        return Turn(time.perf_counter() - self._wall, time.process_time() - self._cpu, loss)


class Contestant(Protocol):
    """Something that trains."""

    def hello(self) -> Hello:
        """What it is."""
        ...

    def run(self, steps: int) -> float:
        """So many steps, finished when it returns; the loss of the last one."""
        ...


class Channel:
    """The contestant's end. Whatever else it prints goes to stderr."""

    def __init__(self, source: TextIO, sink: TextIO):
        self._source, self._sink = source, sink

    @classmethod
    def of_process(cls) -> Channel:
        """stdin and stdout of this process; stdout is then stderr for everybody else."""
        sink = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(sys.stdin, sink)

    def send(self, message: Hello | Turn) -> None:
        """One line."""
        print(json.dumps(asdict(message)), file=self._sink, flush=True)

    def receive(self) -> int | None:
        """The number of steps of the next turn; None when there is none."""
        line = self._source.readline().strip()
        return int(line) if line else None


def serve(contestant: Contestant, channel: Channel) -> None:
    """Takes turns until the driver leaves."""
    channel.send(contestant.hello())
    while (steps := channel.receive()) is not None:
        clock = Clock()
        channel.send(clock.turn(contestant.run(steps)))


class Worker:
    """The driver's end: a contestant in a process of its own.

    Args:
        arguments: of `python`.
        log: where its stderr goes.
        environment: beside this process's own.
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
        self.hello = Hello(**self._read())

    def run(self, steps: int) -> Turn:
        """One turn.

        Raises:
            ContestantError: it died.
        """
        assert self._process.stdin is not None
        try:
            print(steps, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise ContestantError(self._last_words()) from None
        return Turn(**self._read())

    def seconds_since_start(self) -> float:
        """Since the process was started."""
        return time.perf_counter() - self._started

    def close(self) -> None:
        """Ends the process, and waits for it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ContestantError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip() if lines else 'ended without a word'} (see {self._log})"


def rotate(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round: there and back, so that what changes slowly favours nobody."""
    for index in range(rounds):
        yield names if index % 2 == 0 else names[::-1]
