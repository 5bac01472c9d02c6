"""A parsed program: which operation made a buffer, what each loop moves, and how often everything runs.

Only what is needed is read. May import: framework.plan.hlo.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from framework.plan.hlo import trips
from framework.plan.hlo.arrays import arrays
from framework.plan.hlo.source import SourceLine, Sources

_NAMES = re.compile(r"%([\w.\-<>]+)")
# ROOT, name, type, opcode, operands (whose own brackets are not nested), attributes
_INSTRUCTION = re.compile(
    r"  (ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\(([^()]*(?:\([^()]*\)[^()]*)*)\)(.*)", flags=re.DOTALL
)
_BEGINS_INSTRUCTION = re.compile(r"  (?:ROOT )?%\S+ = ")
_CALLED = re.compile(r"(calls|to_apply|called_computations|branch_computations|body)=(\{[^}]*\}|%[\w.\-]+)")
_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


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

    @cached_property
    def estimated_cycles(self) -> int | None:
        """What the TPU's compiler takes it to need, by the cost model that it decides fusions by; None if unsaid."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match else None

    def attribute(self, key: str) -> str:
        """The name or number after `key=`, such as the computation that it `calls`; "" if there is none."""
        match = re.search(rf"\b{key}=%?([\w.\-<>]+)", self.attributes)
        return match[1] if match else ""

    def called(self, role: str) -> str:
        """The computation that it uses as "body", "condition" or "calls"; "" if none."""
        match = re.search(rf"{role}=%([\w.\-<>]+)", self.attributes)
        return match[1] if match else ""


class Module:
    """A parsed program, with or without a schedule.

    Attributes:
        text: what was parsed.
        instructions: by name. computations: their instructions, by name. roots: {computation: name of its result}.
        entry: the computation that the program starts with.
        parameters: {instruction name: op_name} of the entry's arguments, which jax names `state['ema']['embed']`.
        loops: {computation: the while instruction whose body it is}.
    """

    def __init__(self, text: str):
        self.text = text
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.entry = current = ""
        for line in _logical_lines(text):
            if line.startswith(("%", "ENTRY")):
                current = _NAMES.findall(line)[0]
                self.entry = current if line.startswith("ENTRY") else self.entry
            elif match := _INSTRUCTION.match(line):
                root, name, kind, opcode, inside, attributes = match.groups()
                operands = (inside,) if opcode in ("constant", "parameter") else tuple(_NAMES.findall(inside))
                instruction = Instruction(name, kind, opcode, operands, attributes, current)
                self.instructions[name] = instruction
                self.computations.setdefault(current, []).append(instruction)
                if root:
                    self.roots[current] = name
        self._runs = Counter({self.entry: 1})
        self.parameters = {i.name: i.op_name for i in self.computations.get(self.entry, []) if i.opcode == "parameter"}
        self.loops = {i.called("body"): i for i in self.instructions.values() if i.opcode == "while"}

    def root(self, computation: str) -> Instruction | None:
        """The instruction whose result is the computation's; None if the text has none."""
        return self.instructions.get(self.roots.get(computation, ""))

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that made its operands."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """What a fusion computes; empty for anything else."""
        return self.computations.get(instruction.called("calls"), []) if instruction.opcode == "fusion" else []

    @cached_property
    def _sources(self) -> Sources:
        before, _, _ = self.text.partition("\n%")
        return Sources(before.partition("\nENTRY")[0].splitlines())

    def source(self, instruction: Instruction) -> SourceLine | None:
        """The line of Python that an instruction comes from; None if the text does not say."""
        return self._sources.line_of(instruction.attributes)

    def trip_count(self, loop: Instruction) -> int:
        """How often a loop runs; 1 where its text does not tell."""
        return trips.trip_count(self, loop) or 1

    @cached_property
    def unknown_loops(self) -> list[Instruction]:
        """The loops whose text does not tell how often they run; they count once."""
        return [loop for loop in self.loops.values() if trips.trip_count(self, loop) is None]

    def branches(self, conditional: Instruction) -> list[str]:
        """The computations that a conditional chooses between."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
        if listed:
            return _NAMES.findall(listed[1])
        return [conditional.called(role) for role in ("true_computation", "false_computation")]

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


def _logical_lines(text: str) -> Iterator[str]:
    """The lines of computations, with the pieces of an instruction that goes over several lines joined.

    The metadata of a Pallas kernel is such: `frontend_attributes={kernel_metadata={` and what is in it begin lines of
    their own, one of them with a brace.
    """
    pieces: list[str] = []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) or _BEGINS_INSTRUCTION.match(line):
            if pieces:
                yield "\n".join(pieces)
            pieces = [line]
        elif pieces and pieces[0].startswith("  ") and line != "}":
            pieces.append(line)
    if pieces:
        yield "\n".join(pieces)
