"""Which buffers are alive at the instant of the peak: read from what the compiler writes down about a program.

With the compiler option `xla_dump_to`, XLA (for TPU, GPU and CPU alike) leaves beside the final program two texts:
`buffer-assignment`, every value's place and size in each allocation, and `live-range`, when each value is alive, in
steps of the schedule. The peak is the largest sum of what is alive at once; where several values share an address
(a loop's carry, an update in place) it counts once. May import: framework.plan.hlo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from framework.plan.hlo import Module

DUMP_OPTION = "xla_dump_to"
_DEVICE = 0  # the memory space ("color") of device memory; fast on-chip memory and host memory have others
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color (\d+))?, (.*?):?$")
_VALUE = re.compile(r" value: <\d+ (.*?) @\d+> \(size=(\d+),offset=(\d+)\): (.*)")


@dataclass(frozen=True)
class Value:
    """One value of the program: its instruction and index, its place in an allocation, and how long it lives."""

    name: str
    index: tuple[int, ...]
    size: int
    offset: int
    shape: str
    start: int
    end: int


@dataclass(frozen=True)
class Block:
    """Bytes that are alive at the peak, and all values that share them over time, the one alive first."""

    size: int
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Buffers:
    """What a program keeps in device memory.

    Attributes:
      module: the program's text.
      parameters: {instruction name: bytes} of arguments; an output that takes an argument's place is counted there.
      outputs: (value, bytes) of the other outputs.
      blocks: the temporaries alive at the peak.
      fixed_bytes: constants and the like.
      heap_bytes: the allocation that holds all temporaries; at least the sum of the blocks, as packing leaves gaps.
    """

    module: Module
    parameters: dict[str, int]
    outputs: list[tuple[str, int]]
    blocks: list[Block]
    fixed_bytes: int
    heap_bytes: int

    @property
    def live_bytes(self) -> int:
        """Alive at the peak."""
        return (
            sum(self.parameters.values())
            + sum(size for _, size in self.outputs)
            + sum(block.size for block in self.blocks)
            + self.fixed_bytes
        )

    @property
    def gap_bytes(self) -> int:
        """What packing leaves empty at the peak."""
        return self.heap_bytes - sum(block.size for block in self.blocks)


def read(directory: Path) -> Buffers:
    """Reads the dump of one program.

    Raises:
        FileNotFoundError: the compiler left none (it stops before this point when a program is too big for a TPU).
    """
    module = Module(_text(directory, "after_optimizations.txt"))
    ranges = dict(_ranges(_text(directory, "after_optimizations-live-range.txt")))
    parameters: dict[str, int] = {}
    outputs: list[tuple[str, int]] = []
    blocks: list[Block] = []
    fixed = heap = 0
    for size, color, what, values in _allocations(
        _text(directory, "after_optimizations-buffer-assignment.txt"), ranges
    ):
        if color != _DEVICE or what.startswith("thread-local"):
            continue
        if what.startswith("parameter"):
            own = [value.name for value in values if value.name in module.parameters]
            parameters[own[0] if own else values[0].name] = size
        elif "maybe-live-out" in what:
            outputs.append((values[0].name if values else "", size))
        elif "temp" in what:
            heap += size
            blocks += _peak(values)
        else:
            fixed += size
    return Buffers(module, parameters, outputs, blocks, fixed, heap)


def _text(directory: Path, end: str) -> str:
    found = sorted(directory.glob(f"*{end}"))
    if not found:
        raise FileNotFoundError(f"the compiler left no {end} in {directory}")
    return found[-1].read_text()


def _ranges(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    section = text.partition("BufferLiveRange:\n")[2].partition("  Live ranges at")[0]
    for line in section.splitlines():
        name, _, span = line.strip().rpartition(":")
        start, _, end = span.partition("-")
        yield name, (int(start), int(end))


def _allocations(text: str, ranges: dict[str, tuple[int, int]]) -> Iterator[tuple[int, int, str, list[Value]]]:
    """(size, memory space, what it is, its values), for each allocation."""
    header, values = None, []
    for line in text.splitlines():
        if match := _VALUE.match(line):
            name, _, index = match[1].removesuffix(" (phi)").partition("{")
            start, end = ranges.get(f"{name}{{{index or '}'}", (0, -1))
            path = tuple(int(part) for part in index.rstrip("}").split(",") if part)
            values.append(Value(name, path, int(match[2]), int(match[3]), match[4], start, end))
        elif line.startswith("allocation ") or not line.startswith(" "):
            if header:
                yield int(header[1]), int(header[2] or 0), header[3], values
            header, values = _ALLOCATION.match(line), []
    if header:
        yield int(header[1]), int(header[2] or 0), header[3], values


def _peak(values: list[Value]) -> list[Block]:
    """The blocks alive when most bytes of an allocation are."""
    values = [value for value in values if value.size]
    best: list[tuple[Value, int]] = []
    for instant in {value.start for value in values}:
        alive = _without_overlap([value for value in values if value.start <= instant <= value.end])
        if sum(size for _, size in alive) > sum(size for _, size in best):
            best = alive
    places: dict[tuple[int, int], list[Value]] = {}
    for value in values:
        places.setdefault((value.offset, value.size), []).append(value)
    return [Block(size, _history(value, places[value.offset, value.size])) for value, size in best]


def _without_overlap(alive: list[Value]) -> list[tuple[Value, int]]:
    """Each value with the bytes that no value before it covers; the larger ones first where they begin together."""
    end, kept = 0, []
    for value in sorted(alive, key=lambda value: (value.offset, -value.size)):
        new = value.offset + value.size - max(end, value.offset)
        if new > 0:
            kept.append((value, new))
            end = value.offset + value.size
    return kept


def _history(value: Value, place: list[Value]) -> tuple[Value, ...]:
    """A value and those that hand over to it, or take over from it, at the same place: one buffer, several names."""
    chain, start, end = [value], value.start, value.end
    rest = [other for other in place if other is not value]
    grown = True
    while grown:
        joined = [other for other in rest if other.start <= end and other.end >= start]
        rest = [other for other in rest if other not in joined]
        chain += joined
        grown = bool(joined)
        start, end = min(v.start for v in chain), max(v.end for v in chain)
    return tuple(chain)
