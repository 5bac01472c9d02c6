"""Tracks the running phases of this process and decides which one to show. A view decides how it looks."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol


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


class View(Protocol):
    """Shows phases. A PhaseTracker calls it, from one thread at a time."""

    interval: float  # seconds between two calls of `show`
    takes_lines: bool  # whether it leaves unfinished lines, which other output has to end first

    def show(self, phase: Phase, seconds: float) -> None:
        """Show a phase that has been running for `seconds`."""

    def end(self, phase: Phase, seconds: float, *, completed: bool) -> None:
        """Show the end of a phase. `completed` is False if an exception ended it."""

    def break_line(self) -> None:
        """End an unfinished line, because other output follows on its own line."""


class PhaseTracker:
    """The running phases, outermost first, and the view that shows the innermost one.

    Args:
        view: shows the phases.
        clock: returns the time in seconds, from any origin.
    """

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic):
        self._views = [view]
        self._clock = clock
        self._phases: list[Phase] = []
        # Phases of other threads are not shown: concurrent phases do not fit on one line.
        self._thread = threading.get_ident()
        self._stopped: threading.Event | None = None
        # Time of the last output or the last end of a shown phase. A phase's patience also counts from here.
        self._quiet_since = -math.inf
        # Whether other output has an unfinished line, which must not be interrupted.
        self.mid_line = False
        # Reentrant, because `phases.mute` holds it while it calls `close`.
        self.lock = threading.RLock()

    @property
    def view(self) -> View:
        """The active view."""
        return self._views[-1]

    @property
    def is_owner_thread(self) -> bool:
        """True if phases of the calling thread are shown."""
        return threading.get_ident() == self._thread

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

    @contextlib.contextmanager
    def use_view(self, view: View) -> Iterator[None]:
        """Let another view show the phases until the context exits."""
        with self.lock:
            self.break_line()
            self._views.append(view)
        try:
            yield
        finally:
            with self.lock:
                self._views.remove(view)

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
        while not stopped.wait(self.view.interval):
            # A closed terminal must not end a command.
            with contextlib.suppress(OSError, ValueError):
                self.tick()


class StartupMessage(Phase):
    """The startup message of a command, shown until the first other output."""
