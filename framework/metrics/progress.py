"""Progress: a live bar in a terminal, one readable line per report elsewhere, and log.txt in both cases.

Imports framework.metrics.tables; rich is imported when there is a terminal to draw on. Values come from the same dict
that goes to the writers: train/loss, train/tokens_per_second, train/mfu, memory/device_bytes, train/steps_per_second.
A value that is missing, None, NaN or of a strange type is shown as it is or as "-": showing must never stop a run.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from framework.metrics.tables import human_bytes, human_count, human_seconds


class Progress:
    """Shows where a run is. Use as a context manager, so that the terminal is given back on any way out.

    Args:
      total_steps: the step at which the run ends.
      start_step: the step it starts from (after a resume).
      log_every: off a terminal, a line for every step that this divides, and for the last.
      stream: where to show; standard output if None.
      log_path: a file that gets every line and message too, with no bar; None for no file.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        log_every: int = 1,
        stream: IO[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._total = total_steps
        self._log_every = max(1, log_every)
        self._stream = sys.stdout if stream is None else stream
        self._log = open(log_path, "a", encoding="utf-8") if log_path is not None else None  # noqa: SIM115 (see close)
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time of the first update: the rate leaves compiling out
        self._shown: int | None = None
        self._bar = _Bar(self._stream, start_step, total_steps) if _is_terminal(self._stream) else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows `metrics` of `step`."""
        if self._first is None:
            self._first = (step, self._clock())
        fields = self._fields(step, metrics)
        if self._bar is not None:
            self._bar.update(step, fields)
        if (step % self._log_every == 0 or step >= self._total) and step != self._shown:
            self._shown = step
            line = "   ".join(field for field in fields if field)
            if self._bar is None:
                self._write(self._stream, line)
            self._write(self._log, line)

    def print(self, *messages: object) -> None:
        """Shows a message on lines of its own, above the bar."""
        text = " ".join(str(message) for message in messages)
        if self._bar is not None:
            self._bar.print(text)
        else:
            self._write(self._stream, text)
        self._write(self._log, text)

    def status(self, what: str) -> None:
        """Says what is being done when it is no step: compiling, evaluating, saving. "" ends it. Bar only."""
        if self._bar is not None:
            self._bar.status(what)

    def close(self) -> None:
        """Takes the bar down, leaving its last state on the screen. A second call does nothing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _fields(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        # Fixed widths, so that lines are columns and the bar does not jump.
        width = len(str(self._total))
        loss = metrics.get("train/loss")
        rate, mfu, memory = (
            _finite(metrics.get(name)) for name in ("train/tokens_per_second", "train/mfu", "memory/device_bytes")
        )
        return [
            f"step {step:>{width}}/{self._total}",
            f"loss {_loss(loss):>8}",
            f"{human_count(rate):>6} tok/s",
            f"MFU {mfu * 100:5.1f}%" if mfu is not None else "",
            f"mem {human_bytes(memory):>10}",
            f"left {human_seconds(self._seconds_left(step, metrics)):>7}",
        ]

    def _seconds_left(self, step: int, metrics: Mapping[str, Any]) -> float | None:
        rate = _finite(metrics.get("train/steps_per_second"))
        if rate is None and self._first is not None and step > self._first[0]:
            seconds = self._clock() - self._first[1]
            rate = (step - self._first[0]) / seconds if seconds > 0 else None
        return max(0, self._total - step) / rate if rate else None

    @staticmethod
    def _write(file: IO[str] | None, text: str) -> None:
        if file is None:
            return
        try:
            file.write(text + "\n")
        except UnicodeEncodeError:  # a stream in the C locale
            file.write(text.encode("ascii", "replace").decode() + "\n")
        file.flush()


class _Bar:
    """rich's bar, redrawn from `update` (no thread: it would take time from a step on a small machine)."""

    def __init__(self, stream: IO[str], start_step: int, total_steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._last_drawn = -math.inf
        self._progress = RichProgress(
            TextColumn("{task.fields[status]}", markup=False, style="yellow"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream, highlight=False),
            auto_refresh=False,
            expand=True,
        )
        self._task = self._progress.add_task("", total=max(1, total_steps), completed=start_step, status="starting")
        self._total = total_steps
        self._progress.start()
        self._progress.refresh()

    def update(self, step: int, fields: list[str]) -> None:
        description = "  ".join(" ".join(field.split()) for field in fields if field)
        self._progress.update(self._task, completed=step, description=description, status="")
        now = time.perf_counter()
        if now - self._last_drawn > 0.1 or step >= self._total:  # ten times a second is as much as an eye can use
            self._last_drawn = now
            self._progress.refresh()

    def status(self, what: str) -> None:
        self._progress.update(self._task, status=what)
        self._progress.refresh()

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.update(self._task, status="")
        self._progress.refresh()
        self._progress.stop()


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _loss(value: Any) -> str:
    if value is None:
        return "-"
    try:
        return f"{float(value):.4f}"  # "nan" and "inf" for those
    except (TypeError, ValueError, OverflowError):
        return str(value)[:8]
