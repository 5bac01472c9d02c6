"""Lists the kernels of a GPU step: what each computes and moves, a lower bound of its time, and its estimated time.

Unlike the TPU compiler, XLA's GPU compiler does not annotate kernels with their cost. Without a device, only a lower
bound is available (the roofline model, Williams et al. 2009, doi 10.1145/1498765.1498785): no kernel is faster than its
FLOPs at the peak, or than its bytes at the bandwidth of device memory. The sum of these bounds over a step shows where
its time goes in the best case, and which transfers are wasted. Only a GPU can show how close each kernel comes to its
bound. The estimated time of a program is a roofline of each kernel at the rates that this kind of device reaches: those
that `plimsoll calibrate` measured on such a GPU, or fractions of the published peaks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from plimsoll.framework.devices.accelerators import AcceleratorSpec
from plimsoll.framework.layers.flash_kernels import KERNEL_PREFIX, NUM_PRODUCTS, KernelPass
from plimsoll.framework.plan.hlo.arrays import arrays
from plimsoll.framework.plan.hlo.computations import Instruction, SourceLine
from plimsoll.framework.plan.hlo.flops import EIGHT_BIT, Flops, is_block_product
from plimsoll.framework.plan.hlo.memory_traffic import Traffic
from plimsoll.framework.plan.hlo.module import Module, iter_executed
from plimsoll.framework.plan.hlo.transfers import Collective, collectives
from plimsoll.framework.plan.step_time.device_rates import DeviceRates, WorkKind
from plimsoll.framework.plan.step_time.schedule_simulation import AsyncCollective, InstructionCost, simulate
from plimsoll.framework.plan.step_time.time_breakdown import ProgramTime, StepProgram
from plimsoll.framework.plan.step_time.work_categories import PRODUCT_CATEGORIES, TRANSFERS, categorize, is_work

KernelSource = Literal["Triton", "cuBLAS", "cuDNN", "loop", "reduction", "transpose", "slice", "copy", "call", "NCCL"]
_FUSION_KIND = re.compile(r'"fusion_backend_config":\s*\{"kind":\s*"([^"]*)"')
_CUSTOM_FUSION = re.compile(r'"custom_fusion_config":\s*\{"name":\s*"([^"]*)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
# Custom calls, by a part of their target.
_CALL_TARGETS: dict[str, KernelSource] = {"__gpu$xla.gpu.triton": "Triton", "__cudnn$": "cuDNN", "__cublas$": "cuBLAS"}
_EMITTERS: dict[str, KernelSource] = {"kLoop": "loop", "kInput": "reduction", "kOutput": "transpose"}
# Number of matrix products of attention: forward (scores, weighted values) and backward (scores again, four gradients).
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
# Fused attention is slower than a plain matrix product: FlashAttention-3 reports 740 of 989 TFLOP/s in the forward pass
# and less in the backward pass (arXiv 2407.08608). cuDNN's attention is similar.
_CUDNN_ATTENTION_EFFICIENCY = 0.7
# An assumption, as our kernels were never timed: they reach what the same paper reports of Triton's flash attention,
# 395 TFLOP/s in the forward pass with 128 channels and 16384 keys (figure 5).
_TRITON_ATTENTION_EFFICIENCY = 0.4
# Our kernels. Each is in a scope with its name, which may be in parentheses.
_FLASH = re.compile(rf"\b{KERNEL_PREFIX}({'|'.join(NUM_PRODUCTS)})(_causal|_window_(?P<window>\d+))?\b")
_HALF_TYPES = ("bf16", "f16")


@dataclass(frozen=True)
class GpuRates:
    """Peak rates of a GPU.

    Attributes:
        name: name of the accelerator.
        flops: {dtype of a product's operands: peak FLOP/s}.
        hbm: bandwidth of device memory in bytes/s.
        link: bytes/s that a GPU receives from the others of its machine; NaN if unknown.
    """

    name: str
    flops: dict[str, float]
    hbm: float
    link: float

    @staticmethod
    def look_up(spec: AcceleratorSpec) -> GpuRates:
        """Return the rates of a GPU in the accelerator table.

        Raises:
            ValueError: the table does not have these figures, or the accelerator is not a GPU.
        """
        if spec.platform != "gpu" or not (spec.peak_bf16_flops and spec.peak_tf32_flops and spec.hbm_bytes_per_second):
            raise ValueError(
                f"{spec.name}: expected a GPU with bandwidth and bfloat16 and TF32 peaks in framework/devices/"
            )
        flops = {"bf16": spec.peak_bf16_flops, "f16": spec.peak_bf16_flops, "f32": spec.peak_tf32_flops}
        for dtype, name in EIGHT_BIT.items():
            flops[dtype] = spec.peak_flops(name) or spec.peak_bf16_flops
        return GpuRates(spec.name, flops, spec.hbm_bytes_per_second, spec.ici_bytes_per_second or math.nan)


@dataclass(frozen=True)
class GpuKernel:
    """One kernel, copy or collective.

    Attributes:
        instruction: its instruction in the program.
        category: kind of work, as for TPUs.
        maker: the library or emitter that generates it.
        runs: number of runs in a step.
        flops: FLOPs of its matrix products in each run.
        dtype: dtype of their operands; "" if it has no matrix products.
        hbm_bytes: bytes moved to and from device memory in each run.
        seconds: lower bound of the time of each run.
        source: the line of Python that it comes from; None if unknown.
    """

    instruction: Instruction
    category: str
    maker: KernelSource
    runs: int
    flops: int
    dtype: str
    hbm_bytes: int
    seconds: float
    source: SourceLine | None

    @property
    def op_name(self) -> str:
        """Its scope in the traced program; "" if unknown."""
        return self.instruction.op_name


@dataclass(frozen=True)
class CollectiveOverlap:
    """A collective, and the kernels that run while it is in progress.

    Attributes:
        collective: the collective.
        seconds: seconds on the link in each run.
        overlapped_seconds: lower bound of the seconds of the kernels between its start and its end.
    """

    collective: Collective
    seconds: float
    overlapped_seconds: float


@dataclass(frozen=True)
class GpuStep:
    """A step's kernels and collectives."""

    kernels: list[GpuKernel]
    overlaps: list[CollectiveOverlap]


def read_step(parts: Sequence[StepProgram], rates: GpuRates) -> GpuStep:
    """Return the kernels and collectives of all programs of a step.

    Args:
        parts: programs of the step, compiled for the GPU.
        rates: peak rates of the GPU.
    """
    kernels: list[GpuKernel] = []
    overlaps: list[CollectiveOverlap] = []
    for part in parts:
        program_kernels = []
        for kernel in iter_kernels(part.module, rates):
            program_kernels.append(replace(kernel, runs=kernel.runs * part.runs))
        kernels += program_kernels
        # The time of the kernels between a collective's start and end, as if it had the GPU to itself.
        least = {kernel.instruction.name: kernel.seconds for kernel in program_kernels}
        for collective in collectives(part.module):
            order = [one.name for one in part.module.computations[collective.scheduled.computation]]
            first = order.index(collective.scheduled.name)
            last = order.index(collective.last.name)
            overlapped_seconds = sum(least.get(name, 0.0) for name in order[first + 1 : last])
            collective = replace(collective, runs=collective.runs * part.runs)
            link_seconds = collective.bytes_received / rates.link
            overlaps.append(CollectiveOverlap(collective, link_seconds, overlapped_seconds))
    return GpuStep(kernels, overlaps)


def gpu_time(module: Module, spec: AcceleratorSpec, rates: DeviceRates) -> ProgramTime:
    """Return the time of one run of a program that was compiled for a GPU.

    Args:
        module: the program.
        spec: the GPU.
        rates: rates that it reaches, measured or assumed.

    Raises:
        ValueError: the peaks of this GPU are not published.
    """
    costs = {}
    products = 0.0
    spans = []
    received = {}
    for collective in collectives(module):
        if collective.mode == "async":
            spans.append(AsyncCollective(collective.scheduled.name, collective.last.name, collective.bytes_received))
        else:
            received[collective.scheduled.name] = collective.bytes_received
    peaks = GpuRates.look_up(spec)
    for kernel in iter_kernels(module, peaks):
        seconds = 0.0
        if kernel.category not in TRANSFERS:
            seconds = rates.curve("memory").seconds(kernel.hbm_bytes)
            if kernel.flops:
                is_half = kernel.dtype in _HALF_TYPES or kernel.dtype in EIGHT_BIT
                kind: WorkKind = "product bf16" if is_half else "product f32"
                product_seconds = rates.curve(kind).seconds(kernel.flops)
                if kernel.dtype in EIGHT_BIT:
                    # No curve was measured: scale that of bfloat16 by the published peaks.
                    product_seconds *= peaks.flops["bf16"] / peaks.flops[kernel.dtype]
                if kernel.category == "attention":
                    is_ours = kernel.maker == "Triton"
                    product_seconds /= _TRITON_ATTENTION_EFFICIENCY if is_ours else _CUDNN_ATTENTION_EFFICIENCY
                seconds = max(seconds, product_seconds)
        name = kernel.instruction.name
        costs[name] = InstructionCost(seconds, received.get(name, 0.0))
        if kernel.category in PRODUCT_CATEGORIES:
            products += kernel.runs * seconds
    timeline = simulate(
        module,
        costs,
        spans,
        # A single GPU has no links and needs none.
        received_per_second=rates.links or float("inf"),
        host_per_second=rates.host_link or float("inf"),
    )
    return ProgramTime(
        products=products,
        others=timeline.compute - products,
        links=timeline.collectives + timeline.collective_waits,
        host_waits=timeline.waits,
        activity=timeline.activity,
    )


def iter_kernels(module: Module, rates: GpuRates) -> Iterator[GpuKernel]:
    """Yield the kernels of one run of a program, in the order of its text.

    Args:
        module: the program.
        rates: peak rates of the GPU.
    """
    flops = Flops(module)
    traffic = Traffic(module)
    for instruction, runs in iter_executed(module):
        if not is_work(instruction):
            continue
        maker = _maker(instruction)
        product_flops, dtype = _product(module, flops, instruction)
        if _is_flash(instruction):
            kind = "attention"
        elif maker in ("cuDNN", "cuBLAS"):
            kind = "attention" if "__cudnn$fmha" in instruction.attributes else "matmul"
        else:
            kind = "slice" if maker == "slice" else categorize(module, flops, instruction)
        hbm_bytes = 0 if kind == "collective" else traffic.hbm_bytes(instruction)
        seconds = max(product_flops / rates.flops.get(dtype, math.inf), hbm_bytes / rates.hbm)
        source = module.source(instruction)
        yield GpuKernel(instruction, kind, maker, runs, product_flops, dtype, hbm_bytes, seconds, source)


def _maker(instruction: Instruction) -> KernelSource:
    if instruction.opcode == "custom-call":
        for target, maker in _CALL_TARGETS.items():
            if target in instruction.attributes:
                return maker
        return "call"
    if instruction.opcode.startswith("copy"):
        return "copy"
    if instruction.opcode.startswith(("all-", "reduce-scatter", "collective-", "ragged-")):
        return "NCCL"
    if instruction.opcode != "fusion":
        return "loop"
    kind = _FUSION_KIND.search(instruction.attributes)
    if kind and "triton" in kind[1]:
        return "Triton"
    if _CUSTOM_FUSION.search(instruction.attributes):
        # A copy that slices a stack or updates one in place.
        return "slice"
    return _EMITTERS.get(instruction.attribute("kind"), "call")


def _product(module: Module, flops: Flops, instruction: Instruction) -> tuple[int, str]:
    """Return (FLOPs of an instruction's matrix products, dtype of their operands)."""
    if "__cudnn$fmha" in instruction.attributes:
        return _attention_flops(instruction), arrays(instruction.type)[0].dtype
    if _is_flash(instruction):
        return _flash_flops(module, instruction)
    if "__cudnn$blockScaledDot" in instruction.attributes:
        # [B, M, K] and [B, N, K].
        left = arrays(module.instructions[instruction.operands[0]].type)[0]
        return 2 * math.prod(arrays(instruction.type)[0].dims) * left.dims[-1], left.dtype
    if "__cublas$" in instruction.attributes:
        contracted = _CONTRACTED.search(instruction.attributes)
        left = arrays(module.instructions[instruction.operands[0]].type)[0]
        axes = [int(number) for number in re.findall(r"\d+", contracted[1])] if contracted else []
        contracted_size = math.prod(left.dims[axis] for axis in axes)
        return 2 * math.prod(arrays(instruction.type)[0].dims) * contracted_size, left.dtype
    product = flops.product(instruction)
    if product is None:
        return 0, ""
    if product.opcode == "custom-call" and not is_block_product(product):
        # The first operands of a grouped product are tile offsets, so use the dtype of the result.
        return flops.look_up(product), arrays(product.type)[0].dtype
    operand = module.instructions[product.operands[0]]
    return flops.look_up(instruction), arrays(operand.type)[0].dtype


def _attention_flops(call: Instruction) -> int:
    """Return the FLOPs of a call of cuDNN's fused attention.

    The shape of the scores [B, H, queries, keys] is in the call's attributes. A causal mask halves the work.
    """
    scores = _SCORES.search(call.attributes)
    if scores is None:
        return 0
    size = math.prod(int(number) for number in re.findall(r"\d+", scores[1]))
    head_dim = arrays(call.type)[0].dims[-1]
    products = _BACKWARD_PRODUCTS if "Backward" in call.attributes else _FORWARD_PRODUCTS
    share = 2 if '"mask_type": "CAUSAL"' in call.attributes else 1
    return 2 * products * size * head_dim // share


def _is_flash(instruction: Instruction) -> bool:
    """Return whether an instruction is one of our attention kernels."""
    return instruction.opcode == "custom-call" and bool(_FLASH.search(instruction.op_name))


def _flash_flops(module: Module, call: Instruction) -> tuple[int, str]:
    """Return (FLOPs of one of our attention kernels, dtype of its operands).

    Pairs that the causal mask or the window hides do not count; those that ids hide do.
    """
    match = _FLASH.search(call.op_name)
    assert match is not None
    queries, keys, values = (arrays(operand.type)[0] for operand in module.operands(call)[:3])
    num_queries, num_keys = queries.dims[-2], keys.dims[-2]
    num_pairs = num_queries * num_keys
    if match[2]:
        # The last query sees the last key.
        offset = num_keys - num_queries
        most = int(match["window"] or num_keys)
        num_pairs = sum(min(query + offset + 1, most) for query in range(num_queries))
    key_products, value_products = NUM_PRODUCTS[cast(KernelPass, match[1])]
    channels = key_products * keys.dims[-1] + value_products * values.dims[-1]
    return 2 * math.prod(queries.dims[:-2]) * num_pairs * channels, queries.dtype
