"""Writes metrics while a disk may be full: the rows wait for room, and the run goes on.

A person is told once when that begins and once when it is over. Standard library only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from framework.metrics.writers import Writer

# So many rows wait; beyond them the oldest are given up, as memory is limited too.
MAX_ROWS = 10_000
RETRY_SECONDS = 10.0


class PatientWriter:
    """Hands rows to another writer, and keeps those that it cannot write (OSError).

    They are written, in order, once it can.

    Args:
        writer: its `write` must leave nothing of a row that it fails to write.
        name: the writer's name in messages, such as "metrics.jsonl".
        say: shows a person a message of one line.
    """

    def __init__(self, writer: Writer, name: str, say: Callable[[str], object]):
        self._writer = writer
        self._name = name
        self._say = say
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque()
        # The step of a `resume` that waits too.
        self._resume_from: int | None = None
        self._given_up = 0
        # Seconds by the monotonic clock; None if the last write succeeded.
        self._failed_at: float | None = None

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Does what Writer.write does; never raises OSError."""
        self._waiting.append((step, metrics))
        if len(self._waiting) > MAX_ROWS:
            self._waiting.popleft()
            self._given_up += 1
        # A try at every step would only slow the loop down while the disk is full.
        if self._failed_at is None or time.monotonic() - self._failed_at >= RETRY_SECONDS:
            self._write_waiting()

    def resume(self, from_step: int) -> None:
        """Does what Writer.resume does; never raises OSError."""
        self._waiting = deque((step, row) for step, row in self._waiting if step <= from_step)
        # Of two that wait, the earlier step drops the rows of both.
        if self._resume_from is None:
            self._resume_from = from_step
        else:
            self._resume_from = min(self._resume_from, from_step)
        self._write_waiting()

    def close(self) -> None:
        """Writes the rows that wait, or says which are lost; never raises OSError."""
        if self._failed_at is not None:
            self._write_waiting()
        num_lost = len(self._waiting) + self._given_up
        if num_lost:
            steps = ""
            if self._waiting:
                first_step, _ = self._waiting[0]
                last_step, _ = self._waiting[-1]
                steps = f", of steps {first_step} to {last_step}"
            self._say(f"{self._name}: {num_lost} rows are lost{steps}")
            self._waiting.clear()
            self._given_up = 0
        try:
            self._writer.close()
        except OSError as error:
            self._say(f"{self._name} may lack its last rows: {error.strerror or error}")

    def _write_waiting(self) -> None:
        num_waiting = len(self._waiting)
        try:
            if self._resume_from is not None:
                self._writer.resume(self._resume_from)
                self._resume_from = None
            while self._waiting:
                step, metrics = self._waiting[0]
                self._writer.write(step, metrics)
                # Only now, so that a row that cannot be written goes on waiting.
                self._waiting.popleft()
        except OSError as error:
            if self._failed_at is None:
                problem = f"{self._name} cannot be written: {error.strerror or error}"
                self._say(
                    f"{problem}. Training goes on; its rows wait in memory, up to {MAX_ROWS:,} of "
                    "them, and are written when there is room again"
                )
            self._failed_at = time.monotonic()
            return
        if self._failed_at is not None:
            self._failed_at = None
            losses = "none is lost"
            if self._given_up:
                losses = f"{self._given_up} rows before them are lost"
            rows = f"the {num_waiting} rows that had waited"
            self._say(f"{self._name} is written again, with {rows}; {losses}")
            self._given_up = 0
