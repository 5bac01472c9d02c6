"""Phases of a command: show the current task and its duration while it runs.

    with phase("compiling the training step"):
        ...
    with phase("evaluating stdlib") as evaluating:
        evaluating.progress(40, 844)

Library code names its phases and prints nothing. The owner of the terminal (a verb, or a run that shows its reports)
starts a tracker with `show_phases`, and a thread then keeps the line of the innermost phase up to date. Without a
tracker nothing is shown. `framework.terminal.phase_tracker` decides which phase is shown when, and
`framework.terminal.phase_views` how it looks, on a terminal and elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from plimsoll.framework.terminal.phase_tracker import Phase, PhaseTracker, StartupMessage, View

# Patience for tasks that are usually short, in seconds.
SHORT = 0.5
# Seconds that `mute` waits for a thread that is writing.
_LOCK_SECONDS = 0.2
# Seconds before the startup message is shown; a command that prints something else by then does not need it.
_FIRST_PATIENCE = 0.3


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

    def __getattr__(self, name: str) -> Any:
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
    if tracker is None or not tracker.is_owner_thread:
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
    return _tracker is not None and _tracker.is_owner_thread


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
    if _tracker is None or view is None:
        yield
        return
    with _tracker.use_view(view):
        yield


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
