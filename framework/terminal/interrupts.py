"""Exits the process within two seconds of SIGINT or SIGTERM, with one line on stderr.

This works no matter what the main thread is doing.

Python runs signal handlers in the main thread, between two bytecode instructions. Compilation is a single instruction
that takes minutes. So a separate thread waits for the byte that CPython's C-level handler immediately writes to a pipe
(`signal.set_wakeup_fd`). The thread ends the process with `os._exit`. This way the interpreter is not torn down while
XLA's threads run, which would cause a segmentation fault, and no exception passes through code that may swallow it.
Cleanup is registered with `register_cleanup`. A training loop, which has unsaved steps, receives the signal instead
(`listen_for_signals`).

Signals that the parent process ignores (nohup) stay ignored.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from plimsoll.framework.terminal import phases

STOPS = (signal.SIGINT, signal.SIGTERM)
# Time limit in seconds for all `register_cleanup` callbacks, so that a disk that does not respond cannot block the
# exit.
_CLEANUP_SECONDS = 1.5

# A listener receives the signal's number. It returns None if it handles the signal itself, or a line: then the process
# shows that line and exits.
Listener = Callable[[int], str | None]
# A cleanup callback is called with the signal's number and the line that is shown.
Cleanup = Callable[[int, str], object]
# Signal handlers as `signal.getsignal` returns them. None means that a C library has set the handler.
Handlers = dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None]


def format_stop_message(number: int) -> str:
    """Return the line to show when the process had nothing to save."""
    return f"stopped by {signal.Signals(number).name}"


class _SignalWatcher:
    """The signal handlers, the pipe and the thread.

    It has to be created in the main thread, because Python sets handlers only there. At most one exists at a time.
    """

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.cleanups: dict[object, Cleanup] = {}
        # Signal masks of threads that are forking, by thread id.
        self.masks: dict[int, set[signal.Signals | int]] = {}
        # Acquired once and never released: only the first signal ends the process.
        self.ending = threading.Lock()
        # Neither end may block: a signal handler writes one of them, and two threads compete to read the other.
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers: Handlers = {number: signal.getsignal(number) for number in STOPS}
        self.install(self._handlers)
        self._thread = threading.Thread(target=self._wait, name="signals", daemon=True)
        self._thread.start()

    def install(self, handlers: Handlers) -> None:
        """Replace these handlers with the watcher's own, except for ignored signals."""
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def restore(self, handlers: Handlers) -> None:
        """Restore these handlers: the inverse of `install`."""
        # None means that a C library has set the handler, so Python cannot restore it.
        for number, handler in handlers.items():
            if handler is not None and handler is not signal.SIG_IGN:
                signal.signal(number, handler)

    def close(self) -> None:
        """Restore handlers and wakeup descriptor, and stop the thread."""
        self.restore(self._handlers)
        signal.set_wakeup_fd(self._descriptor)
        # Signal number 0 ends the thread.
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _wait(self) -> None:
        # Import here: loading the module takes time, and the handlers must be set first.
        import select

        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while self._drain() is not None:
            poll.poll()

    def _drain(self) -> int | None:
        """Handle all signals in the pipe. Return their number, or None if the watcher is closed."""
        try:
            numbers = os.read(self._reader, 512)
        except BlockingIOError:
            return 0
        for number in numbers:
            # If other code has replaced the handler, Python calls that one, and it is enough.
            if number in STOPS and signal.getsignal(number) == self._handle:
                self.dispatch(number)
        return None if 0 in numbers else len(numbers)

    def _handle(self, number: int, frame: object) -> None:
        """Handle a signal in the main thread, as soon as that executes Python code again.

        Usually the watcher's own thread has already handled the signal.
        """
        descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if descriptor == self._writer:
            self._drain()
        else:
            # An event loop such as uvloop has temporarily set its own descriptor, so the pipe is empty.
            signal.set_wakeup_fd(descriptor)
            self.dispatch(number)

    def dispatch(self, number: int) -> None:
        """Pass a signal to the innermost listener. Exit if there is none, or if it returns a line."""
        line = self.listeners[-1](number) if self.listeners else format_stop_message(number)
        if line is not None and self.ending.acquire(blocking=False):
            # Exit in a separate thread and let the main thread continue: a cleanup callback may need a lock that the
            # main thread holds.
            threading.Thread(target=self._end, args=(number, line), daemon=True).start()

    def _end(self, number: int, line: str) -> None:
        # Use os._exit after a limited time: the interpreter must not be torn down while XLA's threads run, and a
        # hanging callback must not block the exit.
        cleanup_thread = threading.Thread(target=self._run_cleanups, args=(number, line), daemon=True)
        cleanup_thread.start()
        cleanup_thread.join(_CLEANUP_SECONDS)
        os._exit(128 + number)

    def _run_cleanups(self, number: int, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            phases.mute()
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            # On a terminal, start with a line break, because the cursor is behind ^C and possibly behind half a line.
            os.write(2, f"{chr(10) * os.isatty(2)}{line}\n".encode())
        for cleanup in reversed([*self.cleanups.values()]):
            # An error cannot be reported any more, and the remaining callbacks must be called, too.
            with contextlib.suppress(Exception):
                cleanup(number, line)


_watcher: _SignalWatcher | None = None
_forks_forget = False


def begin() -> None:
    """Watch signals from now on until the process ends, as described in the module docstring.

    Call it from the main thread of Plimsoll's own processes. A program that only calls Plimsoll as a library keeps its
    handlers. Calling it again does nothing.
    """
    global _watcher, _forks_forget
    if _watcher is None:
        _watcher = _SignalWatcher()
        if not _forks_forget:
            # Block signals around a fork: until the child has dropped the watcher, a signal to the child would be
            # written to the pipe of this process.
            os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)
            _forks_forget = True


