"""Finds the transfers of a program: collectives between chips, and copies between device and host memory.

A collective has one of three modes:
  sync: nothing else runs until it is done.
  async: separate instructions start it and wait for it, including `call-start`, which runs it on a SparseCore; or a
    chain of fusions runs its steps next to matrix products (the TPU compiler's "async collective fusion"; all fusions
    of a chain name the same channel, so a channel counts once).
  fused: one fusion first reduces and then scatters ("all-reduce-scatter"), and nothing else runs meanwhile.

Only TPU programs name memory spaces; in other programs this module finds no transfers to or from the host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from plimsoll.framework.plan.hlo.arrays import HOST, StoredArray, arrays, bytes_in, parse_stored_arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module, iter_executed

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
CollectiveMode = Literal["sync", "fused", "async"]
_REDUCE_SCATTER_FUSION = "all-reduce-scatter"
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
# The handler of sends and receives between slices.
_SLICE_RUNTIME = "xla_megascale_runtime"
Direction = Literal["to host", "from host"]
DIRECTIONS: tuple[Direction, ...] = ("to host", "from host")
_UPDATES = ("dynamic-update-slice-start", "dynamic-update-slice")
_ASYNC_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start", "async-start")
_SYNCHRONOUS = ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "fusion")
# Smaller results, such as indices, do not count as transfers.
_LEAST_BYTES = 64


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Attributes:
        kind: all-gather, all-reduce, ...
        mode: sync, fused or async; see the module's docstring.
        instruction: the collective itself.
        scheduled: the instruction that the program executes: the collective, or the fusion that contains it.
        last: for an asynchronous collective, the scheduled instruction by which it has to be done; else `scheduled`.
        runs: number of runs in one execution of the program.
        bytes_received: bytes that one chip receives in each run.
    """

    kind: str
    mode: CollectiveMode
    instruction: Instruction
    scheduled: Instruction
    last: Instruction
    runs: int
    bytes_received: float

    @property
    def dtype(self) -> str:
        """Dtype of the transferred data; "?" if unknown."""
        result_arrays = arrays(self.instruction.type)
        return result_arrays[0].dtype if result_arrays else "?"


def collective_kind(instruction: Instruction) -> str:
    """Return the kind of collective that an instruction is or starts; "" if none."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def iter_collectives(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the collectives that an instruction is, starts, or contains in the computations that it calls.

    Args:
        module: the program.
        instruction: any of its instructions.
    """
    if collective_kind(instruction):
        yield instruction
    elif instruction.opcode in ("fusion", "call", "async-start", "call-start"):
        called_names = [
            instruction.get_called_computation(role) for role in ("calls", "to_apply", "called_computation")
        ]
        computation = next(filter(None, called_names), "")
        for inner in module.computations.get(computation, []):
            yield from iter_collectives(module, inner)


def collectives(module: Module) -> list[Collective]:
    """Return all collectives that the program executes; each channel counts once per computation."""
    by_identity: dict[tuple[str, ...], Collective] = {}
    identity_by_start: dict[str, tuple[str, ...]] = {}
    for instruction, runs in iter_executed(module):
        waited_for = instruction.operands if instruction.opcode.endswith("-done") else ()
        for operand in waited_for:
            if operand in identity_by_start:
                identity = identity_by_start[operand]
                by_identity[identity] = replace(by_identity[identity], last=instruction)
        for inner in iter_collectives(module, instruction):
            channel = re.search(r"channel_id=(\d+)", inner.attributes)
            chain = re.search(r'chain_id="(\d+)"', inner.attributes)
            # The steps of a chain have different names but the same channel.
            name = inner.name if inner is instruction else ""
            identity = (instruction.computation, channel[1] if channel else "", chain[1] if chain else "", name)
            earlier = by_identity.get(identity)
            if earlier is None:
                by_identity[identity] = _collective(module, inner, instruction, runs)
                identity_by_start[instruction.name] = identity
            elif earlier.scheduled is not instruction:
                # This is a later step of a chain.
                by_identity[identity] = replace(earlier, last=instruction)
            elif earlier.instruction is inner:
                # The computation is called from several places.
                by_identity[identity] = replace(earlier, runs=earlier.runs + runs)
    return list(by_identity.values())


def _collective(module: Module, instruction: Instruction, scheduled: Instruction, runs: int) -> Collective:
    """Describe a collective, given the scheduled instruction that is or contains it."""
    kind = collective_kind(instruction)
    received = _count_received(module, instruction)
    mode: CollectiveMode = "async"
    if collective_kind(scheduled) and not scheduled.opcode.endswith("-start"):
        mode = "sync"
    elif scheduled.opcode == "fusion" and _REDUCE_SCATTER_FUSION in scheduled.get_called_computation("calls"):
        mode = "fused"
    if mode == "fused" and kind == "all-reduce":
        # Of the all-reduce, only the scatter half arrives: this chip receives only its own part of the result.
        kind = "reduce-scatter"
        received = received / 2
    return Collective(kind, mode, instruction, scheduled, scheduled, runs, received)


