"""A program and how often each of its computations runs."""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property

from framework.plan.hlo.arrays import arrays
from framework.plan.hlo.computations import NAMES, Computations, Instruction
from framework.plan.hlo.trips import trip_count

_CALLED = re.compile(r"(calls|to_apply|called_computations|branch_computations|body)=(\{[^}]*\}|%[\w.\-]+)")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Module(Computations):
    """A parsed program, with or without a schedule, and how often everything in it runs."""

    def trip_count(self, loop: Instruction) -> int:
        """How often a loop runs; 1 where its text does not tell."""
        return trip_count(self, loop) or 1

    @cached_property
    def unknown_loops(self) -> list[Instruction]:
        """The loops whose text does not tell how often they run; they count once."""
        return [loop for loop in self.loops.values() if trip_count(self, loop) is None]

    @cached_property
    def _runs(self) -> Counter[str]:
        return Counter({self.entry: 1})

    @cached_property
    def _callers(self) -> dict[str, list[tuple[str, int]]]:
        """{computation: (who calls it, how often)}"""
        callers: dict[str, list[tuple[str, int]]] = {}
        for i in self.instructions.values():
            for role, names in _CALLED.findall(i.attributes):
                for name in NAMES.findall(names):
                    times = self.trip_count(i) if role == "body" else 1
                    callers.setdefault(name, []).append((i.computation, times))
        return callers

    def runs(self, computation: str) -> int:
        """How often a computation runs in one execution of the program."""
        if computation not in self._runs:
            callers = self._callers.get(computation, [])
            self._runs[computation] = sum(self.runs(caller) * times for caller, times in callers)
        return self._runs[computation]

    def collective_bytes(self) -> dict[str, int]:
        """Bytes that a device takes part in moving, by kind of collective: the larger of operand and result."""
        found: dict[tuple[str, str], int] = {}
        for i in self.instructions.values():
            kind = i.opcode.removesuffix("-start")
            if kind in _COLLECTIVES and self.runs(i.computation):
                taken = sum(self.instructions[name].num_bytes for name in i.operands if name in self.instructions)
                # What starts an asynchronous one has its operands among its results.
                size = max(taken, i.num_bytes - (taken if i.opcode.endswith("-start") else 0))
                channel = re.search(r"channel_id=(\d+)", i.attributes)
                key = (kind, channel[1] if channel else i.name)  # an asynchronous one may be written down twice
                found[key] = max(found.get(key, 0), size * self.runs(i.computation))
        totals: Counter[str] = Counter()
        for (kind, _), size in found.items():
            totals[kind] += size
        return dict(totals)

    def host_bytes(self) -> int:
        """Bytes that cross between device and host memory, both directions; 0 where the text names no memory spaces."""
        total = 0
        for i in self.instructions.values():
            if i.opcode in ("copy", "copy-start", "dynamic-update-slice", "dynamic-slice") and i.operands:
                source, result = self.instructions.get(i.operands[0]), arrays(i.type)[:1]
                before = arrays(source.type)[:1] if source else []
                if result and before and result[0].on_host != before[0].on_host:
                    total += result[0].num_bytes * self.runs(i.computation)
        return total
