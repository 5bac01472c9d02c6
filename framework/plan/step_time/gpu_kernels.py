"""The kernels that a GPU's step is made of: what each computes and moves, and the least time that it can take.

XLA's compiler for GPUs notes no cost beside the kernels, as that for TPUs does. What can be said without a device is a
lower bound (the roofline model, Williams et al. 2009, doi 10.1145/1498765.1498785): no kernel is faster than its FLOPs
at the peak, or than its bytes at the bandwidth of device memory. The sum of these over a step says where its time goes
at best, and which bytes are moved for nothing; how near each kernel comes to its bound only a GPU can say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from framework.devices.accelerators import AcceleratorSpec
from framework.plan.hlo.arrays import arrays
from framework.plan.hlo.collectives import Collective, collectives
from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.flops import Flops
from framework.plan.hlo.module import Module
from framework.plan.hlo.source import SourceLine
from framework.plan.hlo.traffic import Traffic
from framework.plan.hlo.walk import executed
from framework.plan.step_time.categories import category, is_work
from framework.plan.step_time.count import Part

Maker = Literal["Triton", "cuBLAS", "cuDNN", "loop", "reduction", "transpose", "slice", "copy", "call", "NCCL"]
_FUSION_KIND = re.compile(r'"fusion_backend_config":\s*\{"kind":\s*"([^"]*)"')
_CUSTOM_FUSION = re.compile(r'"custom_fusion_config":\s*\{"name":\s*"([^"]*)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_EMITTERS: dict[str, Maker] = {"kLoop": "loop", "kInput": "reduction", "kOutput": "transpose"}
# Matrix products of attention forward (scores, weighted values) and backward (those of the five gradients and scores).
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5


@dataclass(frozen=True)
class GpuRates:
    """What a GPU can do at most.

    Attributes:
        flops: by the dtype of a product's operands, FLOP/s. hbm: bytes/s of device memory. link: bytes/s that a GPU
            receives from the others of its machine.
    """

    name: str
    flops: dict[str, float]
    hbm: float
    link: float

    @staticmethod
    def of(spec: AcceleratorSpec) -> GpuRates:
        """Those of the table of accelerators.

        Raises:
            ValueError: it has no such figures for this kind.
        """
        if spec.platform != "gpu" or not (spec.peak_bf16_flops and spec.peak_tf32_flops and spec.hbm_bytes_per_second):
            raise ValueError(
                f"{spec.name}: framework/devices/ has no peak in bfloat16 and TF32 and no bandwidth of a GPU for it"
            )
        flops = {"bf16": spec.peak_bf16_flops, "f16": spec.peak_bf16_flops, "f32": spec.peak_tf32_flops}
        return GpuRates(spec.name, flops, spec.hbm_bytes_per_second, spec.ici_bytes_per_second or math.nan)


class Kernel(NamedTuple):
    """One kernel, or one copy or collective.

    Attributes:
        category: what it does, as for TPUs. maker: what makes it. runs: how often it runs in a step.
        flops: of its matrix products, each time. dtype: of their operands; "" if it has none.
        hbm_bytes: that it moves to and from device memory, each time.
        seconds: the least that it can take, each time.
    """

    instruction: Instruction
    category: str
    maker: Maker
    runs: int
    flops: int
    dtype: str
    hbm_bytes: int
    seconds: float
    source: SourceLine | None

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from; "" if unknown."""
        return self.instruction.op_name


class Overlap(NamedTuple):
    """A collective, and the kernels that run while it is under way.

    Attributes:
        seconds: on the link, each time. beside: the least that the kernels between its start and its end take.
    """

    collective: Collective
    seconds: float
    beside: float


class GpuStep(NamedTuple):
    """A step's kernels and collectives."""

    kernels: list[Kernel]
    overlaps: list[Overlap]


def read(parts: Sequence[Part], rates: GpuRates) -> GpuStep:
    """The kernels of all programs of a step."""
    kernels: list[Kernel] = []
    overlaps: list[Overlap] = []
    for part in parts:
        program_kernels = []
        for kernel in kernels_of(part.module, rates):
            program_kernels.append(kernel._replace(runs=kernel.runs * part.runs))
        kernels += program_kernels
        overlaps += _overlaps(part.module, program_kernels, part.runs, rates)
    return GpuStep(kernels, overlaps)


