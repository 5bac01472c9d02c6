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
# Size, memory space ("color": 0 is device memory, fast on-chip memory and host memory have others), what it holds.
# jaxlib 0.11 also tells an allocation's page.
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
      output_bytes: of the other outputs. fixed_bytes: of constants and the like.
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
        """Alive at the peak."""
        temporary = sum(block.size for block in self.blocks)
        return sum(self.parameters.values()) + self.output_bytes + self.fixed_bytes + temporary

    @property
    def gap_bytes(self) -> int:
        """What packing leaves empty at the peak."""
        return self.heap_bytes - sum(block.size for block in self.blocks)


def read(directory: Path) -> Buffers:
    """Reads the dump of one program.

    Raises:
        FileNotFoundError: the compiler left none (it stops before this point when a program is too big for a TPU).
    """
    buffers = Buffers(Module(_text(directory, "")))
    alive = {(name, index): (int(a), int(b)) for name, index, a, b in _RANGE.findall(_text(directory, "-live-range"))}
    for text in re.split("^allocation ", _text(directory, "-buffer-assignment"), flags=re.MULTILINE)[1:]:
        header = _ALLOCATION.match(text)
        if header is None or int(header[2] or 0) != 0 or header[3].startswith("thread-local"):
            continue
        size, what = int(header[1]), header[3]
        values = [
            Value(name, _index(index), int(own), int(offset), shape, *alive.get((name, index), (0, -1)))
            for name, index, own, offset, shape in _VALUE.findall(text)
        ]
        if what.startswith("parameter"):
            names = [value.name for value in values]
            buffers.parameters[next((name for name in names if name in buffers.module.parameters), names[0])] = size
        elif "maybe-live-out" in what:
            buffers.output_bytes += size
        elif "temp" in what:
            buffers.heap_bytes += size
            buffers.blocks += _peak(values)
        else:
            buffers.fixed_bytes += size
    return buffers


def _text(directory: Path, kind: str) -> str:
    found = sorted(directory.glob(f"*after_optimizations{kind}.txt"))
    if not found:
        raise FileNotFoundError(f"the compiler left no after_optimizations{kind}.txt in {directory}")
    return found[-1].read_text()


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _peak(values: list[Value]) -> list[Block]:
    """The blocks alive when most bytes of an allocation are."""
    values = [value for value in values if value.size]
    instants = {value.start for value in values}
    moments = (_without_overlap([v for v in values if v.start <= instant <= v.end]) for instant in instants)
    best = max(moments, key=lambda alive: sum(size for _, size in alive), default=[])
    return [Block(size, _history(value, values)) for value, size in best]


def _without_overlap(alive: list[Value]) -> list[tuple[Value, int]]:
    """Each value with the bytes that no value before it covers; the larger ones first where they begin together."""
    end, kept = 0, []
    for value in sorted(alive, key=lambda value: (value.offset, -value.size)):
        new = value.offset + value.size - max(end, value.offset)
        if new > 0:
            kept.append((value, new))
            end = value.offset + value.size
    return kept


def _history(value: Value, values: list[Value]) -> list[Value]:
    """A value and those that hand over to it, or take over from it, at the same place: one buffer, several names."""
    chain, here = [value], (value.offset, value.size)
    place = [v for v in values if (v.offset, v.size) == here and v is not value]
    while joined := [v for v in place if any(v.start <= other.end and v.end >= other.start for other in chain)]:
        chain += joined
        place = [v for v in place if v not in joined]
    return chain
