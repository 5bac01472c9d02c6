"""The phases that go on in this process, and which of them is shown when; how that looks is a view's matter."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Phase:
    """Something that goes on for a while.

    Args:
        text: what it is, such as "compiling the training step".
        patience: seconds that it may last without being said at all.

    Attributes:
        started: by the clock of the board, in seconds.
        detail: how far it is, such as "40/844"; "" where nobody knows.
        outcome: what is added when it is done, such as ", from the cache".
        said: whether it was ever shown.
    """

    def __init__(self, text: str, patience: float = 0.0):
        self.text = text
        self.patience = patience
        self.started = 0.0
        self.detail = ""
        self.outcome = ""
        self.said = False

    def progress(self, done: int, total: int) -> None:
        """Says that `done` of `total` are done: 40/844."""
        self.detail = f"{done:,}/{total:,}"

    def percent(self, fraction: float) -> None:
        """Says what part of it is done, of 1."""
        self.detail = f"{fraction:.0%}"


class View(Protocol):
    """How phases look. A board calls it, from one thread at a time."""

    interval: float  # seconds between two calls of `show`
    takes_lines: bool  # whether it leaves lines unfinished, which other output has to end first

    def show(self, phase: Phase, seconds: float) -> None:
        """The phase has gone on for so many seconds."""

    def end(self, phase: Phase, seconds: float, *, completed: bool) -> None:
        """The phase is over; `completed`: and not by an exception."""

    def aside(self) -> None:
        """Other output comes now, on a line of its own: ends an unfinished one."""


class Board:
    """The phases that go on, the outermost first, and the view that shows the innermost.

    Args:
        view: shows them.
        clock: seconds, from any origin.
    """

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic):
        self._views = [view]
        self._clock = clock
        self._phases: list[Phase] = []
        # Phases of other threads are not shown: several things at once do not fit one line.
        self._thread = threading.get_ident()
        self._stopped: threading.Event | None = None
        # When something that was said ended last: a phase waits for its patience from then on, too.
        self._quiet_since = -math.inf
        # Whether other output has not ended its line yet: nothing is shown in its middle.
        self.mid_line = False
        self.lock = threading.RLock()

    @property
    def view(self) -> View:
        """The view that counts."""
        return self._views[-1]

    @property
    def hears(self) -> bool:
        """Whether phases of the calling thread are shown."""
        return threading.get_ident() == self._thread

    def begin(self, phase: Phase) -> None:
        """The phase is the innermost one from now on."""
        with self.lock:
            phase.started = self._clock()
            self._phases.append(phase)
            if not phase.patience:
                self._show(phase)
        self._start_ticking()

    def end(self, phase: Phase, *, completed: bool = True) -> None:
        """The phase is over."""
        with self.lock:
            if phase not in self._phases:
                return
            self._phases.remove(phase)
            now = self._clock()
            if phase.said:
                self._quiet_since = now
            self.view.end(phase, now - phase.started, completed=completed)
            if not self._phases:
                self._stop_ticking()

    def tick(self) -> None:
        """Shows how long the innermost phase has gone on. The board's thread calls it, a few times a second."""
        with self.lock:
            for phase in reversed(self._phases):
                # The phase around one that is still to be patient with goes on being shown.
                if self._clock() - max(phase.started, self._quiet_since) >= phase.patience:
                    self._show(phase)
                    return

    def aside(self) -> None:
        """Other output comes now: ends a line that is unfinished, and the first words. The caller holds the lock."""
        self._quiet_since = self._clock()
        self._end_first_words()
        self.view.aside()

    def close(self) -> None:
        """Ends everything that is shown."""
        with self.lock:
            self.aside()
            self._phases.clear()
            self._stop_ticking()

    @contextlib.contextmanager
    def viewed_by(self, view: View) -> Iterator[None]:
        """Has another view show the phases until the context ends."""
        with self.lock:
            self.aside()
            self._views.append(view)
        try:
            yield
        finally:
            with self.lock:
                self._views.remove(view)

    def _show(self, phase: Phase) -> None:
        """Shows a phase, where no other output is in the middle of its line."""
        if self.mid_line:
            return
        if not isinstance(phase, FirstWords):
            self._end_first_words()
        phase.said = True
        self.view.show(phase, self._clock() - phase.started)

    def _end_first_words(self) -> None:
        # They say nothing of whether the start went well: an error may be what comes.
        if self._phases and isinstance(self._phases[0], FirstWords):
            del self._phases[0]
            self.view.aside()
            if not self._phases:
                self._stop_ticking()

    def _start_ticking(self) -> None:
        if self._stopped is None:
            self._stopped = threading.Event()
            # There is no thread outside of phases: a process that forks has none.
            threading.Thread(target=self._tick, args=(self._stopped,), name="phases", daemon=True).start()

    def _stop_ticking(self) -> None:
        if self._stopped is not None:
            self._stopped.set()
            self._stopped = None

    def _tick(self, stopped: threading.Event) -> None:
        while not stopped.wait(self.view.interval):
            # A terminal that is gone ends no command.
            with contextlib.suppress(OSError, ValueError):
                self.tick()


class FirstWords(Phase):
    """The start of a command, until anything else is said."""
