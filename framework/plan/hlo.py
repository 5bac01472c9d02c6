"""The compiler's final program, read from its text: which operation made a buffer, and what each loop moves.

The text is XLA's own, `HloModule::ToString`, the same for TPU, GPU and CPU; only what is needed here is read.
Imports nothing but the standard library.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16}  # the others' names end in their bits
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{[^}]*?(S\(\d+\))?\})?")
_NAMES = re.compile(r"%([\w.\-]+)")
# ROOT, name, type, opcode, operands (whose own brackets are not nested), attributes
_INSTRUCTION = re.compile(r"  (ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\(([^()]*(?:\([^()]*\)[^()]*)*)\)(.*)")
_CALLED = re.compile(r"(calls|to_apply|called_computations|branch_computations|body)=(\{[^}]*\}|%[\w.\-]+)")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Array(NamedTuple):
    """An array type: dtype, dimensions, and whether it is in host memory."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        """Without the padding of tiled layouts."""
        bits = _BITS.get(self.dtype) or int("".join(filter(str.isdigit, self.dtype)) or 32)
        return math.prod(self.dims) * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def arrays(text: str) -> list[Array]:
    """All array types in a piece of text, in order."""
    return [
        Array(dtype, tuple(int(d) for d in dims.split(",") if d), space == "S(5)")
        for dtype, dims, space in _SHAPE.findall(text)
    ]


@dataclass(frozen=True)
class Instruction:
    """One operation: its name, type and opcode as text, the names of its operands, and what follows them."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    computation: str

    @cached_property
    def op_name(self) -> str:
        """Where in the traced program it comes from, `jit(step)/jvp(stack)/while/body/.../mul`; "" if unknown."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    @cached_property
    def num_bytes(self) -> int:
        """Of all arrays that it returns."""
        return sum(array.num_bytes for array in arrays(self.type))

    def called(self, role: str) -> str:
        """The computation that it uses as "body", "condition" or "calls"; "" if none."""
        match = re.search(rf"{role}=%([\w.\-]+)", self.attributes)
        return match[1] if match else ""


class Module:
    """A parsed program: `HloModule::ToString`, with or without a schedule.

    Attributes:
        instructions: by name. computations: their instructions, by name. roots: {computation: name of its result}.
        parameters: {instruction name: op_name} of the entry's arguments, which jax names `state['ema']['embed']`.
        loops: {computation: the while instruction whose body it is}.
    """

    def __init__(self, text: str):
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[Instruction]] = {}
        self.roots: dict[str, str] = {}
        entry = current = ""
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")):
                current = _NAMES.findall(line)[0]
                entry = current if line.startswith("ENTRY") else entry
            elif match := _INSTRUCTION.match(line):
                root, name, kind, opcode, inside, attributes = match.groups()
                operands = (inside,) if opcode in ("constant", "parameter") else tuple(_NAMES.findall(inside))
                instruction = Instruction(name, kind, opcode, operands, attributes, current)
                self.instructions[name] = instruction
                self.computations.setdefault(current, []).append(instruction)
                if root:
                    self.roots[current] = name
        self._runs = Counter({entry: 1})
        self.parameters = {i.name: i.op_name for i in self.computations.get(entry, []) if i.opcode == "parameter"}
        self.loops = {i.called("body"): i for i in self.instructions.values() if i.opcode == "while"}

    def trip_count(self, loop: Instruction) -> int:
        """How often a loop runs: as the compiler notes it (CPU, GPU), or the bound that its condition compares with."""
        if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(noted[1])
        condition = self.computations.get(loop.called("condition"), [])
        bounds = [i for i in condition if i.opcode == "constant" and i.type.startswith(("s32[]", "u32[]", "s64[]"))]
        return int(bounds[0].operands[0]) if len(bounds) == 1 and bounds[0].operands[0].isdigit() else 1

    @cached_property
    def _callers(self) -> dict[str, list[tuple[str, int]]]:
        """{computation: (who calls it, how often)}"""
        callers: dict[str, list[tuple[str, int]]] = {}
        for i in self.instructions.values():
            for role, names in _CALLED.findall(i.attributes):
                for name in _NAMES.findall(names):
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
