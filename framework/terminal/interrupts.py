"""Ends the process within two seconds of SIGINT or SIGTERM, with one line on stderr.

It does so whatever the main thread is doing.

Python runs signal handlers in the main thread, between two instructions of its own. A compiler is
one instruction that takes minutes. So a thread waits for the byte that the C part of Python's
handling writes into a pipe at once (`signal.set_wakeup_fd`). It ends the process by `os._exit`:
the interpreter is not torn down under XLA's threads, which would be a segmentation fault, and no
exception passes through code that may swallow it. What must not be left behind is named by
`at_end`. A training loop, which has steps to lose, hears of the signal instead (`heard_by`).

Signals that the parent process ignores (nohup) stay ignored.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from framework.terminal import phases

STOPS = (signal.SIGINT, signal.SIGTERM)
# Seconds for all that `at_end` names; a disk that does not answer keeps no process longer.
_LAST_WORDS_SECONDS = 1.5

# A listener answers a signal: with None it sees to the signal itself; with a line, the process ends
# and shows that line.
Listener = Callable[[int], str | None]
# Called with the signal's number and the line that is shown.
Ending = Callable[[int, str], object]


def stopped_by(number: int) -> str:
    """Returns the line that a process shows which had nothing to lose."""
    return f"stopped by {signal.Signals(number).name}"


class _Watch:
    """The handlers, the pipe and the thread.

    It is made in the main thread, where alone Python sets handlers, and there is one at a time.
    """

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.endings: dict[object, Ending] = {}
        # Signal masks of threads that are forking, by thread.
        self.masks: dict[int, Any] = {}
        # Taken once, and for good: only the first signal ends the process.
        self.ending = threading.Lock()
        # Neither end may block: the one is written in a signal handler, the other read by whoever
        # comes first.
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.getsignal(number) for number in STOPS}
        self.take(self._handlers)
        self._thread = threading.Thread(target=self._wait, name="signals", daemon=True)
        self._thread.start()

    def take(self, handlers: dict[signal.Signals, Any]) -> None:
        """Replaces these handlers by this watch's, but for signals that are ignored."""
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def give_back(self, handlers: dict[signal.Signals, Any]) -> None:
        """Puts these handlers back: the inverse of `take`."""
        # None stands for a handler that a C library has set, which Python cannot set again.
        for number, handler in handlers.items():
            if handler is not None and handler is not signal.SIG_IGN:
                signal.signal(number, handler)

    def close(self) -> None:
        """Gives everything back."""
        self.give_back(self._handlers)
        signal.set_wakeup_fd(self._descriptor)
        # A signal number of 0 ends the thread.
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _wait(self) -> None:
        # Imported here: reading the module's file takes time, and the handlers must be set first.
        import select

        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while self._drain() is not None:
            poll.poll()

    def _drain(self) -> int | None:
        """Sees to all signals in the pipe.

        Returns their number, or None if the watch is closed.
        """
        try:
            numbers = os.read(self._reader, 512)
        except BlockingIOError:
            return 0
        for number in numbers:
            # A handler that other code has set since is called by Python itself, and is enough.
            if number in STOPS and signal.getsignal(number) == self._handle:
                self.hear(number)
        return None if 0 in numbers else len(numbers)

    def _handle(self, number: int, frame: object) -> None:
        """Handles a signal in the main thread, as soon as that is back in Python.

        Usually the watch's own thread has seen to the signal already.
        """
        descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if descriptor == self._writer:
            self._drain()
        else:
            # An event loop has set its own descriptor for a while (uvloop does), and so the pipe is
            # empty.
            signal.set_wakeup_fd(descriptor)
            self.hear(number)

    def hear(self, number: int) -> None:
        """Hands a signal to the innermost listener; without one, or if it says so, all ends."""
        line = self.listeners[-1](number) if self.listeners else stopped_by(number)
        if line is not None and self.ending.acquire(blocking=False):
            # In a thread of its own, and the main thread goes on: what `at_end` names may need a
            # lock that the main thread holds.
            threading.Thread(target=self._end, args=(number, line), daemon=True).start()

    def _end(self, number: int, line: str) -> None:
        # By os._exit, and after a limited time: the interpreter is not torn down under XLA's
        # threads, and last words that hang hold nobody.
        last_words = threading.Thread(target=self._last_words, args=(number, line), daemon=True)
        last_words.start()
        last_words.join(_LAST_WORDS_SECONDS)
        os._exit(128 + number)

    def _last_words(self, number: int, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            phases.hush()
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            # On a terminal after a line break, as it shows ^C, and perhaps half a line, where the
            # cursor is.
            os.write(2, f"{chr(10) * os.isatty(2)}{line}\n".encode())
        for ending in reversed([*self.endings.values()]):
            # The remaining endings must be called too, and there is nobody to tell of an error.
            with contextlib.suppress(Exception):
                ending(number, line)


_watch: _Watch | None = None
_forks_forget = False


def begin() -> None:
    """Watches signals from now on until the process ends, as this module says.

    It is for the main thread of a process that is Plimsoll's own; a program that only calls
    Plimsoll keeps its handlers. Calling it again does nothing.
    """
    global _watch, _forks_forget
    if _watch is None:
        _watch = _Watch()
        if not _forks_forget:
            # Signals are blocked around a fork: until the child has forgotten the watch, one that
            # it gets would be written into the pipe of this process.
            os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)
            _forks_forget = True


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Watches signals as `begin` does, until the context ends.

    Where signals are watched already, or in another thread than the main one, it does nothing.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    begin()
    assert _watch is not None
    try:
        yield
    finally:
        settle()
        _watch.close()
        _watch = None