@contextlib.contextmanager
def watch_signals() -> Iterator[None]:
    """Watch signals as `begin` does, until the context exits.

    It does nothing if signals are already watched, or in a thread other than the main one.
    """
    global _watcher
    if _watcher is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    begin()
    assert _watcher is not None
    try:
        yield
    finally:
        wait_if_exiting()
        _watcher.close()
        _watcher = None


def _block() -> None:
    if _watcher is not None:
        _watcher.masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def _unblock() -> None:
    if _watcher is not None and (mask := _watcher.masks.pop(threading.get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget() -> None:
    """Drop the watcher in a forked child.

    The thread does not exist there, the pipe belongs to the parent, and the child must not remove the parent's files.
    """
    global _watcher
    if _watcher is not None:
        signal.set_wakeup_fd(-1)
        for number in STOPS:
            if signal.getsignal(number) == _watcher._handle:
                signal.signal(number, signal.SIG_DFL)
        _unblock()
        _watcher = None


@contextlib.contextmanager
def listen_for_signals(listener: Listener) -> Iterator[None]:
    """Pass signals to `listener`, in any thread, until the context exits.

    The process ends only if the listener returns a line.

    Args:
        listener: called with the signal's number.
    """
    with watch_signals():
        # No watcher means that this is not the main thread.
        if _watcher is None:
            yield
            return
        watcher = _watcher
        handlers: Handlers = {number: signal.getsignal(number) for number in STOPS}
        watcher.listeners.append(listener)
        # Install them again, because a package may have set its own handlers in the meantime.
        watcher.install(handlers)
        try:
            yield
        finally:
            watcher.restore(handlers)
            watcher.listeners.remove(listener)


def register_cleanup(cleanup: Cleanup) -> Callable[[], object]:
    """Register a callback that runs when a signal ends the process. Callbacks run last in, first out.

    If no signals are watched, nothing is registered.

    Args:
        cleanup: called with the signal's number and the line that is shown.

    Returns:
        A function that cancels the registration.
    """
    # If the process is already ending, a file that the caller is about to create would not be removed.
    wait_if_exiting()
    if _watcher is None:
        return lambda: None
    key = object()
    _watcher.cleanups[key] = cleanup
    return functools.partial(_watcher.cleanups.pop, key, None)


@contextlib.contextmanager
def remove_on_signal(path: str | os.PathLike[str]) -> Iterator[None]:
    """Remove a file or folder if a signal ends the process inside the context."""

    def remove(number: int, line: str) -> None:
        # Try twice, because the main thread may be writing there at the same time.
        for _ in range(2):
            shutil.rmtree(path, ignore_errors=True)
        Path(path).unlink(missing_ok=True)

    unregister = register_cleanup(remove)
    try:
        yield
    finally:
        unregister()


def wait_if_exiting() -> None:
    """Block the main thread if the process is ending, so that it prints and creates nothing more."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _watcher is not None and _watcher.ending.locked():
        time.sleep(60)


_raises = False


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Make `stop_signals` raise an exception instead of ending the process, until the context exits.

    This is for a program that calls Plimsoll, such as a notebook, which continues after Ctrl-C. SIGINT becomes
    KeyboardInterrupt, and SIGTERM becomes SystemExit.
    """
    global _raises
    outer_value = _raises
    _raises = True
    try:
        yield
    finally:
        _raises = outer_value


@contextlib.contextmanager
def _raise_signals(has_unsaved: Callable[[], bool]) -> Iterator[list[int]]:
    """Implement `stop_signals` with exceptions in the main thread. In other threads, no signals are received."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1 and has_unsaved():
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
            # None means that a C library has set the handler, so Python cannot restore it.
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals(has_unsaved: Callable[[], bool] = lambda: True) -> Iterator[list[int]]:
    """Append SIGTERM and SIGINT to a list, which the caller reads between steps.

    The second signal ends the process.

    Args:
        has_unsaved: returns whether there is anything to save. While there is not, even the first signal ends the
            process.
    """
    if _raises and _watcher is None:
        with _raise_signals(has_unsaved) as received:
            yield received
        return
    received = []

    def dispatch(number: int) -> str | None:
        if not has_unsaved():
            return format_stop_message(number)
        received.append(number)
        if len(received) == 1:
            return None
        return f"{format_stop_message(number)}, the second signal: the steps since the last checkpoint are not saved"

    with listen_for_signals(dispatch):
        yield received
