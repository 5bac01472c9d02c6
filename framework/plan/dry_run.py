"""Measures what a step needs on a target: compiles its programs for the target and dry-runs their calls.

The peak is the maximum over calls of the program's own peak plus the arrays that are alive in addition to its
arguments. A step that is a single program has one call and no additional arrays.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import jax

from plimsoll.framework.devices import compile_times
from plimsoll.framework.devices.executables import HostBytes
from plimsoll.framework.plan.buffer_names import REPORT_GROUPS, NamedBuffer, name_buffers
from plimsoll.framework.plan.cache import times_folder
from plimsoll.framework.plan.compilation import CompiledProgram, compile_for
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.layerwise import programs
from plimsoll.framework.schedules.layerwise.programs import MemoryTracker

# Labels of the arrays that programs return: the program, and the path in its results.
_GRADIENTS = re.compile(
    r"unit backward(, measured)?/1/(grads|shared_sums)|head backward/1/(grads|tie_grads)|embed backward/1/grads|"
    r"sum( of ties)?/1"
)
_UPDATED = re.compile(r"update [a-z]+/1/([012])")
_FETCHED = re.compile(r"[^/]*/0/[0-9]+/arrived/(weights|home|state|kept|gradient|embed|head|shared)\b")
_LABEL_GROUPS = {"state": "optimizer_state", "kept": "activations", "gradient": "gradients"}


class RefusedError(Exception):
    """The compiler refused a program; `compiled` holds its message."""

    def __init__(self, compiled: CompiledProgram):
        super().__init__(compiled.message)
        self.compiled = compiled


def compile_programs(
    target: Target, mib: int | None, run: Callable[[programs.Compile], MemoryTracker], description: str
) -> CompiledProgram:
    """Compile all programs of `run` and return their combined memory, as if they were one program.

    Args:
        target: the machine to compile for.
        mib: memory limit in MiB, see `compile_for`.
        run: performs a dry run, given a function that compiles each program.
        description: description for the status message, such as "the training step".
    """
    compile = _TimedCompiler(target, mib, description)
    try:
        tracker = run(compile)
    except RefusedError as error:
        return replace(error.compiled, seconds=compile.seconds)
    return _combine_calls(tracker, compile.seconds)


def dry_run_batch_transform(program: Program, target: Target) -> dict[str, CompiledProgram]:
    """Compile the programs of the batch transform; {name: memory}, empty if there is none or it runs no program.

    Args:
        program: the program to train with.
        target: the machine to compile for.
    """
    batch_transform = program.experiment.batch_transform
    if batch_transform is None:
        return {}
    compile = _TimedCompiler(target, None, "the batch transform")
    try:
        trackers = batch_transform.dry_run(program, compile)
    except RefusedError as error:
        return {"batch_transform": replace(error.compiled, seconds=compile.seconds)}
    return {name: _combine_calls(tracker, compile.seconds) for name, tracker in trackers.items()}


class _TimedCompiler:
    """Compiles programs for a target and adds up the compile times; see `compile_programs`.

    Calling it raises RefusedError if the compiler refuses a program.
    """

    def __init__(self, target: Target, mib: int | None, description: str):
        self._target = target
        self._mib = mib
        self._description = description
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._last_end = 0.0

    def __call__(self, lowered: jax.stages.Lowered, offloaded: HostBytes) -> programs.LayerProgram:
        target = self._target
        description = f"{self._description} for {target.name}"
        status = compile_times.compiling(description, lowered, about=target.name, times=times_folder())
        # Programs that are compiled together, in other threads, have one status for all.
        is_main = threading.current_thread() is threading.main_thread()
        with status if is_main else contextlib.nullcontext():
            compiled = compile_for(lowered, target.platform, offloaded, self._mib)
        with self._lock:
            # Count the time that programs were compiled at the same time only once.
            end = time.monotonic()
            self.seconds += end - max(self._last_end, end - compiled.seconds)
            self._last_end = end
        # A refused program ends the dry run, because the step cannot run without it.
        if compiled.message:
            raise RefusedError(compiled)
        moved = 0
        if compiled.buffers is not None:
            moved = compiled.buffers.module.host_bytes()
        return programs.LayerProgram(None, compiled.peak, compiled, host_temp=compiled.host_temp, moved=moved)


def _combine_calls(tracker: MemoryTracker, seconds: float) -> CompiledProgram:
    """Combine all calls of a dry run as if they were one program."""
    assert tracker.worst is not None
    worst: CompiledProgram = tracker.worst[0].about
    # Arrays that are not arguments of the program with the highest peak are alive while it runs.
    additional_bytes = tracker.peak - worst.peak
    return replace(
        worst,
        seconds=seconds,
        peak=tracker.peak,
        allocated=max(worst.allocated + additional_bytes, tracker.allocated),
        argument=worst.argument + additional_bytes,
        tracker=tracker,
    )


def compile_step(program: Program, target: Target, limit: int | None) -> CompiledProgram:
    """Compile the training step.

    Args:
        program: the program to train with.
        target: the machine to compile for.
        limit: device memory in bytes; passed to the compiler only if it is below the target's own limit.
    """
    is_lower = limit is not None and limit < (target.limit_bytes or 0)
    mib = limit >> 20 if limit is not None and is_lower else None
    step = compile_programs(target, mib, program.backend.dry_run_step, "the training step")
    if step.tracker is None:
        return replace(step, host_temp=0)
    offloaded = program.layout.bytes_per_device(memory_kind="pinned_host")
    return replace(step, host_temp=step.tracker.host_peak - offloaded)


def name_peak_buffers(program: Program, tracker: MemoryTracker) -> list[NamedBuffer]:
    """Return the buffers alive at the peak: arrays kept between programs, and the running program's temporaries.

    Args:
        program: the program to train with.
        tracker: memory tracker of a dry run of its step.
    """
    assert tracker.worst is not None
    compiled, alive = tracker.worst
    named_buffers = []
    for array in alive:
        if array.kind == "device":
            name, group = _name_array(array.label)
            named_buffers.append(NamedBuffer(name, group, array.bytes, ""))
    if compiled.about.buffers is not None:
        named_buffers += name_buffers(compiled.about.buffers, program.checkpoint_layout)
    return sorted(named_buffers, key=lambda buffer: -buffer.bytes)


def _name_array(label: str) -> tuple[str, str]:
    """Return (name, group) of an array that is kept between programs."""
    # A label that begins with a number belongs to an argument: the state or the batch.
    path = re.sub("^/[0-9]+/", "", label)
    if path != label:
        name = re.sub("/(first|stack)/[0-9]+/", r"/\1/", path)
        return name, REPORT_GROUPS.get(path.split("/", 1)[0], "batch")
    if _GRADIENTS.match(label):
        return "gradients waiting for the update", "gradients"
    if match := _UPDATED.match(label):
        groups = ("parameters", "optimizer_state", "ema")
        return "updated arrays", groups[int(match[1])]
    if match := _FETCHED.match(label):
        return f"{match[1]} from the host", _LABEL_GROUPS.get(match[1], "parameters")
    return label.split("/", 1)[0], "activations"
