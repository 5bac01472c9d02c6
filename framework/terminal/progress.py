"""Progress of a run: a live bar on a terminal, or one line per report elsewhere, and log.txt.

rich is imported only if there is a terminal to draw on. Values come from the same dict of metrics that the writers
receive; a value that is missing or not finite is shown as "-".
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

from plimsoll.framework.terminal import interrupts, phases
from plimsoll.framework.terminal.escaping import escape_control_chars
from plimsoll.framework.terminal.phase_views import SPINNER_FRAMES, is_terminal, spinner_text
from plimsoll.framework.terminal.phases import Phase
from plimsoll.framework.terminal.tables import human_bytes, human_count

if TYPE_CHECKING:
    import rich.progress


class Progress:
    """Shows the progress of a run. Use it as a context manager, so that the terminal is always restored.

    Args:
        total_steps: the step at which the run ends.
        log_every: write a line at steps divisible by this and at the last one. The bar is updated at every step.
        stream: output stream; standard output if None.
        log_path: file that also receives every line and message, without the bar; None for no file.
        log_waits: do not touch the file before `write_log`; keep earlier lines until then and write them first.
        item: unit of data to count: "token" or "image".
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
        # Number of lines that are missing in the log because the disk was full.
        self._unlogged = 0
        # Lines to write when the log file is opened; None once it is open.
        self._waiting: list[str] | None = []
        if log_path is None or not log_waits:
            self.write_log()
        self._bar = _create_bar(self._stream, total_steps) if is_terminal(self._stream) else None
        # Contexts to close when this one exits.
        self._open = contextlib.ExitStack()
        self._drawn_at = -math.inf
        self._cancel_interrupted: Callable[[], object] = lambda: None

    def __enter__(self) -> Progress:
        self._cancel_interrupted = interrupts.register_cleanup(self._handle_interrupt)
        if self._bar is not None:
            # Between steps the bar shows the current phase: compiling, evaluating, saving.
            self._open.enter_context(phases.use_view(_BarView(self._bar)))
            self._bar.start()
        return self

    def _handle_interrupt(self, number: int, line: str) -> None:
        """Log that a signal ends the process, and restore the terminal."""
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
        """Open the log, write the lines that were waiting, and log all further lines immediately.

        Raises OSError if the file cannot be opened.
        """
        waiting_lines = self._waiting or []
        self._waiting = None
        if self._log_path is not None and self._log is None:
            # Unbuffered, so that a line is in the file before the process can be killed.
            self._log = open(self._log_path, "a+b", buffering=0)  # noqa: SIM115 (see __exit__)
        for line in waiting_lines:
            self._log_line(line)

    def set_total(self, total_steps: int) -> None:
        """Change the step at which the run ends."""
        self._total = total_steps
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=total_steps)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step.

        The line shows train/loss, train/learning_rate, train/grad_norm, train/tokens_per_second or images_per_second,
        train/mfu, memory/device_bytes, memory/rss_bytes and, computed from train/steps_per_second, the remaining time.
        """
        fields = self._fields(step, metrics)
        is_last = step >= self._total
        if self._bar is not None:
            # The bar is one line, so the fields lose the padding that aligns lines.
            text = "  ".join(" ".join(field.split()) for field in fields)
            self._bar.update(self._bar.task_ids[0], completed=step, description=text, status="")
            # Redraw at most 10 times per second: the eye cannot follow more.
            if time.monotonic() - self._drawn_at > 0.1 or is_last:
                self._bar.refresh()
                self._drawn_at = time.monotonic()
        # The bar shows every step, but a log of every step would be long.
        if step % self._log_every == 0 or is_last:
            line = "   ".join(fields)
            self._log_line(line)
            if self._bar is None:
                self._show(line)

    def print(self, message: object) -> None:
        """Show a message on separate lines, above the bar."""
        text = escape_control_chars(str(message))
        self._log_line(text)
        if self._bar is None:
            self._show(text)
        else:
            self._bar.console.print(text, markup=False, soft_wrap=True)

    def _log_line(self, line: str) -> None:
        """Write a line to the log, completely or not at all; before `write_log`, keep it.

        A full disk does not end a run. It is reported once in the run's output, and in the log when there is space
        again.
        """
        if self._waiting is not None:
            self._waiting.append(line)
        log = self._log
        if log is None:
            return
        data = f"{line}\n".encode()
        if self._unlogged:
            notice = f"({self._unlogged} lines are missing: the disk was full)\n"
            data = notice.encode() + data
        size = log.seek(0, os.SEEK_END)
        try:
            # An unbuffered write may be partial, for example on a nearly full disk.
            while data:
                num_written = log.write(data)
                data = data[num_written:]
        except OSError as error:
            os.ftruncate(log.fileno(), size)
            self._unlogged += 1
            if self._unlogged == 1:
                consequence = "Training continues; lines are missing in log.txt until it can be written again"
                self._show(f"log.txt cannot be written: {error.strerror}. {consequence}")
            return
        self._unlogged = 0

    def _show(self, line: str) -> None:
        """Print a line. The stream may be a file on a full disk; then drop all further output."""
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            # The reader has closed the pipe, which ends the run.
            raise
        except OSError:
            # From now on, lines go only to log.txt.
            self._stream = open(os.devnull, "w")  # noqa: SIM115

    def _fields(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        # Fixed widths align the lines in columns and keep the bar from jumping.
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
        fields = [f"step {step:>{step_width}}/{self._total}", f"loss {loss:8.4f}"]
        rate = metrics.get("train/learning_rate")
        norm = metrics.get("train/grad_norm")
        # An optimizer may not report a learning rate.
        if rate is not None:
            fields.append(f"lr {rate:8.2e}")
        if norm is not None:
            fields.append(f"norm {norm:8.3g}")
        fields.append(f"{item_rate:>6} {self._unit}")
        # There is no MFU for a device with unknown peak FLOP/s.
        if mfu is not None:
            fields.append(f"MFU {mfu:6.1%}")
        fields.append(f"mem {memory:>11}")
        resident = metrics.get("memory/rss_bytes")
        if resident is not None:
            fields.append(f"host {human_bytes(resident):>11}")
        fields.append(f"left {remaining_time:>8}")
        return fields


class _BarView(phases.View):
    """Shows the phases of a run in its bar. It has no unfinished lines: rich prints other output above the bar."""

    def __init__(self, bar: rich.progress.Progress):
        self._bar = bar
        self._turn = 0

    def show(self, phase: Phase, seconds: float) -> None:
        """See `View`."""
        self._turn += 1
        text = spinner_text(phase, seconds, SPINNER_FRAMES[self._turn % len(SPINNER_FRAMES)])
        self._bar.update(self._bar.task_ids[0], status=text, refresh=True)

    def end(self, phase: Phase, seconds: float, *, completed: bool) -> None:
        """See `View`."""
        self._bar.update(self._bar.task_ids[0], status="", refresh=True)


def _create_bar(stream: IO[str], total_steps: int) -> rich.progress.Progress:
    """Return the bar of a run. It is drawn only when it is updated."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.fields[status]}", markup=False, style="yellow"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        console=Console(file=stream, highlight=False),
        # Auto-refresh would need a thread, which slows down the steps on a small machine.
        auto_refresh=False,
        expand=True,
    )
    bar.add_task("", total=total_steps, status="starting")
    return bar