def _count_received(module: Module, instruction: Instruction) -> float:
    """Return the bytes that one chip receives in a ring of n: (n-1)/n of the array, for an all-reduce twice that."""
    kind = collective_kind(instruction)
    size = group_size(instruction)
    operands = module.operands(instruction)
    operand_bytes = sum(operand.num_bytes for operand in operands)
    if kind == "all-gather":
        # The operand is one chip's shard.
        return operand_bytes * (size - 1)
    if kind == "reduce-scatter" or kind == "all-to-all":
        return operand_bytes * (size - 1) / size
    if kind == "all-reduce":
        return 2 * operand_bytes * (size - 1) / size
    if kind == "ragged-all-to-all" and len(operands) > 1:
        # The operands are the rows, the array that is written to, and offsets and sizes. The smaller of the two arrays
        # holds the number of rows that an even router sends, the larger one has room for more.
        return min(operands[0].num_bytes, operands[1].num_bytes) * (size - 1) / size
    if kind == "collective-permute" and operands:
        # Further operands are the buffers that it writes to.
        return operands[0].num_bytes
    return operand_bytes


def group_size(instruction: Instruction) -> int:
    """Return the number of chips in one group of a collective; 1 if the text does not contain it."""
    if match := _MESH_GROUPS.search(instruction.attributes):
        size_by_axis = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        group_axes = re.findall(r"'(\w+)'", match[2])
        return math.prod(int(size_by_axis[axis]) for axis in group_axes)
    if match := _IOTA_GROUPS.search(instruction.attributes):
        return int(match[2])
    if match := _LISTED_GROUPS.search(instruction.attributes):
        return len(match[1].split(","))
    return 1


# --- between slices ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SliceTransfer:
    """Data that arrives from other slices.

    The TPU compiler splits a collective that spans slices into collectives within each slice, and sends and receives
    of the runtime that uses the network between them.

    Attributes:
        started: the instruction that begins to receive.
        done: the instruction by which the data has arrived.
        runs: number of runs in one execution of the program.
        num_bytes: bytes that one chip receives in each run.
    """

    started: Instruction
    done: Instruction
    runs: int
    num_bytes: int


def slice_transfers(module: Module) -> list[SliceTransfer]:
    """Return what a chip receives from other slices."""
    started: dict[str, Instruction] = {}
    found: list[SliceTransfer] = []
    for instruction, runs in iter_executed(module):
        if instruction.opcode == "recv" and _SLICE_RUNTIME in instruction.attributes:
            started[instruction.name] = instruction
        elif instruction.opcode == "recv-done" and instruction.operands and instruction.operands[0] in started:
            start = started[instruction.operands[0]]
            # The type also contains a context and a token.
            found.append(SliceTransfer(start, instruction, runs, arrays(start.type)[0].num_bytes))
    return found


# --- between device and host memory ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostTransfer:
    """Bytes, including tile padding, that an instruction moves; `waits` if nothing else runs until it is done."""

    direction: Direction
    num_bytes: int
    waits: bool


def find_transfer(module: Module, instruction: Instruction) -> HostTransfer | None:
    """Return the transfer to or from host memory that an instruction is or starts; None if it moves nothing.

    Args:
        module: the program.
        instruction: any of its instructions.
    """
    if instruction.opcode not in _ASYNC_STARTS + _SYNCHRONOUS:
        return None
    waits = instruction.opcode in _SYNCHRONOUS
    operands = module.operands(instruction)
    reads_host = any(bytes_in(operand.type, HOST) for operand in operands)
    if not reads_host and not bytes_in(instruction.type, HOST):
        return None
    if instruction.opcode in _UPDATES and len(operands) > 1:
        # Only the update moves, not the array that is updated.
        into_host = bool(bytes_in(operands[0].type, HOST))
        update = _largest(operands[1])
        from_host = update.space == HOST
        if into_host == from_host:
            return None
        return HostTransfer("to host" if into_host else "from host", update.padded_bytes, waits)
    results = [result for result in parse_stored_arrays(instruction.type) if result.padded_bytes > _LEAST_BYTES]
    if not operands or not results:
        return None
    source = _largest(operands[0])
    # A start instruction also returns its operands, before or after the destination.
    is_from_host = source.space == HOST
    destinations = [result for result in results if (result.space == HOST) != is_from_host]
    if not destinations:
        return None
    # A slice is smaller than its source, and smaller than an array that it is written into.
    moved_bytes = min(array.padded_bytes for array in (*destinations, source))
    return HostTransfer("from host" if is_from_host else "to host", moved_bytes, waits)


def find_transfer_start(instruction: Instruction) -> str:
    """Return the name of the instruction that started the transfer that this one waits for; "" if there is none."""
    is_done = instruction.opcode.endswith("-done") and instruction.operands
    return instruction.operands[0] if is_done else ""


def _largest(instruction: Instruction) -> StoredArray:
    return max(parse_stored_arrays(instruction.type), key=lambda array: array.padded_bytes)
