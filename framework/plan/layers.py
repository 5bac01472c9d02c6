"""The plan of a step in layers: every kind of program compiled for the target, and a rehearsal of the step with them.

The peak is the largest over the calls of the program's own peak and of what is alive beside its arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from framework.devices.executables import HostBytes
from framework.plan import jaxprs
from framework.plan.compiled import Compiled, compile_for
from framework.plan.naming import OF_LAYOUT, Named, name_buffers
from framework.plan.targets import Target
from framework.program.program import Program
from framework.schedules.layerwise import programs
from framework.schedules.layerwise.programs import Ledger

# What programs leave behind, by the program and the place among its results.
_GRADIENTS = re.compile(r"back( measured)?/2/1|turn/2/[12]|leave/2/0|sum/2|back( measured)?/2/2")
_NEW = re.compile(r"update [a-z]+/2/([012])")
_FETCHED = re.compile(r"[^/]*/1/(weights|home|state|kept|gradient|embed|head|shared)\b")
_KINDS = {"state": "optimizer_state", "kept": "activations", "gradient": "gradients"}


class RefusedError(Exception):
    """The compiler refused a program; holds what it said."""

    def __init__(self, found: Compiled):
        super().__init__(found.message)
        self.found = found


def rehearsed(target: Target, mib: int | None, run: Callable[[programs.Compile], Ledger]) -> Compiled:
    """What all programs of `run` together need, as if they were one.

    Args:
        target: where. mib: see `compile_for`.
        run: rehearses with a function that compiles.
    """
    seconds = 0.0

    def compile(lowered: Any, hosted: HostBytes) -> programs.Compiled:
        nonlocal seconds
        found = compile_for(lowered, target.platform, hosted, mib)
        seconds += found.seconds
        if found.message:
            raise RefusedError(found)
        return programs.Compiled(None, found.peak, found)

    try:
        ledger = run(compile)
    except RefusedError as error:
        return replace(error.found, seconds=seconds)
    assert ledger.worst is not None
    worst: Compiled = ledger.worst[0].about
    beside = ledger.peak - worst.peak
    whole = replace(worst, seconds=seconds, peak=ledger.peak, allocated=worst.allocated + beside)
    return replace(whole, argument=worst.argument + beside, ledger=ledger)


def compile_layers(program: Program, target: Target, mib: int | None) -> Compiled:
    """The training step."""
    layout = program.layout
    run = partial(program.layers.rehearse, layout.specs, program.batch_specs)
    found = rehearsed(target, mib, run)
    hosted = layout.bytes_per_device(memory_kind="pinned_host")
    return replace(found, host_temp=found.ledger.host_peak - hosted if found.ledger else 0)


def named(program: Program, ledger: Ledger) -> list[Named]:
    """What is alive at the peak: arrays between programs, and the temporaries of the program that runs."""
    assert ledger.worst is not None
    compiled, alive = ledger.worst
    found = [Named(*_place(label), size, "") for label, kind, size in alive if kind == "device"]
    if compiled.about.buffers is not None:
        found += name_buffers(compiled.about.buffers, program.whole)
    return sorted(found, key=lambda one: -one.bytes)


def _place(label: str) -> tuple[str, str]:
    """(name, group) of an array that lives between programs."""
    path = re.sub("^/[0-9]+/", "", label)  # of the state, or the batch
    if path != label:
        name = re.sub("/stack/[0-9]+/", "/stack/", path)
        return name, OF_LAYOUT.get(path.split("/", 1)[0], "batch")
    if _GRADIENTS.match(label):
        return "gradients that wait", "gradients"
    if found := _NEW.match(label):
        return "what was updated", ("parameters", "optimizer_state", "ema")[int(found[1])]
    if found := _FETCHED.match(label):
        return f"{found[1]} from the host", _KINDS.get(found[1], "parameters")
    return label.split("/", 1)[0], "activations"


def totals(ledger: Ledger, tokens: int) -> dict[str, Any]:
    """Of all calls, for a report: FLOPs, collective bytes by kind, and bytes between host and device."""
    counts: dict[int, jaxprs.FlopCount] = {}
    collective: Counter[str] = Counter()
    for call in ledger.calls:
        counts.setdefault(id(call), jaxprs.flops(call.jaxpr))
        if call.about.buffers is not None:
            collective.update(call.about.buffers.module.collective_bytes())
    flops = sum(counts[id(call)].flops for call in ledger.calls)
    report = {"flops_per_step": flops, "flops_per_token": flops / tokens, "collective_bytes": dict(collective)}
    return {**report, "host_transfer_bytes": ledger.moved}
