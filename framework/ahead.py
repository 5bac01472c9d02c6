"""Programs that a thread compiles ahead, while the main thread compiles the one that a person waits for.

XLA compiles a small model's step on one core, and Python has nothing to do meanwhile. May import: JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from framework.program import Program


class Ahead:
    """Compiled programs by name, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._programs: dict[Hashable, Future[Any]] = {}

    def begin(self, name: Hashable, compile: Callable[[], Any]) -> None:
        """Has `compile()` called in the thread. Nothing happens where that was asked for before."""
        if name in self._programs:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile-ahead")
        self._programs[name] = self._thread.submit(compile)

    def program(self, name: Hashable) -> Any:
        """The program, as soon as it is compiled; None where nobody asked for it. Raises what compiling it raised."""
        future = self._programs.get(name)
        return None if future is None else future.result()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._programs

    def close(self) -> None:
        """What has not begun is not compiled any more. Who asks for it compiles it."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._programs = {name: future for name, future in self._programs.items() if not future.cancelled()}
        self._thread = None


def compile_ahead(program: Program, *, first_values: bool, evaluation: bool) -> None:
    """Has a thread compile what a run needs beside its step, while the step is compiled.

    On CPU and in one process alone: a GPU's compiler tries out kernels on the device, and would measure two programs at
    once; a TPU's may refuse evaluation for its memory, which is to show before there are steps to lose.
    """
    platform = program.mesh.devices.flat[0].platform
    if program.in_parts or jax.process_count() > 1 or platform != "cpu":
        return
    if first_values:
        program.ahead.begin("init", lambda: program.init_jit().lower().compile())
    # The averages, where there are any, are evaluated too.
    groups = ["parameter", "ema"] if program.layout.specs["ema"] else ["parameter"]
    for group in groups if evaluation else ():
        program.ahead.begin(("evaluate", group), partial(_compile_evaluation, program, group))


def _compile_evaluation(program: Program, group: str) -> Any:
    jitted = program.evaluate_averages_jit if group == "ema" else program.evaluate_jit
    layout = program.layout
    weights = [layout.abstract(layout.specs[name]) for name in (group, "frozen", "buffer")]
    return jitted.lower(*weights, layout.abstract(program.evaluation_specs)).compile()
