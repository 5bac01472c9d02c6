"""Phases of a command: what goes on now, and for how long, said while it lasts.

    with phase("compiling the training step"):
        ...
    with phase("evaluating stdlib") as evaluating:
        evaluating.progress(40, 844)

Library code names its phases and prints nothing. Whoever owns the terminal (a verb, a run that shows its reports) opens
a board with `shown`, and a thread then keeps the line of the innermost phase up to date. Without a board nothing is
said. `framework.terminal.board` decides which phase is shown when, and `framework.terminal.phase_views` has how it
looks, on a terminal and elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from framework.terminal.board import Board, FirstWords, Phase, View

# The patience for what usually lasts a moment, in seconds.
SHORT = 0.5
# The seconds that last words wait for whoever is writing just now.
_LOCK_SECONDS = 0.2
# A command that has said something else by then needs no first words.
_FIRST_PATIENCE = 0.3


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
