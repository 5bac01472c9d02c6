"""Phases of a command: show the current task and its duration while it runs.

    with phase("compiling the training step"):
        ...
    with phase("evaluating stdlib") as evaluating:
        evaluating.progress(40, 844)

Library code names its phases and prints nothing. The owner of the terminal (a verb, or a run that shows its reports)
starts a tracker with `show_phases`, and a thread then keeps the line of the innermost phase up to date. Without a
tracker nothing is shown. The tracker decides which phase is shown when, and a view decides how it looks; see
`framework.terminal.phase_views`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, cast

# Patience for tasks that are usually short, in seconds.
SHORT = 0.5
# Seconds between two updates of the shown phase.
_TICK_SECONDS = 0.1
# Seconds that `mute` waits for a thread that is writing.
_LOCK_SECONDS = 0.2
# Seconds before the startup message is shown; a command that prints something else by then does not need it.
_FIRST_PATIENCE = 0.3


class Phase:
    """A task that takes a while.

    Args:
        text: description, such as "compiling the training step".
        patience: seconds that it may run before it is shown.

    Attributes:
        started: start time by the tracker's clock, in seconds.
        detail: progress, such as "40/844"; "" if unknown.
        outcome: text to append when it is done, such as ", from the cache".
        was_shown: whether it was ever shown.
    """

    def __init__(self, text: str, patience: float = 0.0):
        self.text = text
        self.patience = patience
        self.started = 0.0
        self.detail = ""
        self.outcome = ""
        self.was_shown = False

    def progress(self, done: int, total: int) -> None:
        """Report that `done` of `total` items are done: 40/844."""
        self.detail = f"{done:,}/{total:,}"

    def percent(self, fraction: float) -> None:
        """Report progress as a fraction from 0 to 1."""
        self.detail = f"{fraction:.0%}"


class StartupMessage(Phase):
    """The startup message of a command, shown until the first other output."""


class View:
    """Shows phases. A PhaseTracker calls it, from one thread at a time.

    Attributes:
        takes_lines: whether it leaves unfinished lines, which other output has to end first.
    """

    takes_lines = False

    def show(self, phase: Phase, seconds: float) -> None:
        """Show a phase that has been running for `seconds`."""

    def end(self, phase: Phase, seconds: float, *, completed: bool) -> None:
        """Show the end of a phase, or only clear the display. `completed` is False if an exception ended it."""
        self.break_line()

    def break_line(self) -> None:
        """End an unfinished line, because other output follows on its own line."""


class PhaseTracker:
    """The running phases, outermost first, and the view that shows the innermost one.

    Args:
        view: shows the phases.
        clock: returns the time in seconds, from any origin.

    Attributes:
        view: the active view.
        thread: identifier of the thread whose phases are shown: concurrent phases do not fit on one line.
        mid_line: whether other output has an unfinished line, which must not be interrupted.
        lock: protects the phases and the output.
    """

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic):
        self.view = view
        self._clock = clock
        self._phases: list[Phase] = []
        self.thread = threading.get_ident()
        self._stopped: threading.Event | None = None
        # Time of the last output or the last end of a shown phase. A phase's patience also counts from here.
        self._quiet_since = -math.inf
        self.mid_line = False
        # Reentrant, because `phases.mute` holds it while it calls `close`.
        self.lock = threading.RLock()

    def begin(self, phase: Phase) -> None:
        """Start a phase, which is the innermost one from now on."""
        with self.lock:
            phase.started = self._clock()
            self._phases.append(phase)
            if not phase.patience:
                self._show(phase)
        self._start_ticking()

    def end(self, phase: Phase, *, completed: bool = True) -> None:
        """End a phase."""
        with self.lock:
            if phase not in self._phases:
                return
            self._phases.remove(phase)
            now = self._clock()
            if phase.was_shown:
                self._quiet_since = now
            self.view.end(phase, now - phase.started, completed=completed)
            if not self._phases:
                self._stop_ticking()

    def tick(self) -> None:
        """Update the innermost phase that is due. The tracker's thread calls this a few times per second."""
        with self.lock:
            for phase in reversed(self._phases):
                # Until an inner phase has used up its patience, keep showing the outer one.
                if self._clock() - max(phase.started, self._quiet_since) >= phase.patience:
                    self._show(phase)
                    return

    def break_line(self) -> None:
        """End an unfinished line and the startup message, because other output follows. The caller holds the lock."""
        self._quiet_since = self._clock()
        self._end_startup_message()
        self.view.break_line()

    def close(self) -> None:
        """End all phases and clear the display."""
        with self.lock:
            self.break_line()
            self._phases.clear()
            self._stop_ticking()

    def _show(self, phase: Phase) -> None:
        """Show a phase, unless other output has an unfinished line."""
        if self.mid_line:
            return
        if not isinstance(phase, StartupMessage):
            self._end_startup_message()
        phase.was_shown = True
        self.view.show(phase, self._clock() - phase.started)

    def _end_startup_message(self) -> None:
        # Remove them without an outcome: the next output may be an error, so the start may not have succeeded.
        if self._phases and isinstance(self._phases[0], StartupMessage):
            del self._phases[0]
            self.view.break_line()
            if not self._phases:
                self._stop_ticking()

    def _start_ticking(self) -> None:
        if self._stopped is None:
            self._stopped = threading.Event()
            # The thread exists only during phases, so that a process does not fork with it at other times.
            threading.Thread(target=self._tick, args=(self._stopped,), name="phases", daemon=True).start()

    def _stop_ticking(self) -> None:
        if self._stopped is not None:
            self._stopped.set()
            self._stopped = None

    def _tick(self, stopped: threading.Event) -> None:
        while not stopped.wait(_TICK_SECONDS):
            # A closed terminal must not end a command.
            with contextlib.suppress(OSError, ValueError):
                self.tick()


