"""Views of phases: a spinner on a terminal; elsewhere one line per phase, which grows while the phase runs.

compiling the training step (2.1 s the last time) .... 2 s .... 4 s ... done in 4.4 s
evaluating stdlib .... 12/106 .... 25/106 ... done in 4.4 s

`rich.status` prints nothing without a terminal. On a terminal it holds back or breaks a half-written line of other
output, hides the cursor, which a process that ends by `os._exit` would not restore, and takes 80 ms to import before
the startup message. The bar of a run is rich's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from typing import TextIO

from plimsoll.framework.terminal.phases import Phase, View, show_phases

# Without a terminal, in seconds: how often a line grows, mostly by a dot; how often it shows progress instead; and how
# often it does so once the phase has taken longer than that.
_MARK_SECONDS = 1.0
_DETAIL_SECONDS = 2.0
_MANY_SECONDS = 10.0
_CLEAR = "\r\033[K"
SPINNER_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_FRAMES = "|/-\\"


def human_seconds(seconds: float) -> str:
    """Format seconds: 4.4 s, 44 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    minutes, rest_seconds = divmod(whole_seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest_seconds} s"
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes} min"


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which lines can be rewritten."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def create_view(stream: TextIO) -> View:
    """Return the view for a stream."""
    return Spinner(stream) if is_terminal(stream) else Lines(stream)


@contextlib.contextmanager
def show_phases_on_terminal() -> Iterator[None]:
    """Show phases until the context exits, if stderr is a terminal.

    In a notebook or a log, a function that is called from Python shows no phases.
    """
    if not is_terminal(sys.stderr):
        yield
        return
    with show_phases(create_view(sys.stderr)):
        yield


def _write_out(stream: TextIO, text: str) -> None:
    """Write a part of a line. Ignore errors: a full disk or a closed terminal must not end a command."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


class Lines(View):
    """One line per phase, for log files and pipes. It grows every second, so that the output never stalls."""

    takes_lines = True

    def __init__(self, stream: TextIO):
        self._stream = stream
        # The phase whose line is unfinished.
        self._open: Phase | None = None
        # For each phase that was shown: the number of additions that were due so far.
        self._marks: dict[Phase, int] = {}

    def show(self, phase: Phase, seconds: float) -> None:
        """See `View`."""
        marks = int(seconds / _MARK_SECONDS)
        is_new = phase not in self._marks
        if not is_new and marks <= self._marks[phase]:
            return
        self._marks[phase] = marks
        # Other output may have ended its line.
        if self._open is not phase:
            self.break_line()
            self._open = phase
            _write_out(self._stream, f"{phase.text} ...")
        if is_new:
            return
        # A dot is enough to show that it is running, and keeps the line of a ten-minute phase readable.
        due_seconds = marks * _MARK_SECONDS
        interval = _DETAIL_SECONDS if due_seconds <= _MANY_SECONDS else _MANY_SECONDS
        addition = "." if due_seconds % interval else f" {phase.detail or f'{due_seconds:.0f} s'} ..."
        _write_out(self._stream, addition)

    def end(self, phase: Phase, seconds: float, *, completed: bool) -> None:
        """See `View`."""
        # A phase that ended before its patience is not worth a line.
        if phase not in self._marks:
            return
        del self._marks[phase]
        how = f"done in {human_seconds(seconds)}{phase.outcome}"
        if not completed:
            how = f"stopped after {human_seconds(seconds)}"
        if self._open is phase:
            self._open = None
            _write_out(self._stream, f" {how}\n")
        else:
            self.break_line()
            _write_out(self._stream, f"{phase.text}: {how}\n")

    def break_line(self) -> None:
        """See `View`."""
        if self._open is not None:
            self._open = None
            _write_out(self._stream, "\n")


class Spinner(View):
    """One line of a terminal, which is rewritten while a phase runs and cleared afterwards."""

    takes_lines = True

    def __init__(self, stream: TextIO):
        self._stream = stream
        encoding = (getattr(stream, "encoding", "") or "").lower().replace("-", "")
        self._frames = SPINNER_FRAMES if encoding == "utf8" else _ASCII_FRAMES
        self._turn = 0
        self._drawn = False

    def show(self, phase: Phase, seconds: float) -> None:
        """See `View`."""
        self._turn += 1
        text = spinner_text(phase, seconds, self._frames[self._turn % len(self._frames)])
        columns = shutil.get_terminal_size().columns
        # A wrapped line could not be rewritten.
        _write_out(self._stream, f"{_CLEAR}{text[: columns - 1]}")
        self._drawn = True

    def break_line(self) -> None:
        """See `View`."""
        if self._drawn:
            self._drawn = False
            _write_out(self._stream, _CLEAR)


def spinner_text(phase: Phase, seconds: float, frame: str) -> str:
    """Return the text of a spinner: ⠋ evaluating stdlib 40/106, 3 s."""
    details = [phase.detail] if phase.detail else []
    # Tenths of a second would only flicker.
    if seconds >= 1.0:
        details.append(f"{int(seconds)} s" if seconds < 60 else human_seconds(seconds))
    return f"{frame} {phase.text} {', '.join(details)}".rstrip()
