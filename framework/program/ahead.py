"""Programs that a thread compiles, while the main thread does what a person waits for.

A run compiles three programs: its first values, its step and its evaluation. Its first step needs the first two only.
So on CPU a thread compiles the first values while the main thread traces and compiles the step, and the evaluation
while the first steps run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from framework.terminal.phases import SHORT, phase

FIRST_VALUES = "first values"


class Ahead:
    """The programs of one thread, by name. It compiles them in the order in which they were asked for."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._programs: dict[Hashable, Future[Any]] = {}

    def begin(self, name: Hashable, compile_program: Callable[[], Any]) -> None:
        """Calls `compile_program()` in the thread. A name that was asked for before is not compiled again."""
        if name in self._programs:
            return
        # The thread starts with the first program, so a run that compiles nothing ahead has none.
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile-ahead")
        self._programs[name] = self._thread.submit(compile_program)

    def program(self, name: Hashable) -> Any:
        """The program, as soon as it is compiled; None if nobody asked for it. Raises what compiling it raised."""
        future = self._programs.get(name)
        if future is None:
            return None
        if not future.done():
            with phase(f"compiling {_text_of(name)}", patience=SHORT):
                wait([future])
        return future.result()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._programs

    def close(self) -> None:
        """Cancels the programs that the thread has not begun: whoever needs one of them compiles it."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        # A cancelled program is forgotten, so that `program` answers None instead of raising
        # CancelledError.
        started_programs = {}
        for name, future in self._programs.items():
            if not future.cancelled():
                started_programs[name] = future
        self._programs = started_programs
        self._thread = None


def evaluation_of(group: str) -> Hashable:
    """The name of the program that evaluates the weights of a group of the state: "parameter" or "ema"."""
    return ("evaluation", group)


def _text_of(name: Hashable) -> str:
    """A program's name as a person is told it."""
    return f"the {name}" if isinstance(name, str) else "the evaluation"
