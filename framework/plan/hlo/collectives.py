"""Finds a program's collectives and the bytes that a chip receives from other chips.

A collective has one of three modes:
  sync: nothing else runs until it is done.
  async: separate instructions start it and wait for it, including `call-start`, which runs it on a SparseCore; or a
    chain of fusions runs its steps next to matrix products (the TPU compiler's "async collective fusion"; all fusions
    of a chain name the same channel, so a channel counts once).
  fused: one fusion first reduces and then scatters ("all-reduce-scatter"), and nothing else runs meanwhile.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from plimsoll.framework.plan.hlo.arrays import arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.executed_instructions import iter_executed
from plimsoll.framework.plan.hlo.module import Module

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


class Collective(NamedTuple):
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
                by_identity[identity] = by_identity[identity]._replace(last=instruction)
        for inner in iter_collectives(module, instruction):
            channel = _number(inner, r"channel_id=(\d+)")
            chain = _number(inner, r'chain_id="(\d+)"')
            # The steps of a chain have different names but the same channel.
            name = inner.name if inner is instruction else ""
            identity = (instruction.computation, channel, chain, name)
            earlier = by_identity.get(identity)
            if earlier is None:
                by_identity[identity] = _collective(module, inner, instruction, runs)
                identity_by_start[instruction.name] = identity
            elif earlier.scheduled is not instruction:
                # This is a later step of a chain.
                by_identity[identity] = earlier._replace(last=instruction)
            elif earlier.instruction is inner:
                # The computation is called from several places.
                by_identity[identity] = earlier._replace(runs=earlier.runs + runs)
    return list(by_identity.values())


def _number(instruction: Instruction, pattern: str) -> str:
    match = re.search(pattern, instruction.attributes)
    return match[1] if match else ""


def _mode(instruction: Instruction) -> CollectiveMode:
    """Return the mode of a collective, given the scheduled instruction that is or contains it."""
    if collective_kind(instruction):
        return "async" if instruction.opcode.endswith("-start") else "sync"
    is_fused = instruction.opcode == "fusion" and _REDUCE_SCATTER_FUSION in instruction.get_called_computation("calls")
    return "fused" if is_fused else "async"


def _collective(module: Module, instruction: Instruction, scheduled: Instruction, runs: int) -> Collective:
    kind = collective_kind(instruction)
    mode = _mode(scheduled)
    received = _count_received(module, instruction)
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
