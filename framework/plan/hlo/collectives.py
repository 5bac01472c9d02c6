"""Bytes that a chip receives from other chips.

A collective is synchronous where nothing else runs until it is done. It is asynchronous where it is started and waited
for by two instructions, `call-start` among them, which gives it to a SparseCore; or where a chain of fusions takes its
steps beside matrix products (the TPU compiler's "async collective fusion"; all of a chain's fusions name one channel,
so a channel counts once). And it is fused where a fusion first reduces and then scatters ("all-reduce-scatter"): one
operation, during which nothing else runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from framework.plan.hlo.arrays import arrays
from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.module import Module
from framework.plan.hlo.walk import executed

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
Mode = Literal["sync", "fused", "async"]
_REDUCE_SCATTER_FUSION = "all-reduce-scatter"
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")


class Collective(NamedTuple):
    """One collective of the program.

    Attributes:
        kind: all-gather, all-reduce, ... mode: see above.
        instruction: the collective itself. scheduled: what the program executes: itself, or the fusion around it.
        last: of an asynchronous one, what the program executes when it has to be through; else as scheduled.
        runs: how often it runs in a step.
        bytes_received: by one chip, each time.
    """

    kind: str
    mode: Mode
    instruction: Instruction
    scheduled: Instruction
    last: Instruction
    runs: int
    bytes_received: float

    @property
    def dtype(self) -> str:
        """Of what is sent."""
        found = arrays(self.instruction.type)
        return found[0].dtype if found else "?"


def kind_of(instruction: Instruction) -> str:
    """The kind of collective that an instruction is or starts; "" if none."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The collectives that an instruction is, starts, or has in what it calls."""
    if kind_of(instruction):
        yield instruction
    elif instruction.opcode in ("fusion", "call", "async-start", "call-start"):
        called = [instruction.called(role) for role in ("calls", "to_apply", "called_computation")]
        for inner in module.computations.get(next(filter(None, called), ""), []):
            yield from inside(module, inner)


def collectives(module: Module) -> list[Collective]:
    """All collectives that the program executes, each channel once for every computation that it is in."""
    found: dict[tuple[str, ...], Collective] = {}
    starts: dict[str, tuple[str, ...]] = {}
    for instruction, runs in executed(module):
        for started in instruction.operands if instruction.opcode.endswith("-done") else ():
            if started in starts:
                found[starts[started]] = found[starts[started]]._replace(last=instruction)
        for inner in inside(module, instruction):
            channel, chain = _number(inner, r"channel_id=(\d+)"), _number(inner, r'chain_id="(\d+)"')
            name = inner.name if inner is instruction else ""
            identity = (instruction.computation, channel, chain, name)
            known = found.get(identity)
            if known is None:
                found[identity] = _collective(module, inner, instruction, runs)
                starts[instruction.name] = identity
            elif known.scheduled is not instruction:  # a further step of a chain
                found[identity] = known._replace(last=instruction)
            elif known.instruction is inner:  # its computation is called from several places
                found[identity] = known._replace(runs=known.runs + runs)
    return list(found.values())


def _number(instruction: Instruction, pattern: str) -> str:
    match = re.search(pattern, instruction.attributes)
    return match[1] if match else ""


def _mode(instruction: Instruction) -> Mode:
    """How a collective runs, by the instruction of the schedule that it is or is in."""
    if kind_of(instruction):
        return "async" if instruction.opcode.endswith("-start") else "sync"
    fused = instruction.opcode == "fusion" and _REDUCE_SCATTER_FUSION in instruction.called("calls")
    return "fused" if fused else "async"


def _collective(module: Module, instruction: Instruction, scheduled: Instruction, runs: int) -> Collective:
    kind, mode, received = kind_of(instruction), _mode(scheduled), _received(module, instruction)
    if mode == "fused" and kind == "all-reduce":
        kind, received = "reduce-scatter", received / 2  # what is not scattered to this chip never arrives
    return Collective(kind, mode, instruction, scheduled, scheduled, runs, received)


def _received(module: Module, instruction: Instruction) -> float:
    """Bytes that one chip receives: in a ring of n, n-1 parts of n of the whole; an all-reduce goes round twice."""
    kind, size = kind_of(instruction), group_size(instruction)
    operands = module.operands(instruction)
    taken = sum(operand.num_bytes for operand in operands)
    if kind == "all-gather":
        return taken * (size - 1)
    if kind == "reduce-scatter" or kind == "all-to-all":
        return taken * (size - 1) / size
    if kind == "all-reduce":
        return 2 * taken * (size - 1) / size
    if kind == "collective-permute" and operands:
        return operands[0].num_bytes  # further operands are the places that it writes to
    return taken


def group_size(instruction: Instruction) -> int:
    """How many chips take part together; 1 if the text does not say."""
    if match := _MESH_GROUPS.search(instruction.attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    if match := _IOTA_GROUPS.search(instruction.attributes):
        return int(match[2])
    if match := _LISTED_GROUPS.search(instruction.attributes):
        return len(match[1].split(","))
    return 1
