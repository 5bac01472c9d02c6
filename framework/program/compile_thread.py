"""Programs compiled in a background thread, while the main thread does work that the user waits for.

A run compiles three programs: initialization, step and evaluation. Its first step needs only the first two. So on CPU
a thread compiles the initialization while the main thread traces and compiles the step, and the evaluation while the
first steps run, unless the compiler's memory would add to that of a large state.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from plimsoll.framework.terminal.phases import SHORT, phase

# The first parts of the names of programs: (INIT,), and (EVALUATION, the group with the weights: "parameter" or "ema").
INIT = "initialization"
EVALUATION = "evaluation"
ProgramName = tuple[str, ...]


class CompileThread:
    """The programs of one thread, by name. They are compiled in the order in which they were requested."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._programs: dict[ProgramName, Future[jax.stages.Compiled]] = {}

    def begin(self, name: ProgramName, compile_program: Callable[[], jax.stages.Compiled]) -> None:
        """Call `compile_program()` in the thread. A name that was requested before is not compiled again."""
        if name in self._programs:
            return
        # The thread starts with the first program, so a run that compiles nothing ahead has no thread.
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile-ahead")
        self._programs[name] = self._thread.submit(compile_program)

    def program(self, name: ProgramName) -> jax.stages.Compiled | None:
        """Return the program once it is compiled; None if it was not requested.

        Raises the exception of its compilation.
        """
        future = self._programs.get(name)
        if future is None:
            return None
        if not future.done():
            with phase(f"compiling the {name[0]}", patience=SHORT):
                wait([future])
        return future.result()

    def wait(self) -> None:
        """Wait until everything that was requested is compiled. Exceptions are raised by `program`."""
        wait(self._programs.values())

    def __contains__(self, name: ProgramName) -> bool:
        return name in self._programs

    def close(self) -> None:
        """Cancel the programs that the thread has not started; callers that need one compile it themselves."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        # Forget cancelled programs, so that `program` returns None instead of raising CancelledError.
        started_programs = {}
        for name, future in self._programs.items():
            if not future.cancelled():
                started_programs[name] = future
        self._programs = started_programs
        self._thread = None
