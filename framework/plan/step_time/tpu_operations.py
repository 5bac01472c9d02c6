"""Lists the operations of a program: the source of each, what it computes and moves, and its time.

Each operation has three times. `estimate` is the compiler's, on which it bases its fusions. `roof` is the longer of
FLOPs at the peak and bytes at the peak HBM bandwidth, a lower bound. `seconds` is the best estimate.

The published speeds are in framework/devices/accelerators.toml, each with its source. The constants below calibrate
the TPU compiler's cost model. They come from comparing its `estimated_cycles` with libtpu's static profile of the
scheduled bundles (LIBTPU_INIT_ARGS=--xla_jf_dump_static_llo_profile_to=DIR), on v5e, by operation:

    operation                                estimate, cycles    profile      HBM at its peak
    matmul 4096^3, bfloat16                  1,083,068           1,080,291    (MXU: 1,048,576)
    bfloat16 add, 4096^2                     573,600             194,125      184,300
    rotary: multiply, subtract, convert      52,084              6,019        in VMEM
    rotary: concatenate (pad, maximum)       26,106              4,877        3,848

So the estimate is accurate for matrix products and 3 to 9 times too high for thin elementwise work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.plan.hlo.arrays import HBM, VMEM, bytes_in
from plimsoll.framework.plan.hlo.computations import Instruction, SourceLine
from plimsoll.framework.plan.hlo.flops import EIGHT_BIT, Flops
from plimsoll.framework.plan.hlo.memory_traffic import Traffic
from plimsoll.framework.plan.hlo.module import Module, iter_executed
from plimsoll.framework.plan.step_time.work_categories import (
    OVERESTIMATED,
    TRANSFERS,
    WorkCategory,
    categorize,
    count_attention,
    is_work,
)

# Thin operations take this factor times their HBM bytes at peak bandwidth, or their VMEM bytes at the rate below,
# whichever is longer, but never more than the compiler's estimate.
ELEMENTWISE_OVER_HBM = 1.25
VMEM_BYTES_PER_CYCLE = 1400
# Attention kernels have no compiler estimate. They are assumed to reach this fraction of the peak, reduced in
# proportion if the head size is below the MXU's 128 rows.
ATTENTION_EFFICIENCY = 0.5
ATTENTION_FULL_HEAD = 128
# Transfers of stacks are assumed to reach this fraction of PCIe's published rate: 12 GB/s per chip each way on v5e.
PCIE_EFFICIENCY = 0.75


@dataclass(frozen=True)
class TpuRates:
    """The speeds of one jax device, per second.

    Attributes:
        name: name of the accelerator.
        flops: FLOPs of bfloat16 matrix products.
        flops_per_cycle: FLOPs of bfloat16 matrix products per cycle of the compiler's cost model, not per second.
        hbm: bytes to and from device memory.
        all_links: bytes received from other chips over all links of a chip.
        two_links: bytes received over two links, the number that the corner of a slice without wrap-around has.
        pcie: bytes in each direction between device and host, both at the same time.
        dcn: bytes received from other slices; None if unknown.
        eight_bit_flops: FLOPs of products of 8-bit numbers, {dtype in the text of a program: FLOPs}.
    """

    name: str
    flops: float
    flops_per_cycle: float
    hbm: float
    all_links: float
    two_links: float
    pcie: float
    eight_bit_flops: Mapping[str, float]
    dcn: float | None = None

    @property
    def cycles(self) -> float:
        """Cycles of the compiler's cost model per second."""
        return self.flops / self.flops_per_cycle

    @staticmethod
    def look_up(spec: AcceleratorSpec) -> TpuRates:
        """Return the rates of an accelerator.

        Raises:
            ValueError: it is not a TPU, or its figures are not published.
        """
        figures = (
            spec.peak_bf16_flops,
            spec.flops_per_cycle,
            spec.hbm_bytes_per_second,
            spec.ici_bytes_per_second,
            spec.ici_link_bytes_per_second,
            spec.pcie_bytes_per_second,
        )
        published = [float(figure) for figure in figures if figure is not None]
        if spec.platform != "tpu" or len(published) < len(figures):
            raise ValueError(f"{spec.name}: step time is counted only for TPUs whose rates are known")
        flops, flops_per_cycle, hbm, all_links, link, pcie = published
        eight_bit = {dtype: spec.peak_flops(name) for dtype, name in EIGHT_BIT.items()}
        return TpuRates(
            name=spec.name,
            flops=flops,
            flops_per_cycle=flops_per_cycle,
            hbm=hbm,
            all_links=all_links,
            two_links=2 * link,
            pcie=PCIE_EFFICIENCY * pcie,
            dcn=spec.dcn_bytes_per_second,
            eight_bit_flops={dtype: peak for dtype, peak in eight_bit.items() if peak is not None},
        )

    def attention_flops(self, head_size: int) -> float:
        """Return the FLOP/s that an attention kernel is assumed to reach."""
        # A head smaller than the MXU leaves some of its rows idle.
        used_rows = min(1.0, head_size / ATTENTION_FULL_HEAD)
        return self.flops * ATTENTION_EFFICIENCY * used_rows


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
        if not is_work(instruction):
            continue
        kind = categorize(module, flops, instruction)
        hbm_bytes = traffic.hbm_bytes(instruction)
        cycles = instruction.estimated_cycles
        estimate = None if cycles is None else cycles / rates.cycles
        if kind == "attention":
            kernel = count_attention(module, instruction)
            num_flops = kernel.flops
            seen_flops = kernel.seen_share * kernel.flops
            roof = seen_flops / rates.flops
            seconds = seen_flops / rates.attention_flops(kernel.head_size)
        else:
            num_flops = flops.look_up(instruction)
            peak = rates.eight_bit_flops.get(flops.operand_dtype(instruction), rates.flops)
            roof = max(num_flops / peak, hbm_bytes / rates.hbm)
            vmem_bytes = traffic.vmem_bytes(instruction)
            if kind == "slice":
                # Most of an array in VMEM that is sliced or updated in place is not touched.
                vmem_bytes = min(vmem_bytes, 4 * bytes_in(instruction.type, HBM, VMEM))
            seconds = _seconds(rates, kind, estimate, roof, vmem_bytes)
        # A matrix product describes a fusion better than its last operation does.
        named_instruction = flops.product(instruction) or instruction
        # A fusion without a name uses that of its last named operation.
        op_names = [named_instruction.op_name]
        op_names += [inner.op_name for inner in reversed(module.get_fused_instructions(named_instruction))]
        yield TpuOperation(
            instruction=instruction,
            runs=runs,
            category=kind,
            op_name=next(filter(None, op_names), ""),
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
