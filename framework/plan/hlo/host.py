"""Transfers between device and host memory, and which way they go.

A program names memory spaces on TPU only; elsewhere nothing is found here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from framework.plan.hlo.arrays import HOST, Placed, bytes_in, placed
from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.module import Module

Direction = Literal["to host", "from host"]
DIRECTIONS: tuple[Direction, ...] = ("to host", "from host")
_UPDATES = ("dynamic-update-slice-start", "dynamic-update-slice")
_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start", "async-start")
_AT_ONCE = ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "fusion")
# Indices and the like are no transfer.
_LEAST_BYTES = 64


class HostTransfer(NamedTuple):
    """Bytes, tiles padded, that an instruction moves one way; `waits` if nothing else runs until it is done."""

    direction: Direction
    num_bytes: int
    waits: bool


def transfer(module: Module, instruction: Instruction) -> HostTransfer | None:
    """The transfer to or from host memory that an instruction is or starts; None if it moves nothing."""
    if instruction.opcode not in _STARTS + _AT_ONCE:
        return None
    waits = instruction.opcode in _AT_ONCE
    operands = module.operands(instruction)
    reads_host = any(bytes_in(operand.type, HOST) for operand in operands)
    if not reads_host and not bytes_in(instruction.type, HOST):
        return None
    if instruction.opcode in _UPDATES and len(operands) > 1:
        # Of the array that is updated nothing moves but the update.
        into_host = bool(bytes_in(operands[0].type, HOST))
        update = _largest(operands[1])
        from_host = update.space == HOST
        if into_host == from_host:
            return None
        return HostTransfer("to host" if into_host else "from host", update.padded_bytes, waits)
    results = [result for result in placed(instruction.type) if result.padded_bytes > _LEAST_BYTES]
    if not operands or not results:
        return None
    source = _largest(operands[0])
    # What starts a transfer has its operands among its results, before or behind where it goes to.
    is_from_host = source.space == HOST
    destinations = [result for result in results if (result.space == HOST) != is_from_host]
    if not destinations:
        return None
    # A slice is smaller than its source, an array that it is written into is larger than it.
    moved_bytes = min(array.padded_bytes for array in (*destinations, source))
    return HostTransfer("from host" if is_from_host else "to host", moved_bytes, waits)


def finished(instruction: Instruction) -> str:
    """The instruction that started what this one waits for; "" if it waits for nothing."""
    is_done = instruction.opcode.endswith("-done") and instruction.operands
    return instruction.operands[0] if is_done else ""


def _largest(instruction: Instruction) -> Placed:
    return max(placed(instruction.type), key=lambda array: array.padded_bytes)
