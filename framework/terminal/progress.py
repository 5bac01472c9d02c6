"""Progress of a run: a live bar in a terminal, or a line per report elsewhere, and log.txt.

rich is imported when there is a terminal to draw on. Values come from the dict that goes to the
writers; one that is missing or not finite is shown as "-".
"""

import contextlib
import datetime
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

from framework.terminal import interrupts, phases
from framework.terminal.board import Phase
from framework.terminal.phase_views import SPINNER_FRAMES, is_terminal, spinner_text
from framework.terminal.tables import human_bytes, human_count
from framework.terminal.visible import visible


class Progress:
    """Shows where a run is. Use as a context manager, so that the terminal is always restored.

    Args:
      total_steps: the step at which the run ends.
      log_every: lines are for steps that this divides, and for the last; the bar is for every step.
      stream: where to show; standard output if None.
      log_path: a file that gets every line and message too, with no bar; None for no file.
      log_waits: that file is not touched before `write_log`; what comes until then is written
          first.
      item: what is counted, if no tokens.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        log_every: int = 1,
        stream: TextIO | None = None,
        log_path: Path | None = None,
        log_waits: bool = False,
        item: str = "token",
    ):
        self._total = total_steps
        self._log_every = log_every
        self._item = item
        self._unit = {"token": "tok/s", "image": "img/s"}[item]
        self._stream = sys.stdout if stream is None else stream
        self._log_path = log_path
        self._log: IO[bytes] | None = None
        # Lines that a full disk has kept from the log.
        self._unlogged = 0
        # Lines of the log until its file is opened; None from then on.
        self._waiting: list[str] | None = []
        if log_path is None or not log_waits:
            self.write_log()
        self._bar = _bar(self._stream, total_steps) if is_terminal(self._stream) else None
        # What is open until the end of the context.
        self._open = contextlib.ExitStack()
        self._drawn_at = -math.inf
        self._cancel_interrupted: Callable[[], None] = lambda: None

    def __enter__(self) -> "Progress":
        self._cancel_interrupted = interrupts.at_end(self._interrupted)
        if self._bar is not None:
            # Between steps the bar says what is being done: compiling, evaluating, saving.
            self._open.enter_context(phases.viewed_by(_BarView(self._bar)))
            self._bar.start()
        return self

    def _interrupted(self, number: int, line: str) -> None:
        """Writes to the log that a signal ends the process, and restores the terminal."""
        self._log_line(line)
        if self._bar is not None:
            self._bar.stop()

    def __exit__(self, *exception: object) -> None:
        self._cancel_interrupted()
        self._open.close()
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            self._log.close()

    def write_log(self) -> None:
        """Writes lines to the log from now on, those that wait first.

        Raises OSError: the file cannot be opened.
        """
        waiting_lines = self._waiting or []
        self._waiting = None
        if self._log_path is not None and self._log is None:
            # Not buffered, so that a line is in the file before the process can be killed.
            self._log = open(self._log_path, "a+b", buffering=0)  # noqa: SIM115 (see __exit__)
        for line in waiting_lines:
            self._log_line(line)

    def set_total(self, total_steps: int) -> None:
        """Changes the step at which the run ends."""
        self._total = total_steps
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=total_steps)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of a step.

        Shown are train/loss, train/learning_rate, train/grad_norm, train/tokens_per_second or
        images_per_second, train/mfu and memory/device_bytes.
        """
        fields = self._fields(step, metrics)
        is_last = step >= self._total
        if self._bar is not None:
            # The bar is one line, so the fields lose the padding that aligns lines.
            text = "  ".join(" ".join(field.split()) for field in fields)
            self._bar.update(self._bar.task_ids[0], completed=step, description=text, status="")
            # More often than 10 times a second is more than an eye can use.
            if time.monotonic() - self._drawn_at > 0.1 or is_last:
                self._bar.refresh()
                self._drawn_at = time.monotonic()
        if step % self._log_every == 0 or is_last:
            line = "   ".join(fields)
            self._log_line(line)
            if self._bar is None:
                self._show(line)

    def print(self, message: object) -> None:
        """Shows a message on lines of its own, above the bar."""
        text = visible(str(message))
        self._log_line(text)
        if self._bar is None:
            self._show(text)
        else:
            self._bar.console.print(text, markup=False, soft_wrap=True)

    def _log_line(self, line: str) -> None:
        if self._waiting is not None:
            self._waiting.append(line)
        if self._log is not None:
            self._append(self._log, line)

    def _append(self, log: IO[bytes], line: str) -> None:
        """Writes a line to the log, whole or not at all.

        A full disk is no reason to end a run: it is told where the run is shown, once, and in the
        log when there is room again.
        """
        data = f"{line}\n".encode()
        if self._unlogged:
            notice = f"({self._unlogged} lines are missing: the disk was full)\n"
            data = notice.encode() + data
        size = log.seek(0, os.SEEK_END)
        try:
            # An unbuffered file may take only a part at a time, as a nearly full disk does.
            while data:
                num_written = log.write(data)
                data = data[num_written:]
        except OSError as error:
            os.ftruncate(log.fileno(), size)
            self._unlogged += 1
            if self._unlogged == 1:
                consequence = "Training goes on; its lines are lost until then"
                self._show(f"log.txt cannot be written: {error.strerror}. {consequence}")
            return
        self._unlogged = 0

    def _show(self, line: str) -> None:
        """Prints a line, as far as there is room: the stream may be a file on a full disk."""
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            # The reader has left, which ends the run.
            raise
        except OSError:
            # Later lines are in log.txt alone.
            self._stream = open(os.devnull, "w")  # noqa: SIM115

    def _fields(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        # Fixed widths, so that lines are columns and the bar does not jump.
        step_width = len(str(self._total))
        loss = metrics.get("train/loss", math.nan)
        item_rate = human_count(metrics.get(f"train/{self._item}s_per_second"))
        mfu = metrics.get("train/mfu")
        memory = human_bytes(metrics.get("memory/device_bytes"))
        remaining_time = "-"
        step_rate = metrics.get("train/steps_per_second")
        if step_rate:
            remaining_seconds = round((self._total - step) / step_rate)
            remaining_time = str(datetime.timedelta(seconds=remaining_seconds))
        fields = [
            f"step {step:>{step_width}}/{self._total}",
            f"loss {loss:8.4f}",
        ]
        rate = metrics.get("train/learning_rate")
        norm = metrics.get("train/grad_norm")
        # An optimizer may have no learning rate that it names.
        if rate is not None:
            fields.append(f"lr {rate:8.2e}")
        if norm is not None:
            fields.append(f"norm {norm:8.3g}")
        fields.append(f"{item_rate:>6} {self._unit}")
        # A device whose peak is not known has no MFU.
        if mfu is not None:
            fields.append(f"MFU {mfu:6.1%}")
        fields.append(f"mem {memory:>11}")
        fields.append(f"left {remaining_time:>8}")
        return fields


class _BarView:
    """The phases of a run in its bar, which sees to other output itself; see `framework.terminal.phases.View`."""

    interval = 0.1
    takes_lines = False

    def __init__(self, bar: Any):
        self._bar = bar
        self._turn = 0

    def show(self, phase: Phase, seconds: float) -> None:
        """See `View`."""
        self._turn += 1
        frame = SPINNER_FRAMES[self._turn % len(SPINNER_FRAMES)]
        self._write(spinner_text(phase, seconds, frame))

    def end(self, phase: Phase, seconds: float, *, completed: bool) -> None:
        """See `View`."""
        self._write("")

    def aside(self) -> None:
        """See `View`: rich puts other output above the bar."""

    def _write(self, text: str) -> None:
        self._bar.update(self._bar.task_ids[0], status=text, refresh=True)


def _bar(stream: IO[str], total_steps: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.fields[status]}", markup=False, style="yellow"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        console=Console(file=stream, highlight=False),
        # It would take a thread, and its time from a step on a small machine.
        auto_refresh=False,
        expand=True,
    )
    bar.add_task("", total=total_steps, status="starting")
    return bar
