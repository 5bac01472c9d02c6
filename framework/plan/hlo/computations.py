"""What a program's text says: instructions, in computations, which call each other.

Only what is needed is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from framework.plan.hlo.arrays import arrays
from framework.plan.hlo.source import SourceLine, Sources

NAMES = re.compile(r"%([\w.\-<>]+)")
# ROOT, name, type, opcode, operands (whose own brackets are not nested), attributes
_INSTRUCTION = re.compile(
    r"  (ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\(([^()]*(?:\([^()]*\)[^()]*)*)\)(.*)", flags=re.DOTALL
)
_BEGINS_INSTRUCTION = re.compile(r"  (?:ROOT )?%\S+ = ")
_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')


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


class Computations:
    """A parsed program, with or without a schedule: its instructions, by the computations that they are in.

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
                current = NAMES.findall(line)[0]
                self.entry = current if line.startswith("ENTRY") else self.entry
            elif match := _INSTRUCTION.match(line):
                root, name, kind, opcode, inside, attributes = match.groups()
                operands = (inside,) if opcode in ("constant", "parameter") else tuple(NAMES.findall(inside))
                instruction = Instruction(name, kind, opcode, operands, attributes, current)
                self.instructions[name] = instruction
                self.computations.setdefault(current, []).append(instruction)
                if root:
                    self.roots[current] = name
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

    def branches(self, conditional: Instruction) -> list[str]:
        """The computations that a conditional chooses between."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
        if listed:
            return NAMES.findall(listed[1])
        return [conditional.called(role) for role in ("true_computation", "false_computation")]


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