def _block() -> None:
    if _watch is not None:
        _watch.masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def _unblock() -> None:
    if _watch is not None and (mask := _watch.masks.pop(threading.get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget() -> None:
    """Drops the watch in a forked child.

    There the thread does not exist, the pipe is the parent's, and the parent's files must stay.
    """
    global _watch
    if _watch is not None:
        signal.set_wakeup_fd(-1)
        for number in STOPS:
            if signal.getsignal(number) == _watch._handle:
                signal.signal(number, signal.SIG_DFL)
        _unblock()
        _watch = None


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Hands signals to `listener`, in any thread; the process ends only if the listener says so."""
    with watched():
        # Without a watch this is not the main thread.
        if _watch is None:
            yield
            return
        watch, handlers = _watch, {number: signal.getsignal(number) for number in STOPS}
        watch.listeners.append(listener)
        # Again, as a package may have set its own handlers meanwhile.
        watch.take(handlers)
        try:
            yield
        finally:
            watch.give_back(handlers)
            watch.listeners.remove(listener)


def at_end(ending: Ending) -> Callable[[], None]:
    """Has `ending` called when a signal ends the process; of several, the last one is called first.

    Returns a function that cancels this. Where no signals are watched, nothing happens.
    """
    # In a process that is ending, a file that the caller is about to make would stay.
    settle()
    if _watch is None:
        return lambda: None
    endings, key = _watch.endings, object()
    endings[key] = ending

    def take_back() -> None:
        endings.pop(key, None)

    return take_back


@contextlib.contextmanager
def removed_at_end(path: str | os.PathLike[str]) -> Iterator[None]:
    """Removes a file or folder if a signal ends the process inside the context."""

    def remove(number: int, line: str) -> None:
        # Twice, as the main thread may be writing there at the same time.
        for _ in range(2):
            shutil.rmtree(path, ignore_errors=True)
        Path(path).unlink(missing_ok=True)

    take_back = at_end(remove)
    try:
        yield
    finally:
        take_back()


def settle() -> None:
    """Waits, if the process is ending: the main thread must print and make nothing more."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _watch is not None and _watch.ending.locked():
        time.sleep(60)


_raises = False


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Has `stop_signals` raise what it would otherwise end the process for, until the context ends.

    It is for a program that calls Plimsoll, such as a notebook, which goes on after Ctrl-C: SIGINT
    becomes KeyboardInterrupt, SIGTERM SystemExit.
    """
    global _raises
    outer_value = _raises
    _raises = True
    try:
        yield
    finally:
        _raises = outer_value


@contextlib.contextmanager
def _raised_signals(to_lose: Callable[[], bool]) -> Iterator[list[int]]:
    """Does what `stop_signals` does, by exceptions in the main thread; elsewhere no signal is heard."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1 and to_lose():
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.getsignal(number) for number in STOPS}
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        yield received
    finally:
        for number, handler in handlers.items():
            # None stands for a handler that a C library has set, which Python cannot set again.
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals(to_lose: Callable[[], bool] = lambda: True) -> Iterator[list[int]]:
    """Appends SIGTERM and SIGINT to a list, which the caller reads between steps.

    The second signal ends the process.

    Args:
        to_lose: tells whether there is anything to save; while there is not, the first signal ends
            the process too.
    """
    if _raises and _watch is None:
        with _raised_signals(to_lose) as received:
            yield received
        return
    received = []

    def hear(number: int) -> str | None:
        if not to_lose():
            return stopped_by(number)
        received.append(number)
        if len(received) == 1:
            return None
        return f"{stopped_by(number)}, the second signal: what was trained since the last checkpoint is not saved"

    with heard_by(hear):
        yield received
