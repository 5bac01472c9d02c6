"""A disk that is full while a run writes metrics: the rows wait for room, and the run goes on.

What is done about it is said once when it begins and once when it is over. Standard library only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from framework.metrics.writers import Writer

MAX_ROWS = 10_000  # that wait; beyond them the oldest are given up, as memory is not without end either
RETRY_SECONDS = 10.0


class PatientWriter:
    """Hands rows to `writer`; those that it cannot write (OSError) wait and are written, in order, once it can.

    Args:
        writer: `write` must leave nothing of a row that it fails to write.
        name: what people call it: "metrics.jsonl".
        say: tells a person something, a line at a time.
    """

    def __init__(self, writer: Writer, name: str, say: Callable[[str], object]):
        self._writer, self._name, self._say = writer, name, say
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._resume_from: int | None = None  # a `resume` that waits too
        self._given_up = 0
        self._failed_at: float | None = None  # by the monotonic clock; None: the last write succeeded

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """As Writer.write; never raises OSError."""
        self._waiting.append((step, metrics))
        if len(self._waiting) > MAX_ROWS:
            self._waiting.popleft()
            self._given_up += 1
        if self._failed_at is None or time.monotonic() - self._failed_at >= RETRY_SECONDS:
            self._write_waiting()

    def resume(self, from_step: int) -> None:
        """As Writer.resume; never raises OSError."""
        self._waiting = deque((step, row) for step, row in self._waiting if step <= from_step)
        self._resume_from = from_step if self._resume_from is None else min(self._resume_from, from_step)
        self._write_waiting()

    def close(self) -> None:
        """Writes what waits, or says what is lost; never raises OSError."""
        if self._failed_at is not None:
            self._write_waiting()
        if self._waiting or self._given_up:
            steps = f", of steps {self._waiting[0][0]} to {self._waiting[-1][0]}" if self._waiting else ""
            self._say(f"{self._name}: {len(self._waiting) + self._given_up} rows are lost{steps}")
            self._waiting.clear()
            self._given_up = 0
        try:
            self._writer.close()
        except OSError as error:
            self._say(f"{self._name} may lack its last rows: {error.strerror or error}")

    def _write_waiting(self) -> None:
        waited = len(self._waiting)
        try:
            if self._resume_from is not None:
                self._writer.resume(self._resume_from)
                self._resume_from = None
            while self._waiting:
                self._writer.write(*self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if self._failed_at is None:
                self._say(
                    f"{self._name} cannot be written: {error.strerror or error}. Training goes on; its rows wait in "
                    f"memory, up to {MAX_ROWS:,} of them, and are written when there is room again"
                )
            self._failed_at = time.monotonic()
            return
        if self._failed_at is not None:
            self._failed_at = None
            lost = f"; {self._given_up} rows before them are lost" if self._given_up else "; none is lost"
            self._say(f"{self._name} is written again, with the {waited} rows that had waited{lost}")
            self._given_up = 0
