"""Progress: a live bar in a terminal, one readable line per report elsewhere, and log.txt in both cases.

rich is imported when there is a terminal to draw on. Values come from the dict that goes to the writers; one that is
missing or not finite is shown as "-".
"""

import datetime
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from framework.terminal import interrupts
from framework.terminal.tables import human_bytes, human_count


class Progress:
    """Shows where a run is. Use as a context manager, so that the terminal is given back on any way out.

    Args:
      total_steps: the step at which the run ends.
      log_every: lines are for steps that this divides, and for the last; the bar is for every step.
      stream: where to show; standard output if None.
      log_path: a file that gets every line and message too, with no bar; None for no file.
      log_waits: that file is not touched before `write_log`; what comes until then is written first.
      item: what is counted, if no tokens.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        log_every: int = 1,
        stream: IO[str] | None = None,
        log_path: Path | None = None,
        log_waits: bool = False,
        item: str = "token",
    ):
        self._total, self._log_every = total_steps, log_every
        self._item, self._unit = item, {"token": "tok/s", "image": "img/s"}[item]
        self._stream = sys.stdout if stream is None else stream
        self._log_path = log_path
        self._log: IO[bytes] | None = None
        self._unlogged = 0  # lines that a full disk has kept from the log
        self._waiting: list[str] | None = []  # lines of the log, until its file is opened
        if log_path is None or not log_waits:
            self.write_log()
        is_terminal = self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._bar = _bar(self._stream, total_steps) if is_terminal else None
        self._drawn_at = -math.inf
        self._take_back: Callable[[], None] = lambda: None

    def __enter__(self) -> "Progress":
        self._take_back = interrupts.at_end(self._interrupted)
        if self._bar is not None:
            self._bar.start()
        return self

    def _interrupted(self, number: int, line: str) -> None:
        """A signal ends the process: the log says so too, and the terminal is given back."""
        self._log_line(line)
        if self._bar is not None:
            self._bar.stop()

    def __exit__(self, *exception: object) -> None:
        self._take_back()
        if self._bar is not None:
            self.status("")
            self._bar.stop()
        if self._log is not None:
            self._log.close()

    def write_log(self) -> None:
        """From now on lines are written to the log, those that wait first. Raises OSError: it cannot be opened."""
        waiting, self._waiting = self._waiting or [], None
        if self._log_path is not None and self._log is None:
            self._log = open(self._log_path, "a+b", buffering=0)  # noqa: SIM115 (see __exit__)
        for line in waiting:
            self._log_line(line)

    def set_total(self, total_steps: int) -> None:
        """The run ends at another step than was thought."""
        self._total = total_steps
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=total_steps)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows `metrics` of `step`: train/loss, train/tokens_per_second or images_per_second, train/mfu,
        memory/device_bytes."""
        fields = self._fields(step, metrics)
        if self._bar is not None:
            text = "  ".join(" ".join(field.split()) for field in fields)
            self._bar.update(self._bar.task_ids[0], completed=step, description=text, status="")
            if time.monotonic() - self._drawn_at > 0.1 or step >= self._total:  # more often is more than an eye can use
                self._bar.refresh()
                self._drawn_at = time.monotonic()
        if step % self._log_every == 0 or step >= self._total:
            line = "   ".join(fields)
            self._log_line(line)
            if self._bar is None:
                self._show(line)

    def print(self, message: object) -> None:
        """Shows a message on lines of its own, above the bar."""
        self._log_line(str(message))
        if self._bar is None:
            self._show(str(message))
        else:
            self._bar.console.print(str(message), markup=False, soft_wrap=True)

    def status(self, what: str) -> None:
        """Says what is being done when it is no step: compiling, evaluating, saving. "" ends it. Bar only."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], status=what, refresh=True)

    def _log_line(self, line: str) -> None:
        if self._waiting is not None:
            self._waiting.append(line)
        if self._log is not None:
            self._append(self._log, line)

    def _append(self, log: IO[bytes], line: str) -> None:
        """Writes a line to the log, whole or not at all. A full disk is no reason to end a run: it is told where the
        run is shown, once, and in the log when there is room again."""
        text = f"{line}\n".encode()
        if self._unlogged:
            text = f"({self._unlogged} lines are missing: the disk was full)\n".encode() + text
        size = log.seek(0, os.SEEK_END)
        try:
            while text:
                text = text[log.write(text) :]
        except OSError as error:
            os.ftruncate(log.fileno(), size)
            self._unlogged += 1
            if self._unlogged == 1:
                self._show(
                    f"log.txt cannot be written: {error.strerror}. Training goes on; its lines are lost until then"
                )
            return
        self._unlogged = 0

    def _show(self, line: str) -> None:
        """Prints a line, as far as there is room: the stream may be a file on a full disk."""
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            self._stream = open(os.devnull, "w")  # noqa: SIM115  (log.txt has what follows)

    def _fields(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        # Fixed widths, so that lines are columns and the bar does not jump.
        rate, mfu = metrics.get("train/steps_per_second"), metrics.get("train/mfu")
        left = None if not rate else datetime.timedelta(seconds=round((self._total - step) / rate))
        return [
            f"step {step:>{len(str(self._total))}}/{self._total}",
            f"loss {metrics.get('train/loss', math.nan):8.4f}",
            f"{human_count(metrics.get(f'train/{self._item}s_per_second')):>6} {self._unit}",
            *([] if mfu is None else [f"MFU {mfu:6.1%}"]),
            f"mem {human_bytes(metrics.get('memory/device_bytes')):>11}",
            f"left {'-' if left is None else str(left):>8}",
        ]


def _bar(stream: IO[str], total_steps: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.fields[status]}", markup=False, style="yellow"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        console=Console(file=stream, highlight=False),
        auto_refresh=False,  # it would take a thread, and its time from a step on a small machine
        expand=True,
    )
    bar.add_task("", total=total_steps, status="starting")
    return bar
