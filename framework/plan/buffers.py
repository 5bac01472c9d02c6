"""Buffers that are alive at a program's memory peak, parsed from the compiler's dump.

With the compiler option `xla_dump_to`, XLA (for TPU, GPU and CPU alike) writes two texts next to the final program:
`buffer-assignment`, the offset and size of every value in each allocation, and `live-range`, the schedule steps during
which each value is alive. The peak is the largest sum of bytes alive at once. Values that share an address (a loop's
carry, an in-place update) count once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.framework.plan.hlo import Module

DUMP_OPTION = "xla_dump_to"
# Size, memory space ("color": 0 is device memory; fast on-chip memory and host memory have other
# colors) and contents. jaxlib 0.11 also prints an allocation's page.
_ALLOCATION = re.compile(r"\d+: size (\d+)(?:, page \d+)?(?:, color (\d+))?(?:, page \d+)?, (.*?):?$", re.MULTILINE)
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)", re.M)
_RANGE = re.compile(r"^ +(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class BufferValue:
    """One value of the program: its instruction and tuple index, position in an allocation, and live range."""

    name: str
    index: tuple[int, ...]
    size: int
    offset: int
    shape: str
    start: int
    end: int


@dataclass(frozen=True)
class PeakBlock:
    """Bytes that are alive at the peak, and all values that share them over time; the value at the peak comes first."""

    size: int
    values: list[BufferValue]


@dataclass
class Buffers:
    """Device memory that a program uses at its peak.

    Attributes:
        module: the parsed program text.
        parameters: {instruction name: bytes} of arguments; an output that aliases an argument is counted here.
        blocks: the temporaries alive at the peak.
        output_bytes: bytes of outputs that alias no argument.
        fixed_bytes: bytes of constants and similar allocations.
        heap_bytes: size of the allocation that holds all temporaries; at least the sum of the blocks, because packing
            leaves gaps.
    """

    module: Module
    parameters: dict[str, int] = field(default_factory=dict)
    blocks: list[PeakBlock] = field(default_factory=list)
    output_bytes: int = 0
    fixed_bytes: int = 0
    heap_bytes: int = 0

    @property
    def live_bytes(self) -> int:
        """Bytes alive at the peak."""
        temporary_bytes = sum(block.size for block in self.blocks)
        return sum(self.parameters.values()) + self.output_bytes + self.fixed_bytes + temporary_bytes

    @property
    def gap_bytes(self) -> int:
        """Bytes that packing leaves empty at the peak."""
        return self.heap_bytes - sum(block.size for block in self.blocks)


def read_dump(directory: Path) -> Buffers:
    """Read the dump of one program.

    Raises:
        FileNotFoundError: there is no dump (the compiler stops before writing it if a program is too big for a TPU).
    """
    buffers = Buffers(Module(_text(directory, "")))
    live_ranges: dict[tuple[str, str], tuple[int, int]] = {}
    for name, index, start, end in _RANGE.findall(_text(directory, "-live-range")):
        live_ranges[name, index] = (int(start), int(end))
    allocations = re.split("^allocation ", _text(directory, "-buffer-assignment"), flags=re.MULTILINE)
    # The first part is the text before the first allocation.
    for text in allocations[1:]:
        header = _ALLOCATION.match(text)
        if header is None or int(header[2] or 0) != 0 or header[3].startswith("thread-local"):
            continue
        size = int(header[1])
        purpose = header[3]
        values = []
        for name, index, value_size, offset, shape in _VALUE.findall(text):
            # Values without a live range are never alive: they end before they start.
            start, end = live_ranges.get((name, index), (0, -1))
            tuple_index = tuple(int(part) for part in index.split(",") if part)
            values.append(BufferValue(name, tuple_index, int(value_size), int(offset), shape, start, end))
        if purpose.startswith("parameter"):
            names = [value.name for value in values]
            # An output that aliases an argument is a value of the same allocation.
            argument_names = [name for name in names if name in buffers.module.parameters]
            name = argument_names[0] if argument_names else names[0]
            buffers.parameters[name] = size
        elif "maybe-live-out" in purpose:
            buffers.output_bytes += size
        elif "temp" in purpose:
            buffers.heap_bytes += size
            buffers.blocks += _peak(values)
        else:
            buffers.fixed_bytes += size
    return buffers


def _text(directory: Path, kind: str) -> str:
    paths = sorted(directory.glob(f"*after_optimizations{kind}.txt"))
    if not paths:
        raise FileNotFoundError(f"the compiler wrote no after_optimizations{kind}.txt to {directory}")
    return paths[-1].read_text()


def _peak(values: list[BufferValue]) -> list[PeakBlock]:
    """Return the blocks that are alive when an allocation's live bytes are at their maximum."""
    values = [value for value in values if value.size]
    # The sum grows only where a value starts.
    instants = {value.start for value in values}
    best: list[tuple[BufferValue, int]] = []
    best_bytes = -1
    for instant in instants:
        alive = _without_overlap([v for v in values if v.start <= instant <= v.end])
        alive_bytes = sum(size for _, size in alive)
        if alive_bytes > best_bytes:
            best = alive
            best_bytes = alive_bytes
    return [PeakBlock(size, _history(value, values)) for value, size in best]


def _without_overlap(alive: list[BufferValue]) -> list[tuple[BufferValue, int]]:
    """Return each value with the bytes that no earlier value covers; of values at one offset, the largest is first."""
    covered_end = 0
    sizes = []
    for value in sorted(alive, key=lambda value: (value.offset, -value.size)):
        end = value.offset + value.size
        new_bytes = end - max(covered_end, value.offset)
        if new_bytes > 0:
            sizes.append((value, new_bytes))
            covered_end = end
    return sizes


def _history(value: BufferValue, values: list[BufferValue]) -> list[BufferValue]:
    """Return a value and all values that share its buffer over time: same offset and size, adjoining live ranges."""
    chain = [value]
    candidates = []
    for candidate in values:
        shares_address = (candidate.offset, candidate.size) == (value.offset, value.size)
        if shares_address and candidate is not value:
            candidates.append(candidate)
    # Values may hand the buffer over in a chain, so each round looks for values that adjoin one found earlier.
    while True:
        joined = []
        for candidate in candidates:
            if any(candidate.start <= link.end and candidate.end >= link.start for link in chain):
                joined.append(candidate)
        if not joined:
            return chain
        chain += joined
        candidates = [candidate for candidate in candidates if candidate not in joined]
