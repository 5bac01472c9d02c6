"""Lists the operations of a program: the source of each, what it computes and moves, and its time.

Each operation has three times. `estimate` is the compiler's, on which it bases its fusions. `roof` is the longer of
FLOPs at the peak and bytes at the peak HBM bandwidth, a lower bound. `seconds` is the best estimate; see `tpu_rates`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.framework.plan.hlo.arrays import HBM, VMEM, bytes_in
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.executed_instructions import iter_executed
from plimsoll.framework.plan.hlo.flops import Flops
from plimsoll.framework.plan.hlo.memory_traffic import Traffic
from plimsoll.framework.plan.hlo.module import Module
from plimsoll.framework.plan.hlo.source_lines import SourceLine
from plimsoll.framework.plan.step_time.attention_flops import count_attention
from plimsoll.framework.plan.step_time.tpu_rates import (
    CAUSAL_SHARE,
    ELEMENTWISE_OVER_HBM,
    VMEM_BYTES_PER_CYCLE,
    TpuRates,
)
from plimsoll.framework.plan.step_time.work_categories import (
    OVERESTIMATED,
    TRANSFERS,
    WorkCategory,
    categorize,
    is_work,
)


@dataclass(frozen=True)
class TpuOperation:
    """One instruction that takes time; figures are per run.

    Attributes:
        instruction: the instruction in the program.
        runs: number of runs in a step.
        category: kind of work.
        op_name: its scope in the traced program.
        source: the line of Python that it comes from.
        flops: FLOPs of matrix products; those of an attention kernel are counted without masks.
        hbm_bytes: bytes read from and written to HBM.
        estimate: seconds estimated by the compiler; None if there is no estimate.
        roof: lower bound in seconds, see the module's docstring.
        seconds: best estimate in seconds, see the module's docstring.
    """

    instruction: Instruction
    runs: int
    category: WorkCategory
    op_name: str
    source: SourceLine | None
    flops: int
    hbm_bytes: int
    estimate: float | None
    roof: float
    seconds: float


def iter_operations(module: Module, rates: TpuRates) -> Iterator[TpuOperation]:
    """Yield every operation that a program executes, in the order of its text.

    Args:
        module: the program, compiled for TPU.
        rates: rates of the chip.
    """
    flops = Flops(module)
    traffic = Traffic(module)
    for instruction, runs in iter_executed(module):
        if is_work(instruction):
            yield _operation(module, rates, flops, traffic, instruction, runs)


def _operation(
    module: Module, rates: TpuRates, flops: Flops, traffic: Traffic, instruction: Instruction, runs: int
) -> TpuOperation:
    kind = categorize(module, flops, instruction)
    # A matrix product describes a fusion better than its last operation does.
    named_instruction = flops.product(instruction) or instruction
    hbm_bytes = traffic.hbm_bytes(instruction)
    cycles = instruction.estimated_cycles
    estimate = None if cycles is None else cycles / rates.cycles
    if kind == "attention":
        kernel = count_attention(module, instruction)
        num_flops = kernel.flops
        # The kernel skips blocks that the causal mask empties.
        causal_flops = CAUSAL_SHARE * kernel.flops
        roof = causal_flops / rates.flops
        seconds = causal_flops / rates.attention_flops(kernel.head_size)
    else:
        num_flops = flops.look_up(instruction)
        roof = max(num_flops / rates.flops, hbm_bytes / rates.hbm)
        vmem_bytes = _vmem_bytes(traffic, kind, instruction)
        seconds = _seconds(rates, kind, estimate, roof, vmem_bytes)
    return TpuOperation(
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


def _seconds(rates: TpuRates, kind: WorkCategory, estimate: float | None, roof: float, vmem_bytes: int) -> float:
    """Return the best estimate, in seconds, of an operation other than attention."""
    if kind in TRANSFERS:
        return 0.0
    if kind in OVERESTIMATED and estimate is not None:
        vmem_seconds = vmem_bytes / VMEM_BYTES_PER_CYCLE / rates.cycles
        return min(estimate, max(ELEMENTWISE_OVER_HBM * roof, vmem_seconds))
    # No operation beats the roof, even if the compiler's estimate is lower.
    return max(estimate or 0.0, roof)


def _vmem_bytes(traffic: Traffic, kind: WorkCategory, instruction: Instruction) -> int:
    vmem_bytes = traffic.vmem_bytes(instruction)
    if kind != "slice":
        return vmem_bytes
    # Most of an array in VMEM that is sliced or updated in place is not touched.
    return min(vmem_bytes, 4 * bytes_in(instruction.type, HBM, VMEM))


def _op_name(module: Module, instruction: Instruction) -> str:
    """Return the operation's name in the traced program; a fusion without one uses that of its last named operation."""
    if instruction.op_name:
        return instruction.op_name
    for inner in reversed(module.get_fused_instructions(instruction)):
        if inner.op_name:
            return inner.op_name
    return ""
