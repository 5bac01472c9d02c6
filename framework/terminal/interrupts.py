"""SIGINT and SIGTERM: one line on stderr, and the process has ended within two seconds, whatever its main thread does.

Python runs signal handlers in the main thread, between two instructions of its own. A compiler is one instruction that
takes minutes. So a thread waits for the byte that the C part of Python's handling writes into a pipe at once
(`signal.set_wakeup_fd`). It ends the process by `os._exit`: the interpreter is not torn down under XLA's threads, which
would be a segmentation fault, and no exception passes through code that may swallow it. What must not be left behind is
named by `at_end`. A training loop, which has steps to lose, hears of the signal instead (`heard_by`).

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

STOPS = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_SECONDS = 1.5  # for all of `at_end`; a disk that does not answer keeps no process longer

# What a listener says of a signal: None, it will see to it; a line, the process ends with that.
Listener = Callable[[int], str | None]
# Called with the signal's number and the line that is shown.
Ending = Callable[[int, str], object]


def stopped_by(number: int) -> str:
    """The line of a process that had nothing to lose."""
    return f"stopped by {signal.Signals(number).name}"


class _Watch:
    """The handlers, the pipe and the thread. Made in the main thread, and there is one at a time."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.endings: dict[object, Ending] = {}
        self.masks: dict[int, Any] = {}  # of threads that fork, by thread
        self.ending = threading.Lock()  # taken once, and for good
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.getsignal(number) for number in STOPS}
        self.take(self._handlers)
        self._thread = threading.Thread(target=self._wait, name="signals", daemon=True)
        self._thread.start()

    def take(self, handlers: dict[signal.Signals, Any]) -> None:
        """Puts ours in the place of these handlers, but for signals that are ignored."""
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def give_back(self, handlers: dict[signal.Signals, Any]) -> None:
        """The inverse of `take`. None is what a C library has put there: it cannot be put back."""
        for number, handler in handlers.items():
            if handler is not None and handler is not signal.SIG_IGN:
                signal.signal(number, handler)

    def close(self) -> None:
        """Gives everything back."""
        self.give_back(self._handlers)
        signal.set_wakeup_fd(self._descriptor)
        os.write(self._writer, b"\0")  # which ends the thread
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _wait(self) -> None:
        import select  # not above: it is a file to be read, and the handlers are to be there first

        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while self._drain() is not None:
            poll.poll()

    def _drain(self) -> int | None:
        """Sees to all signals in the pipe; how many, or None: the watch is closed."""
        try:
            numbers = os.read(self._reader, 512)
        except BlockingIOError:
            return 0
        for number in numbers:
            # Whoever has put a handler of his own there since wants that to be called, and it is.
            if number in STOPS and signal.getsignal(number) == self._handle:
                self.hear(number)
        return None if 0 in numbers else len(numbers)

    def _handle(self, number: int, frame: object) -> None:
        """In the main thread, as soon as that is back in Python: usually the thread has seen to it already."""
        descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if descriptor == self._writer:
            self._drain()
        else:  # an event loop has put its own there for a while (uvloop does), and so the pipe is empty
            signal.set_wakeup_fd(descriptor)
            self.hear(number)

    def hear(self, number: int) -> None:
        """A listener sees to it, the innermost one; or the process ends."""
        line = self.listeners[-1](number) if self.listeners else stopped_by(number)
        if line is not None and self.ending.acquire(blocking=False):
            # The main thread goes on: what `at_end` names may need a lock that it holds.
            threading.Thread(target=self._end, args=(number, line), daemon=True).start()

    def _end(self, number: int, line: str) -> None:
        last_words = threading.Thread(target=self._last_words, args=(number, line), daemon=True)
        last_words.start()
        last_words.join(_LAST_WORDS_SECONDS)
        os._exit(128 + number)

    def _last_words(self, number: int, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            # The terminal shows ^C, and perhaps half a line, where the cursor is.
            os.write(2, f"{chr(10) * os.isatty(2)}{line}\n".encode())
        for ending in reversed([*self.endings.values()]):
            with contextlib.suppress(Exception):  # the others are to be called too, and there is nobody to tell
                ending(number, line)


_watch: _Watch | None = None
_forks_forget = False


def begin() -> None:
    """From now on until the process ends, signals do what this module says. For the main thread of a process that is
    Plimsoll's own; a program that only calls Plimsoll keeps its handlers. Calling it again does nothing."""
    global _watch, _forks_forget
    if _watch is None:
        _watch = _Watch()
        if not _forks_forget:
            # Before a fork has forgotten, what it gets would be written into the pipe of this process.
            os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)
            _forks_forget = True


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """As `begin`, for a while. Where signals are watched already, or elsewhere than in the main thread, nothing."""
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
    """In a fork: the thread is not there, the pipe is the parent's, and the parent's things are not to be removed."""
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
    """Signals go to `listener`, in any thread, instead of ending the process, unless it says so."""
    with watched():
        if _watch is None:  # not the main thread
            yield
            return
        watch, handlers = _watch, {number: signal.getsignal(number) for number in STOPS}
        watch.listeners.append(listener)
        watch.take(handlers)  # a package may have put its own there meanwhile
        try:
            yield
        finally:
            watch.give_back(handlers)
            watch.listeners.remove(listener)


def at_end(ending: Ending) -> Callable[[], None]:
    """Has `ending` called when a signal ends the process: the last one given is called first. What is returned takes it
    back. Where no signals are watched, nothing happens."""
    settle()  # what it is about to make would stay
    if _watch is None:
        return lambda: None
    endings, key = _watch.endings, object()
    endings[key] = ending

    def take_back() -> None:
        endings.pop(key, None)

    return take_back


@contextlib.contextmanager
def removed_at_end(path: str | os.PathLike[str]) -> Iterator[None]:
    """A file or folder that goes if a signal ends the process inside."""

    def remove(number: int, line: str) -> None:
        for _ in range(2):  # the main thread may be writing there
            shutil.rmtree(path, ignore_errors=True)
        Path(path).unlink(missing_ok=True)

    take_back = at_end(remove)
    try:
        yield
    finally:
        take_back()


def settle() -> None:
    """If the process is ending, waits for that: the main thread has nothing more to say, or to make."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _watch is not None and _watch.ending.locked():
        time.sleep(60)


@contextlib.contextmanager
def stop_signals(to_lose: Callable[[], bool] = lambda: True) -> Iterator[list[int]]:
    """SIGTERM and SIGINT become an entry of the list, to be looked at between steps; the second one ends the process.

    Args:
        to_lose: whether there is anything to save; while there is not, the first signal ends the process too.
    """
    received: list[int] = []

    def hear(number: int) -> str | None:
        if not to_lose():
            return stopped_by(number)
        received.append(number)
        if len(received) == 1:
            return None
        return f"{stopped_by(number)}, the second signal: what was trained since the last checkpoint is not saved"

    with heard_by(hear):
        yield received
