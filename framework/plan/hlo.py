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

_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16}  # the others' names end in their bits
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{[^}]*?(S\(\d+\))?\})?")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAMES = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|called_computations|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")
_HOST = "S(5)"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Array:
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
        Array(match[1], tuple(int(d) for d in match[2].split(",") if d), match[3] == _HOST)
        for match in _SHAPE.finditer(text)
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

    def called(self, role: str) -> str | None:
        """The computation that it uses as "body" or "condition"."""
        match = re.search(rf"{role}=%([\w.\-]+)", self.attributes)
        return match[1] if match else None


class Module:
    """A parsed program.

    Args:
        text: `HloModule::ToString`, with or without a schedule.
    """

    def __init__(self, text: str):
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.entry = current = ""
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")):
                current = _NAMES.search(line)[1]  # type: ignore[index]
                self.computations[current] = []
                if line.startswith("ENTRY"):
                    self.entry = current
            elif line.startswith("  ") and " = " in line:
                instruction = _parse(line, current)
                self.instructions[instruction.name] = instruction
                self.computations[current].append(instruction)
                if line.startswith("  ROOT"):
                    self.roots[current] = instruction.name

    @cached_property
    def parameters(self) -> dict[str, str]:
        """{instruction name: op_name} of the entry's arguments; jax names them `state['parameter']['embed']...`."""
        return {i.name: i.op_name for i in self.computations[self.entry] if i.opcode == "parameter"}

    @cached_property
    def loops(self) -> dict[str, Instruction]:
        """{computation: the while instruction whose body it is}."""
        whiles = (i for i in self.instructions.values() if i.opcode == "while")
        return {body: i for i in whiles if (body := i.called("body"))}

    def trip_count(self, loop: Instruction) -> int:
        """How often a loop runs: as the compiler notes it (CPU, GPU), or the bound that its condition compares with."""
        noted = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if noted:
            return int(noted[1])
        condition = self.computations.get(loop.called("condition") or "", [])
        bounds = [i for i in condition if i.opcode == "constant" and i.type.startswith(("s32[]", "u32[]", "s64[]"))]
        return int(bounds[0].operands[0]) if len(bounds) == 1 and bounds[0].operands[0].isdigit() else 1

    @cached_property
    def runs(self) -> Counter[str]:
        """{computation: how often it runs in one execution of the program}."""
        runs: Counter[str] = Counter({self.entry: 1})
        callers: dict[str, list[tuple[str, int]]] = {}
        for i in self.instructions.values():
            if i.opcode == "while":
                callers.setdefault(i.called("body") or "", []).append((i.computation, self.trip_count(i)))
            for group in _CALLED.findall(i.attributes):
                for name in _NAMES.findall(group):
                    callers.setdefault(name, []).append((i.computation, 1))

        def count(computation: str) -> int:
            if computation not in runs:
                runs[computation] = sum(count(caller) * times for caller, times in callers.get(computation, []))
            return runs[computation]

        for computation in self.computations:
            count(computation)
        return runs

    def collective_bytes(self) -> dict[str, int]:
        """Bytes that a device takes part in moving, by kind of collective: the larger of operand and result."""
        found: dict[tuple[str, str], int] = {}
        for i in self.instructions.values():
            kind = i.opcode.removesuffix("-start")
            if kind in COLLECTIVES and self.runs[i.computation]:
                taken = sum(_bytes(self.instructions[name].type) for name in i.operands if name in self.instructions)
                # What starts an asynchronous one has its operands among its results.
                size = max(taken, _bytes(i.type) - (taken if i.opcode.endswith("-start") else 0))
                channel = re.search(r"channel_id=(\d+)", i.attributes)
                key = (kind, channel[1] if channel else i.name)  # an asynchronous one may be written down twice
                found[key] = max(found.get(key, 0), size * self.runs[i.computation])
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
                    total += result[0].num_bytes * self.runs[i.computation]
        return total


def _parse(line: str, computation: str) -> Instruction:
    left, _, right = line.partition(" = ")
    end = _closing(right) if right.startswith("(") else right.find(" ")
    match = _OPCODE.match(right, end)
    assert match, f"not an instruction: {line[:120]}"
    close = _closing(right, match.end() - 1)
    inside = right[match.end() : close - 1]
    operands = tuple(_NAMES.findall(inside)) if match[1] not in ("constant", "parameter") else (inside,)
    return Instruction(left.split("%")[-1].strip(), right[:end], match[1], operands, right[close:], computation)


def _bytes(text: str) -> int:
    return sum(array.num_bytes for array in arrays(text))


def _closing(text: str, start: int = 0) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)
