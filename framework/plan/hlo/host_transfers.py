"""Finds transfers between device and host memory, and their direction.

Only TPU programs name memory spaces; in other programs this module finds nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from plimsoll.framework.plan.hlo.arrays import HOST, StoredArray, bytes_in, parse_stored_arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module

Direction = Literal["to host", "from host"]
DIRECTIONS: tuple[Direction, ...] = ("to host", "from host")
_UPDATES = ("dynamic-update-slice-start", "dynamic-update-slice")
_ASYNC_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start", "async-start")
_SYNCHRONOUS = ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "fusion")
# Smaller results, such as indices, do not count as transfers.
_LEAST_BYTES = 64


class HostTransfer(NamedTuple):
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
