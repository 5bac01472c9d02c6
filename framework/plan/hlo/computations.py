"""Parses a program's text into instructions, grouped by computations that call each other.

Only the parts that the planner needs are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from plimsoll.framework.plan.hlo.arrays import arrays
from plimsoll.framework.plan.hlo.source_lines import SourceLine, Sources

NAMES = re.compile(r"%([\w.\-<>]+)")
# The groups are ROOT, name, type, opcode, operands (which may contain one level of brackets) and attributes.
_INSTRUCTION = re.compile(
    r"  (ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\(([^()]*(?:\([^()]*\)[^()]*)*)\)(.*)", flags=re.DOTALL
)
_BEGINS_INSTRUCTION = re.compile(r"  (?:ROOT )?%\S+ = ")
_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Instruction:
    """One operation: its name, type and opcode as text, the names of its operands, and the attributes after them."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    computation: str

    @cached_property
    def op_name(self) -> str:
        """Its scope in the traced program, `jit(step)/jvp(stack)/while/body/.../mul`; "" if unknown."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        # XLA escapes the quotes in names such as state.ema['embed'].
        return match[1].replace("\\'", "'") if match else ""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all arrays that it returns, excluding padding."""
        return sum(array.num_bytes for array in arrays(self.type))

    @cached_property
    def estimated_cycles(self) -> int | None:
        """Cycles estimated by the TPU compiler's cost model for fusions; None if there is no estimate."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match else None

    def attribute(self, key: str) -> str:
        """Return the name or number after `key=`, such as the computation that it `calls`; "" if there is none."""
        match = re.search(rf"\b{key}=%?([\w.\-<>]+)", self.attributes)
        return match[1] if match else ""

    def get_called_computation(self, role: str) -> str:
        """Return the computation that it uses as "body", "condition" or "calls"; "" if none."""
        match = re.search(rf"{role}=%([\w.\-<>]+)", self.attributes)
        return match[1] if match else ""


class Computations:
    """A parsed program, with or without a schedule: its instructions, grouped by computation.

    Attributes:
        text: the parsed text.
        instructions: {name: instruction} of all instructions.
        computations: {computation: its instructions}.
        roots: {computation: name of its result}.
        entry: name of the computation that the program starts with.
        parameters: {instruction name: op_name} of the entry's arguments, which jax names `state.ema['embed']`.
        loops: {computation: the while instruction whose body it is}.
    """

    def __init__(self, text: str):
        self.text = text
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.entry = ""
        computation = ""
        for line in _logical_lines(text):
            if line.startswith(("%", "ENTRY")):
                computation = NAMES.findall(line)[0]
                if line.startswith("ENTRY"):
                    self.entry = computation
            elif match := _INSTRUCTION.match(line):
                self._add(match, computation)
        self.parameters: dict[str, str] = {}
        for instruction in self.computations.get(self.entry, []):
            if instruction.opcode == "parameter":
                self.parameters[instruction.name] = instruction.op_name
        self.loops: dict[str, Instruction] = {}
        for instruction in self.instructions.values():
            if instruction.opcode == "while":
                self.loops[instruction.get_called_computation("body")] = instruction

    def _add(self, match: re.Match[str], computation: str) -> None:
        root, name, type_text, opcode, operand_text, attributes = match.groups()
        if opcode in ("constant", "parameter"):
            # The operand is a value or a number, not a name.
            operands = (operand_text,)
        else:
            operands = tuple(NAMES.findall(operand_text))
        instruction = Instruction(name, type_text, opcode, operands, attributes, computation)
        self.instructions[name] = instruction
        self.computations.setdefault(computation, []).append(instruction)
        if root:
            self.roots[computation] = name

    def root(self, computation: str) -> Instruction | None:
        """Return the instruction that computes the result of a computation; None if the text has none."""
        return self.instructions.get(self.roots.get(computation, ""))

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions that produce an instruction's operands."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def get_fused_instructions(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions in a fusion; [] for anything else."""
        if instruction.opcode != "fusion":
            return []
        return self.computations.get(instruction.get_called_computation("calls"), [])

    @cached_property
    def _sources(self) -> Sources:
        # The tables come before the first computation, which may be the entry.
        tables, _, _ = self.text.partition("\n%")
        tables, _, _ = tables.partition("\nENTRY")
        return Sources(tables.splitlines())

    def source(self, instruction: Instruction) -> SourceLine | None:
        """Return the line of Python that an instruction comes from; None if the text does not contain it."""
        return self._sources.find_line(instruction.attributes)

    def branches(self, conditional: Instruction) -> list[str]:
        """Return the computations that a conditional chooses between."""
        branch_list = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
        if branch_list:
            return NAMES.findall(branch_list[1])
        # A conditional on a boolean has two separately named branches.
        return [conditional.get_called_computation(role) for role in ("true_computation", "false_computation")]


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the lines of computations, joining instructions that span several lines.

    The metadata of a Pallas kernel spans several lines: `frontend_attributes={kernel_metadata={` and its contents start
    on separate lines, and one of them starts with a brace.
    """
    parts: list[str] = []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) or _BEGINS_INSTRUCTION.match(line):
            if parts:
                yield "\n".join(parts)
            parts = [line]
        elif parts and parts[0].startswith("  ") and line != "}":
            parts.append(line)
    if parts:
        yield "\n".join(parts)
