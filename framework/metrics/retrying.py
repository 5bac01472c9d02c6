"""Keeps a run going while the disk is full: rows of metrics wait in memory until there is space.

The user gets one message when this starts and one when it is over. This module imports only the standard library.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from plimsoll.framework.metrics.writers import Writer

# Maximum number of waiting rows. Beyond it the oldest are dropped, because memory is limited, too.
MAX_ROWS = 10_000
RETRY_SECONDS = 10.0


class RetryingWriter:
    """Passes rows to another writer, and keeps those that it cannot write (OSError).

    Those rows are written, in order, as soon as writing succeeds again.

    Args:
        writer: the underlying writer. If its `write` fails, it must not leave a part of the row behind.
        name: name of the writer in messages, such as "metrics.jsonl".
        log: shows a one-line message to the user.
    """

    def __init__(self, writer: Writer, name: str, log: Callable[[str], object]):
        self._writer = writer
        self._name = name
        self._log = log
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        # The step of a `resume` that is waiting, too.
        self._resume_from: int | None = None
        self._given_up = 0
        # Time of the last failure by the monotonic clock, in seconds; None if the last write succeeded.
        self._failed_at: float | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row or queue it, see `Writer.write`. Never raises OSError."""
        self._waiting.append((step, metrics))
        if len(self._waiting) > MAX_ROWS:
            self._waiting.popleft()
            self._given_up += 1
        # While the disk is full, retrying at every step would only slow down the loop.
        if self._failed_at is None or time.monotonic() - self._failed_at >= RETRY_SECONDS:
            self._write_waiting()

    def resume(self, from_step: int) -> None:
        """Resume or queue the resume, see `Writer.resume`. Never raises OSError."""
        self._waiting = deque((step, row) for step, row in self._waiting if step <= from_step)
        # If two resumes are waiting, the one with the earlier step drops the rows of both.
        if self._resume_from is None:
            self._resume_from = from_step
        else:
            self._resume_from = min(self._resume_from, from_step)
        self._write_waiting()

    def close(self) -> None:
        """Write the waiting rows, or report which are lost. Never raises OSError."""
        if self._failed_at is not None:
            self._write_waiting()
        num_lost = len(self._waiting) + self._given_up
        if num_lost:
            steps = ""
            if self._waiting:
                first_step, _ = self._waiting[0]
                last_step, _ = self._waiting[-1]
                steps = f", of steps {first_step} to {last_step}"
            self._log(f"{self._name}: {num_lost} rows were lost{steps}")
            self._waiting.clear()
            self._given_up = 0
        try:
            self._writer.close()
        except OSError as error:
            self._log(f"{self._name} may lack its last rows: {error.strerror or error}")

    def _write_waiting(self) -> None:
        num_waiting = len(self._waiting)
        try:
            if self._resume_from is not None:
                self._writer.resume(self._resume_from)
                self._resume_from = None
            while self._waiting:
                step, metrics = self._waiting[0]
                self._writer.write(step, metrics)
                # Remove the row only now, so that it keeps waiting if it cannot be written.
                self._waiting.popleft()
        except OSError as error:
            if self._failed_at is None:
                problem = f"{self._name} cannot be written: {error.strerror or error}"
                self._log(
                    f"{problem}. Training continues; up to {MAX_ROWS:,} rows wait in memory and are "
                    "written as soon as writing succeeds again"
                )
            self._failed_at = time.monotonic()
            return
        if self._failed_at is not None:
            self._failed_at = None
            losses = "none was lost"
            if self._given_up:
                losses = f"{self._given_up} rows before them were lost"
            rows = f"the {num_waiting} rows that were waiting"
            self._log(f"{self._name} is written again, with {rows}; {losses}")
            self._given_up = 0
