"""Phases of a command: what goes on now, and for how long, said while it lasts.

    with phase("compiling the training step"):
        ...
    with phase("evaluating stdlib") as evaluating:
        evaluating.progress(40, 844)

Library code names its phases and prints nothing. Whoever owns the terminal (a verb, a run that shows its reports) opens
a board with `shown`, and a thread then keeps the line of the innermost phase up to date. Without a board nothing is
said. `framework.terminal.phase_views` has how a phase looks, on a terminal and elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TextIO, cast

# The patience for what usually lasts a moment, in seconds.
SHORT = 0.5
# The seconds that last words wait for whoever is writing just now.
_LOCK_SECONDS = 0.2
# A command that has said something else by then needs no first words.
_FIRST_PATIENCE = 0.3


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


class _SharedStream:
    """A standard stream whose writes first end the line of a phase. All but `write` is the stream's own."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes after an unfinished line was ended."""
        board = _board
        # A view that takes no lines may be drawing just now, in this thread, and is not to be waited for.
        if board is None or not board.view.takes_lines:
            return self.stream.write(text)
        with board.lock:
            if text:
                board.aside()
                board.mid_line = not text.endswith("\n")
            return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes them in turn."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# The board of this process; None while nobody is told of phases.
_board: Board | None = None


def _forget() -> None:
    """Drops the board in a forked child, whose thread and lock are not its own."""
    global _board
    _board = None


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def phase(text: str, *, patience: float = 0.0) -> Iterator[Phase]:
    """Says that something goes on until the context ends, where anybody is told.

    Args:
        text: what it is, such as "saving step 500".
        patience: seconds that it may last without being said at all; for what usually lasts a moment.
    """
    new_phase = Phase(text, patience)
    board = _board
    if board is None or not board.hears:
        yield new_phase
        return
    board.begin(new_phase)
    completed = False
    try:
        yield new_phase
        completed = True
    finally:
        board.end(new_phase, completed=completed)


def are_shown() -> bool:
    """Whether phases of this thread are shown: whether a text for one is worth making."""
    return _board is not None and _board.hears


@contextlib.contextmanager
def shown(view: View, first_words: str = "") -> Iterator[None]:
    """Shows phases until the context ends; within another such context it does nothing.

    Args:
        view: shows them; it writes to a standard stream as that was before.
        first_words: what is said, after a moment, until anything else is.
    """
    global _board
    if _board is not None:
        yield
        return
    board = Board(view)
    shared_stdout = _SharedStream(sys.stdout)
    shared_stderr = _SharedStream(sys.stderr)
    # Whatever prints, such as a library's warning, has to begin a line of its own.
    sys.stdout = cast(TextIO, shared_stdout)
    sys.stderr = cast(TextIO, shared_stderr)
    _board = board
    if first_words:
        board.begin(FirstWords(first_words, patience=_FIRST_PATIENCE))
    try:
        yield
    finally:
        board.close()
        _board = None
        # Somebody may have put streams of their own in these places meanwhile.
        if sys.stdout is shared_stdout:
            sys.stdout = shared_stdout.stream
        if sys.stderr is shared_stderr:
            sys.stderr = shared_stderr.stream


@contextlib.contextmanager
def viewed_by(view: View | None) -> Iterator[None]:
    """Has another view, such as a bar, show the phases until the context ends; None leaves the view as it is."""
    if _board is None or view is None:
        yield
        return
    with _board.viewed_by(view):
        yield


def hush() -> None:
    """Ends what is shown, and says nothing more in this process: it is ending, or another one speaks for it."""
    global _board
    board = _board
    _board = None
    # Whoever writes just now may never return, and nobody is to wait for that.
    if board is not None and board.lock.acquire(timeout=_LOCK_SECONDS):
        try:
            board.close()
        finally:
            board.lock.release()


def replace_stdout(stream: TextIO) -> None:
    """Has sys.stdout be that stream, whose writes still end the lines of phases."""
    if isinstance(sys.stdout, _SharedStream):
        sys.stdout.stream = stream
    else:
        sys.stdout = stream
