"""What a step needs on a target: its programs compiled for it, and a rehearsal of their calls.

The peak is the largest over the calls of the program's own peak and of what is alive beside its arguments. A step that
is one program has one call, with nothing beside it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from framework.devices import compile_times
from framework.devices.executables import HostBytes
from framework.plan.cache import times_folder
from framework.plan.compiled import Compiled, compile_for
from framework.plan.naming import OF_LAYOUT, Named, name_buffers
from framework.plan.targets import Target
from framework.program.program import Program
from framework.schedules.layerwise import programs
from framework.schedules.layerwise.programs import Ledger

# The arrays that programs leave behind, by the program and the place among its results.
_GRADIENTS = re.compile(r"unit backward(, measured)?/2/[12]|head backward/2/[12]|embed backward/2/0|sum/2")
_NEW = re.compile(r"update [a-z]+/2/([012])")
_FETCHED = re.compile(r"[^/]*/1/(weights|home|state|kept|gradient|embed|head|shared)\b")
_KINDS = {"state": "optimizer_state", "kept": "activations", "gradient": "gradients"}


class RefusedError(Exception):
    """The compiler refused a program; `compiled` holds what it said."""

    def __init__(self, compiled: Compiled):
        super().__init__(compiled.message)
        self.compiled = compiled


def rehearsed(target: Target, mib: int | None, run: Callable[[programs.Compile], Ledger], what: str) -> Compiled:
    """Adds up what all programs of `run` need, as if they were one.

    Args:
        target: the machine to compile for.
        mib: the memory limit in MiB, see `compile_for`.
        run: rehearses with a function that compiles.
        what: what a person is told is being compiled, such as "the training step".
    """
    compile = _Compiler(target, mib, what)
    try:
        ledger = run(compile)
    except RefusedError as error:
        return replace(error.compiled, seconds=compile.seconds)
    return _as_one(ledger, compile.seconds)


def rehearse_companion(program: Program, target: Target) -> dict[str, Compiled]:
    """What the programs of the experiment's companion need, by name; {} where there is none, or it runs none."""
    companion = program.experiment.companion
    if companion is None:
        return {}
    compile = _Compiler(target, None, "the companion")
    try:
        ledgers = companion.rehearsed(program, compile)
    except RefusedError as error:
        return {"companion": replace(error.compiled, seconds=compile.seconds)}
    return {name: _as_one(ledger, compile.seconds) for name, ledger in ledgers.items()}


class _Compiler:
    """Compiles for a target, and adds up the seconds; see `rehearsed`. Raises RefusedError."""

    def __init__(self, target: Target, mib: int | None, what: str):
        self._target = target
        self._mib = mib
        self._what = what
        self.seconds = 0.0

    def __call__(self, lowered: Any, hosted: HostBytes) -> programs.Compiled:
        target = self._target
        what = f"{self._what} for {target.name}"
        with compile_times.compiling(what, lowered, about=target.name, times=times_folder()):
            compiled = compile_for(lowered, target.platform, hosted, self._mib)
        self.seconds += compiled.seconds
        # One program that is refused ends the rehearsal, as the step cannot run without it.
        if compiled.message:
            raise RefusedError(compiled)
        moved = 0
        if compiled.buffers is not None:
            moved = compiled.buffers.module.host_bytes()
        return programs.Compiled(
            None,
            compiled.peak,
            compiled,
            host_temp=compiled.host_temp,
            moved=moved,
        )


def _as_one(ledger: Ledger, seconds: float) -> Compiled:
    """All calls of a rehearsal, as if they were one program."""
    assert ledger.worst is not None
    worst: Compiled = ledger.worst[0].about
    # The arrays that are no arguments of the worst program are alive while it runs.
    bytes_beside = ledger.peak - worst.peak
    return replace(
        worst,
        seconds=seconds,
        peak=ledger.peak,
        allocated=worst.allocated + bytes_beside,
        argument=worst.argument + bytes_beside,
        ledger=ledger,
    )


def compile_step(program: Program, target: Target, limit: int | None) -> Compiled:
    """Compiles the training step. The compiler is told a limit (bytes) that is less than what the target has."""
    is_lower = limit is not None and limit < (target.limit_bytes or 0)
    mib = limit >> 20 if limit is not None and is_lower else None
    step = rehearsed(target, mib, program.execution.rehearse_step, "the training step")
    if step.ledger is None:
        return replace(step, host_temp=0)
    hosted = program.layout.bytes_per_device(memory_kind="pinned_host")
    return replace(step, host_temp=step.ledger.host_peak - hosted)


def named(program: Program, ledger: Ledger) -> list[Named]:
    """The buffers alive at the peak: arrays between programs, and the temporaries of the program that runs."""
    assert ledger.worst is not None
    compiled, alive = ledger.worst
    named_buffers = []
    for label, kind, size in alive:
        if kind == "device":
            name, group = _place(label)
            named_buffers.append(Named(name, group, size, ""))
    if compiled.about.buffers is not None:
        named_buffers += name_buffers(compiled.about.buffers, program.checkpoint_layout)
    return sorted(named_buffers, key=lambda buffer: -buffer.bytes)


def _place(label: str) -> tuple[str, str]:
    """(name, group) of an array that lives between programs."""
    # A label that begins with a number is that of an argument: of the state, or the batch.
    path = re.sub("^/[0-9]+/", "", label)
    if path != label:
        name = re.sub("/(first|stack)/[0-9]+/", r"/\1/", path)
        return name, OF_LAYOUT.get(path.split("/", 1)[0], "batch")
    if _GRADIENTS.match(label):
        return "gradients that wait", "gradients"
    if match := _NEW.match(label):
        groups = ("parameters", "optimizer_state", "ema")
        return "what was updated", groups[int(match[1])]
    if match := _FETCHED.match(label):
        return f"{match[1]} from the host", _KINDS.get(match[1], "parameters")
    return label.split("/", 1)[0], "activations"


def totals(ledger: Ledger) -> dict[str, Any]:
    """The keys of a report that sum up all calls: collective bytes by kind, and bytes between host and device."""
    collective: Counter[str] = Counter()
    for call in ledger.calls:
        # A program that is called several times is counted each time.
        if call.about.buffers is not None:
            collective.update(call.about.buffers.module.collective_bytes())
    return {"collective_bytes": dict(collective), "host_transfer_bytes": ledger.moved}