def kernels_of(module: Module, rates: GpuRates) -> Iterator[Kernel]:
    """The kernels of one run of a program, in the order of its text."""
    flops = Flops(module)
    traffic = Traffic(module)
    for instruction, runs in executed(module):
        if not is_work(instruction):
            continue
        maker = _maker(instruction)
        product_flops, dtype = _product(module, flops, instruction)
        kind = _category(module, flops, instruction, maker)
        hbm_bytes = 0 if kind == "collective" else traffic.hbm_bytes(instruction)
        seconds = max(product_flops / rates.flops.get(dtype, math.inf), hbm_bytes / rates.hbm)
        source = module.source(instruction)
        yield Kernel(instruction, kind, maker, runs, product_flops, dtype, hbm_bytes, seconds, source)


def _category(module: Module, flops: Flops, instruction: Instruction, maker: Maker) -> str:
    if maker in ("cuDNN", "cuBLAS"):
        return "attention" if "__cudnn$fmha" in instruction.attributes else "matmul"
    return "slice" if maker == "slice" else category(module, flops, instruction)


def _maker(instruction: Instruction) -> Maker:
    if instruction.opcode == "custom-call":
        target = instruction.attributes
        if "__gpu$xla.gpu.triton" in target:
            return "Triton"
        return "cuDNN" if "__cudnn$" in target else "cuBLAS" if "__cublas$" in target else "call"
    if instruction.opcode != "fusion":
        return "copy" if instruction.opcode.startswith("copy") else "NCCL" if _is_collective(instruction) else "loop"
    kind, custom = _FUSION_KIND.search(instruction.attributes), _CUSTOM_FUSION.search(instruction.attributes)
    if kind and "triton" in kind[1]:
        return "Triton"
    if custom:
        return "slice"  # what is cut out of a stack or put into one, by a copy
    return _EMITTERS.get(instruction.attribute("kind"), "call")


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("all-", "reduce-scatter", "collective-", "ragged-"))


def _product(module: Module, flops: Flops, instruction: Instruction) -> tuple[int, str]:
    """(FLOPs of an instruction's matrix products, the dtype of their operands)."""
    if "__cudnn$fmha" in instruction.attributes:
        return _attention_flops(instruction), arrays(instruction.type)[0].dtype
    if "__cublas$" in instruction.attributes:
        return _library_flops(module, instruction), _operand_dtype(module, instruction)
    product = flops.product(instruction)
    if product is None:
        return 0, ""
    if product.opcode == "custom-call":
        # The first operands of a grouped product are where its tiles begin.
        return flops.of(product), arrays(product.type)[0].dtype
    return flops.of(instruction), _operand_dtype(module, product)


def _operand_dtype(module: Module, product: Instruction) -> str:
    return arrays(module.instructions[product.operands[0]].type)[0].dtype


def _attention_flops(call: Instruction) -> int:
    """Of cuDNN's fused attention: scores [B, H, queries, keys] are in the call's own description; a causal mask leaves
    half of them out."""
    scores = _SCORES.search(call.attributes)
    if scores is None:
        return 0
    size = math.prod(int(number) for number in re.findall(r"\d+", scores[1]))
    head_dim = arrays(call.type)[0].dims[-1]
    products = _BACKWARD_PRODUCTS if "Backward" in call.attributes else _FORWARD_PRODUCTS
    share = 2 if '"mask_type": "CAUSAL"' in call.attributes else 1
    return 2 * products * size * head_dim // share


def _library_flops(module: Module, call: Instruction) -> int:
    """Of a product by cuBLAS."""
    contracted = _CONTRACTED.search(call.attributes)
    left = arrays(module.instructions[call.operands[0]].type)[0].dims
    axes = [int(number) for number in re.findall(r"\d+", contracted[1])] if contracted else []
    return 2 * math.prod(arrays(call.type)[0].dims) * math.prod(left[axis] for axis in axes)


def _overlaps(module: Module, kernels: list[Kernel], runs: int, rates: GpuRates) -> Iterator[Overlap]:
    """The collectives, with what runs between the start and the end of each, as if it had the GPU to itself."""
    least = {one.instruction.name: one.seconds for one in kernels}
    for collective in collectives(module):
        order = [one.name for one in module.computations[collective.scheduled.computation]]
        first, last = order.index(collective.scheduled.name), order.index(collective.last.name)
        beside = sum(least.get(name, 0.0) for name in order[first + 1 : last])
        collective = collective._replace(runs=collective.runs * runs)
        yield Overlap(collective, collective.bytes_received / rates.link, beside)
