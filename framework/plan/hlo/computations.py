"""Parses a program's text into instructions, grouped by computations that call each other.

Only the parts that the planner needs are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from plimsoll.framework.plan.hlo.arrays import arrays

NAMES = re.compile(r"%([\w.\-<>]+)")
# The groups are ROOT, name, type, opcode, operands (which may contain one level of brackets) and attributes.
_INSTRUCTION = re.compile(
    r"  (ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\(([^()]*(?:\([^()]*\)[^()]*)*)\)(.*)", flags=re.DOTALL
)
_BEGINS_INSTRUCTION = re.compile(r"  (?:ROOT )?%\S+ = ")
_CYCLES = re.compile(r'estimated_cycles":"(\d+)"')
# Source lines.
_FILE = re.compile(r'(\d+) "(.*)"')
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)")
_FRAME = re.compile(r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_INLINE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_LIBRARY = ("/site-packages/", "/dist-packages/")


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


@dataclass(frozen=True)
class SourceLine:
    """A file and a line number in it, counted from 1."""

    file: str
    line: int


@dataclass(frozen=True)
class _Frame:
    location: SourceLine
    caller: int


class Sources:
    """The source tables of one program.

    XLA writes the line of Python that an instruction comes from in one of two ways. In jax 0.10 and later, there are
    tables at the top of the text (file names, locations in files, and frames with a location and a caller), and
    instructions have `stack_frame_id=7`. In earlier versions, and if the tables are switched off, instructions have
    `source_file="..." source_line=78`.
    """

    def __init__(self, lines: list[str]):
        """Read the tables from the lines before the first computation."""
        files: dict[int, str] = {}
        locations: dict[int, SourceLine] = {}
        frames: dict[int, _Frame] = {}
        table = ""
        for line in lines:
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = line
            elif table == "FileNames" and (match := _FILE.match(line)):
                files[int(match[1])] = match[2]
            elif table == "FileLocations" and (match := _LOCATION.match(line)):
                file = files.get(int(match[2]), "")
                locations[int(match[1])] = SourceLine(file, int(match[3]))
            elif table == "StackFrames" and (match := _FRAME.match(line)):
                location = locations.get(int(match[2]), SourceLine("", 0))
                frames[int(match[1])] = _Frame(location, int(match[3] or 0))
        # The first frame has no caller. If it names itself, XLA counts callers from 1 and frames from 0, so callers
        # need a shift.
        shift = 1 if 1 in frames and frames[1].caller == 1 else 0
        self._frames: dict[int, _Frame] = {}
        for number, frame in frames.items():
            self._frames[number] = _Frame(frame.location, frame.caller - shift)

    def find_line(self, attributes: str) -> SourceLine | None:
        """Return the innermost line outside installed packages, or else the innermost line; None if unknown.

        Args:
            attributes: text of the instruction's attributes.
        """
        if inline := _INLINE.search(attributes):
            return SourceLine(inline[1], int(inline[2] or 0))
        frame_id = _FRAME_ID.search(attributes)
        number = int(frame_id[1]) if frame_id else 0
        innermost = None
        # Guard against a cycle of callers in the table.
        visited: set[int] = set()
        while number in self._frames and number not in visited:
            visited.add(number)
            frame = self._frames[number]
            innermost = innermost or frame.location
            if not any(folder in frame.location.file for folder in _LIBRARY):
                return frame.location
            number = frame.caller
        return innermost


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
                root, name, type_text, opcode, operand_text, attributes = match.groups()
                # The operand of a constant or a parameter is a value or a number, not a name.
                is_leaf = opcode in ("constant", "parameter")
                operands = (operand_text,) if is_leaf else tuple(NAMES.findall(operand_text))
                instruction = Instruction(name, type_text, opcode, operands, attributes, computation)
                self.instructions[name] = instruction
                self.computations.setdefault(computation, []).append(instruction)
                if root:
                    self.roots[computation] = name
        self.parameters: dict[str, str] = {}
        for instruction in self.computations.get(self.entry, []):
            if instruction.opcode == "parameter":
                self.parameters[instruction.name] = instruction.op_name
        self.loops: dict[str, Instruction] = {}
        for instruction in self.instructions.values():
            if instruction.opcode == "while":
                self.loops[instruction.get_called_computation("body")] = instruction

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