class _SharedStream:
    """A standard stream whose writes first end the line of a phase. Other attributes are those of the stream."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        """End an unfinished line, then write."""
        tracker = _tracker
        # A view without unfinished lines may be drawing in this thread at the moment, so do not take the lock.
        if tracker is None or not tracker.view.takes_lines:
            return self.stream.write(text)
        with tracker.lock:
            if text:
                tracker.break_line()
                tracker.mid_line = not text.endswith("\n")
            return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines one by one."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


# The tracker of this process; None while phases are not shown.
_tracker: PhaseTracker | None = None


def _forget() -> None:
    """Drop the tracker in a forked child, because its thread and lock belong to the parent."""
    global _tracker
    _tracker = None


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def phase(text: str, *, patience: float = 0.0) -> Iterator[Phase]:
    """Show a status message until the context exits, if phases are shown.

    Args:
        text: description of the task, such as "saving step 500".
        patience: seconds that the task may run before it is shown; for tasks that are usually short.

    Yields:
        The phase, to which the caller reports progress.
    """
    new_phase = Phase(text, patience)
    tracker = _tracker
    if tracker is None or not are_shown():
        yield new_phase
        return
    tracker.begin(new_phase)
    completed = False
    try:
        yield new_phase
        completed = True
    finally:
        tracker.end(new_phase, completed=completed)


def are_shown() -> bool:
    """Return whether phases of this thread are shown, so that callers can skip composing a text."""
    return _tracker is not None and _tracker.thread == threading.get_ident()


@contextlib.contextmanager
def show_phases(view: View, startup_message: str = "") -> Iterator[None]:
    """Show phases until the context exits; nested contexts do nothing.

    Args:
        view: shows the phases. It has to write to the original standard stream, not to its replacement.
        startup_message: startup message, shown after a moment until the first other output.
    """
    global _tracker
    if _tracker is not None:
        yield
        return
    tracker = PhaseTracker(view)
    shared_stdout = _SharedStream(sys.stdout)
    shared_stderr = _SharedStream(sys.stderr)
    # Other output, such as a library's warning, has to start on a new line.
    sys.stdout = cast(TextIO, shared_stdout)
    sys.stderr = cast(TextIO, shared_stderr)
    _tracker = tracker
    if startup_message:
        tracker.begin(StartupMessage(startup_message, patience=_FIRST_PATIENCE))
    try:
        yield
    finally:
        tracker.close()
        _tracker = None
        # Other code may have replaced the streams in the meantime.
        if sys.stdout is shared_stdout:
            sys.stdout = shared_stdout.stream
        if sys.stderr is shared_stderr:
            sys.stderr = shared_stderr.stream


@contextlib.contextmanager
def use_view(view: View | None) -> Iterator[None]:
    """Let another view, such as a bar, show the phases until the context exits; None keeps the current view."""
    tracker = _tracker
    if tracker is None or view is None:
        yield
        return
    with tracker.lock:
        tracker.break_line()
        outer_view = tracker.view
        tracker.view = view
    try:
        yield
    finally:
        with tracker.lock:
            tracker.view = outer_view


def mute() -> None:
    """Clear the display and show nothing more in this process: it is ending, or another process reports for it."""
    global _tracker
    tracker = _tracker
    _tracker = None
    # A thread that is writing at the moment may never return, so wait only for a limited time.
    if tracker is not None and tracker.lock.acquire(timeout=_LOCK_SECONDS):
        try:
            tracker.close()
        finally:
            tracker.lock.release()


def replace_stdout(stream: TextIO) -> None:
    """Replace sys.stdout. Writes to the new stream still end the lines of phases."""
    if isinstance(sys.stdout, _SharedStream):
        sys.stdout.stream = stream
    else:
        sys.stdout = stream
