"""Which buffers are alive at the instant of the peak: read from what the compiler writes down about a program.

With the compiler option `xla_dump_to`, XLA (for TPU, GPU and CPU alike) leaves beside the final program two texts:
`buffer-assignment`, every value's place and size in each allocation, and `live-range`, when each value is alive, in
steps of the schedule. The peak is the largest sum of what is alive at once; where several values share an address
(a loop's carry, an update in place) it counts once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from framework.plan.hlo import Module

DUMP_OPTION = "xla_dump_to"
# Size, memory space ("color": 0 is device memory, fast on-chip memory and host memory have others),
# what it holds. jaxlib 0.11 also tells an allocation's page.
_ALLOCATION = re.compile(r"\d+: size (\d+)(?:, page \d+)?(?:, color (\d+))?(?:, page \d+)?, (.*?):?$", re.MULTILINE)
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)", re.M)
_RANGE = re.compile(r"^ +(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)


class Value(NamedTuple):
    """One value of the program: its instruction and index, its place in an allocation, and how long it lives."""

    name: str
    index: tuple[int, ...]
    size: int
    offset: int
    shape: str
    start: int
    end: int


class Block(NamedTuple):
    """Bytes that are alive at the peak, and all values that share them over time, the one alive first."""

    size: int
    values: list[Value]


@dataclass
class Buffers:
    """What a program keeps in device memory.

    Attributes:
      module: the program's text.
      parameters: {instruction name: bytes} of arguments; an output that takes an argument's place is counted there.
      blocks: the temporaries alive at the peak.
      output_bytes: of the other outputs.
      fixed_bytes: of constants and the like.
      heap_bytes: the allocation that holds all temporaries; at least the sum of the blocks, as packing leaves gaps.
    """

    module: Module
    parameters: dict[str, int] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
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


def read(directory: Path) -> Buffers:
    """Reads the dump of one program.

    Raises:
        FileNotFoundError: the compiler left none (it stops before this point when a program is too big for a TPU).
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
        values = _values(text, live_ranges)
        if purpose.startswith("parameter"):
            names = [value.name for value in values]
            # An output in an argument's place is a value of the same allocation.
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


def _values(text: str, live_ranges: dict[tuple[str, str], tuple[int, int]]) -> list[Value]:
    """The values of one allocation. Those without a live range are never alive: they end before they start."""
    values = []
    for name, index, size, offset, shape in _VALUE.findall(text):
        start, end = live_ranges.get((name, index), (0, -1))
        values.append(
            Value(
                name,
                _index(index),
                int(size),
                int(offset),
                shape,
                start,
                end,
            )
        )
    return values


def _text(directory: Path, kind: str) -> str:
    paths = sorted(directory.glob(f"*after_optimizations{kind}.txt"))
    if not paths:
        raise FileNotFoundError(f"the compiler left no after_optimizations{kind}.txt in {directory}")
    return paths[-1].read_text()


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _peak(values: list[Value]) -> list[Block]:
    """The blocks alive when most bytes of an allocation are."""
    values = [value for value in values if value.size]
    # The sum grows only where a value starts.
    instants = {value.start for value in values}
    best: list[tuple[Value, int]] = []
    best_bytes = -1
    for instant in instants:
        alive = _without_overlap([v for v in values if v.start <= instant <= v.end])
        alive_bytes = sum(size for _, size in alive)
        if alive_bytes > best_bytes:
            best = alive
            best_bytes = alive_bytes
    return [Block(size, _history(value, values)) for value, size in best]


def _without_overlap(alive: list[Value]) -> list[tuple[Value, int]]:
    """Each value with the bytes that no value before it covers; the larger ones first where they begin together."""
    covered_end = 0
    sizes = []
    for value in sorted(alive, key=lambda value: (value.offset, -value.size)):
        end = value.offset + value.size
        new_bytes = end - max(covered_end, value.offset)
        if new_bytes > 0:
            sizes.append((value, new_bytes))
            covered_end = end
    return sizes


def _history(value: Value, values: list[Value]) -> list[Value]:
    """A value and those that hand over to it, or take over from it, at the same place: one buffer, several names."""
    chain = [value]
    candidates = []
    for candidate in values:
        is_same_place = (candidate.offset, candidate.size) == (value.offset, value.size)
        if is_same_place and candidate is not value:
            candidates.append(candidate)
    # Values may hand over one after the other, so each round looks for those that meet one of the
    # last round.
    while joined := [candidate for candidate in candidates if _meets(candidate, chain)]:
        chain += joined
        candidates = [candidate for candidate in candidates if candidate not in joined]
    return chain


def _meets(value: Value, chain: list[Value]) -> bool:
    return any(value.start <= link.end and value.end >= link.start for link in chain)
