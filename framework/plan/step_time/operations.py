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
        instruction: of the program.
        runs: how often it runs in a step.
        category: the kind of work.
        op_name: its place in the traced program.
        source: the line of Python.
        flops: of matrix products; of an attention kernel as if nothing were masked.
        hbm_bytes: read and written.
        estimate: seconds by the compiler; None where it has none.
        roof: seconds, see above.
        seconds: see above.
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
    flops = Flops(module)
    traffic = Traffic(module)
    for instruction, runs in executed(module):
        if is_work(instruction):
            yield _operation(
                module,
                rates,
                flops,
                traffic,
                instruction,
                runs,
            )


def _operation(
    module: Module, rates: Rates, flops: Flops, traffic: Traffic, instruction: Instruction, runs: int
) -> Operation:
    kind = category(module, flops, instruction)
    # A product says more about a fusion than its last operation does.
    named_instruction = flops.product(instruction) or instruction
    hbm_bytes = traffic.hbm_bytes(instruction)
    cycles = instruction.estimated_cycles
    estimate = None if cycles is None else cycles / rates.cycles
    if kind == "attention":
        kernel = attention(module, instruction)
        num_flops = kernel.flops
        # Blocks that the causal mask empties are skipped.
        causal_flops = CAUSAL_SHARE * kernel.flops
        roof = causal_flops / rates.flops
        seconds = causal_flops / rates.attention_flops(kernel.head_size)
    else:
        num_flops = flops.of(instruction)
        roof = max(num_flops / rates.flops, hbm_bytes / rates.hbm)
        vmem_bytes = _vmem_bytes(traffic, kind, instruction)
        seconds = _seconds(
            rates,
            kind,
            estimate,
            roof,
            vmem_bytes,
        )
    return Operation(
        instruction=instruction,
        runs=runs,
        category=kind,
        op_name=_op_name(module, named_instruction),
        source=module.source(named_instruction) or module.source(instruction),
        flops=num_flops,
        hbm_bytes=hbm_bytes,
        estimate=estimate,
        roof=roof,
        seconds=seconds,
    )


def _seconds(
    rates: Rates,
    kind: Category,
    estimate: float | None,
    roof: float,
    vmem_bytes: int,
) -> float:
    """The seconds that an operation other than attention is believed to take."""
    if kind in MOVED_BESIDE:
        return 0.0
    if kind in THIN and estimate is not None:
        vmem_seconds = vmem_bytes / VMEM_BYTES_PER_CYCLE / rates.cycles
        return min(estimate, max(THIN_OVER_HBM * roof, vmem_seconds))
    # Nothing beats the roof, even if the compiler believes so.
    return max(estimate or 0.0, roof)


def _vmem_bytes(traffic: Traffic, kind: Category, instruction: Instruction) -> int:
    vmem_bytes = traffic.vmem_bytes(instruction)
    if kind != "slice":
        return vmem_bytes
    # Of an array in VMEM that is sliced, or updated in place, most is not touched.
    return min(vmem_bytes, 4 * bytes_in(instruction.type, HBM, VMEM))


def _op_name(module: Module, instruction: Instruction) -> str:
    """The operation's name in the traced program; of a fusion that has none, that of the last operation in it."""
    if instruction.op_name:
        return instruction.op_name
    for inner in reversed(module.fused(instruction)):
        if inner.op_name:
            return inner.op_name
    return ""
