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
_LEAST_BYTES = 64  # indices and the like are no transfer


class HostTransfer(NamedTuple):
    """Bytes, tiles padded, that an instruction moves one way; `waits` if nothing else runs until it is done."""

    direction: Direction
    num_bytes: int
    waits: bool


def transfer(module: Module, instruction: Instruction) -> HostTransfer | None:
    """What an instruction moves to or from host memory; None if it moves nothing."""
    if instruction.opcode not in _STARTS + _AT_ONCE:
        return None
    waits = instruction.opcode in _AT_ONCE
    operands = module.operands(instruction)
    taken_from_host = any(bytes_in(operand.type, HOST) for operand in operands)
    if not taken_from_host and not bytes_in(instruction.type, HOST):
        return None
    if instruction.opcode in _UPDATES and len(operands) > 1:
        into_host = bool(bytes_in(operands[0].type, HOST))
        update = _largest(operands[1])
        from_host = update.space == HOST
        if into_host == from_host:
            return None
        return HostTransfer("to host" if into_host else "from host", update.padded_bytes, waits)
    results = [one for one in placed(instruction.type) if one.padded_bytes > _LEAST_BYTES]
    if not operands or not results:
        return None
    source = _largest(operands[0])
    # What starts a transfer has its operands among its results, before or behind where it goes to.
    other_side = [one for one in results if (one.space == HOST) != (source.space == HOST)]
    if not other_side:
        return None
    moved = min(one.padded_bytes for one in (*other_side, source))
    return HostTransfer("from host" if source.space == HOST else "to host", moved, waits)


def finished(instruction: Instruction) -> str:
    """The instruction that started what this one waits for; "" if it waits for nothing."""
    return instruction.operands[0] if instruction.opcode.endswith("-done") and instruction.operands else ""


def _largest(instruction: Instruction) -> Placed:
    return max(placed(instruction.type), key=lambda one: one.padded_bytes)
