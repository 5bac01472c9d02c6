"""The operations of a program: where each comes from, what it computes and moves, and how long it takes.

Three times of each: `estimate` is the compiler's, by which it decides fusions; `roof` is the longer of FLOPs at the
peak and of bytes at the peak of HBM, which nothing can beat; `seconds` is what is believed, see step_time.rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from framework.plan.hlo.arrays import HBM, VMEM, bytes_in
from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.flops import Flops
from framework.plan.hlo.module import Module
from framework.plan.hlo.source import SourceLine
from framework.plan.hlo.traffic import Traffic
from framework.plan.hlo.walk import executed
from framework.plan.step_time.attention import attention
from framework.plan.step_time.categories import MOVED_BESIDE, THIN, Category, category, is_work
from framework.plan.step_time.rates import CAUSAL_SHARE, THIN_OVER_HBM, VMEM_BYTES_PER_CYCLE, Rates


@dataclass(frozen=True)
class Operation:
    """One instruction that takes time; figures are of one run.

    Attributes:
        instruction: of the program. runs: how often it runs in a step.
        category: the kind of work.
        op_name: where in the traced program it comes from. source: the line of Python.
        flops: of matrix products; of an attention kernel as if nothing were masked.
        hbm_bytes: read and written.
        estimate: seconds by the compiler; None where it has none.
        roof, seconds: see above.
    """

    instruction: Instruction
    runs: int
    category: Category
    op_name: str
    source: SourceLine | None
    flops: int
    hbm_bytes: int
    estimate: float | None
    roof: float
    seconds: float


def operations(module: Module, rates: Rates) -> Iterator[Operation]:
    """Every operation that a program executes, in the order of its text."""
    flops, traffic = Flops(module), Traffic(module)
    for instruction, runs in executed(module):
        if is_work(instruction):
            yield _operation(module, rates, flops, traffic, instruction, runs)


def _operation(
    module: Module, rates: Rates, flops: Flops, traffic: Traffic, instruction: Instruction, runs: int
) -> Operation:
    kind = category(module, flops, instruction)
    named = flops.product(instruction) or instruction
    moved, cycles = traffic.hbm_bytes(instruction), instruction.estimated_cycles
    estimate = None if cycles is None else cycles / rates.cycles
    if kind == "attention":
        kernel = attention(module, instruction)
        multiplied, roof = kernel.flops, CAUSAL_SHARE * kernel.flops / rates.flops
        seconds = CAUSAL_SHARE * kernel.flops / rates.attention_flops(kernel.head_size)
    else:
        multiplied = flops.of(instruction)
        roof = max(multiplied / rates.flops, moved / rates.hbm)
        seconds = _seconds(rates, kind, estimate, roof, _vmem_bytes(traffic, kind, instruction))
    op_name, source = _op_name(module, named), module.source(named) or module.source(instruction)
    return Operation(instruction, runs, kind, op_name, source, multiplied, moved, estimate, roof, seconds)


def _seconds(rates: Rates, kind: Category, estimate: float | None, roof: float, vmem_bytes: int) -> float:
    """What an operation other than attention is believed to take."""
    if kind in MOVED_BESIDE:
        return 0.0
    if kind in THIN and estimate is not None:
        in_vmem = vmem_bytes / VMEM_BYTES_PER_CYCLE / rates.cycles
        return min(estimate, max(THIN_OVER_HBM * roof, in_vmem))
    return max(estimate or 0.0, roof)


def _vmem_bytes(traffic: Traffic, kind: Category, instruction: Instruction) -> int:
    moved = traffic.vmem_bytes(instruction)
    # Of an array in VMEM that is sliced, or updated in place, most is not touched.
    return min(moved, 4 * bytes_in(instruction.type, HBM, VMEM)) if kind == "slice" else moved


def _op_name(module: Module, instruction: Instruction) -> str:
    """The operation's name in the traced program; of a fusion that has none, that of the last operation in it."""
    inner = (one.op_name for one in reversed(module.fused(instruction)))
    return instruction.op_name or next(filter(None, inner), "")
