"""Classifies the instructions of a TPU program by kind of work, and counts the FLOPs of its attention kernels."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from plimsoll.framework.plan.hlo import transfers
from plimsoll.framework.plan.hlo.arrays import Array, arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.flops import PRODUCTS, Flops
from plimsoll.framework.plan.hlo.module import Module

WorkCategory = Literal[
    "matmul",
    # A matrix product fused with steps of a collective.
    "collective matmul",
    "attention",
    # Pallas kernels other than attention.
    "kernel",
    # Elementwise operations and reductions.
    "vector",
    # Copies and layout changes.
    "copy",
    # Slices of arrays, in-place updates, gathers.
    "slice",
    "collective",
    # Copies between HBM and VMEM that overlap with other work.
    "async copy",
    "host transfer",
    "custom call",
]
# Categories whose time is attributed to the matrix units.
PRODUCT_CATEGORIES: tuple[WorkCategory, ...] = ("matmul", "collective matmul", "attention")
# These categories are not work of the cores; their bytes are counted elsewhere.
TRANSFERS: tuple[WorkCategory, ...] = ("collective", "async copy", "host transfer")
# The compiler's estimate is far too high for these categories.
OVERESTIMATED: tuple[WorkCategory, ...] = ("vector", "copy", "slice")

_ARITHMETIC = {
    "abs", "add", "and", "clamp", "compare", "convert", "cosine", "divide", "exponential", "exponential-minus-one",
    "log", "logistic", "maximum", "minimum", "multiply", "negate", "or", "power", "reduce", "reduce-precision",
    "reduce-window", "rng-bit-generator", "rsqrt", "scatter", "select", "sine", "sort", "sqrt", "subtract", "tanh",
    "xor",
}  # fmt: skip
# These often only compute indices or pick rows, so they do not make a fusion with slices arithmetic.
_INDEX_ARITHMETIC = {"add", "and", "clamp", "compare", "select"}
_SLICES = {"dynamic-slice", "dynamic-update-slice", "gather"}
_COPIES = {"copy", "transpose", "reshape", "concatenate", "pad", "slice", "broadcast"}
_STARTS = {"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start", "async-start"}
# These only name values, hold constants, or order side effects.
_NO_WORK = {
    "add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element", "iota", "opt-barrier",
    "parameter", "partition-id", "replica-id", "tuple",
}  # fmt: skip
_NO_WORK_CALLS = re.compile(
    r'custom_call_target="(ConcatBitcast|PrepareAsyncCall\w+|AssumeGatherIndicesInBound|AllocateBuffer|Sharding)"'
)


def is_work(instruction: Instruction) -> bool:
    """Return whether an instruction itself takes time."""
    if instruction.opcode == "custom-call":
        return not _NO_WORK_CALLS.search(instruction.attributes)
    return instruction.opcode not in _NO_WORK and not instruction.opcode.endswith(("-done", "-update"))


def categorize(module: Module, flops: Flops, instruction: Instruction) -> WorkCategory:
    """Return the kind of work of an instruction.

    Args:
        module: the program.
        flops: FLOPs of its instructions.
        instruction: the instruction to classify.
    """
    # Fusions may be host transfers too, so check this first.
    if transfers.find_transfer(module, instruction):
        return "host transfer"
    if instruction.opcode == "fusion":
        return _categorize_fusion(module, flops, instruction)
    if any(transfers.iter_collectives(module, instruction)):
        return "collective"
    if instruction.opcode in _STARTS:
        return "async copy"
    if instruction.opcode == "custom-call":
        if flops.look_up(instruction) > 0:
            return "matmul"
        if "tpu_custom_call" not in instruction.attributes:
            return "custom call"
        return "attention" if is_attention(instruction) else "kernel"
    if instruction.opcode in PRODUCTS:
        return "matmul"
    if instruction.opcode in _COPIES:
        return "copy"
    return "slice" if instruction.opcode in _SLICES | {"scatter"} else "vector"


def _categorize_fusion(module: Module, flops: Flops, fusion: Instruction) -> WorkCategory:
    multiplies = flops.look_up(fusion) > 0
    # The TPU compiler uses this name for the steps of an asynchronous collective fusion.
    is_step_of_collective = "async_collective" in fusion.name or "async_collective" in fusion.get_called_computation(
        "calls"
    )
    if is_step_of_collective or any(transfers.iter_collectives(module, fusion)):
        return "collective matmul" if multiplies else "collective"
    if multiplies:
        return "matmul"
    opcodes = set(_opcodes(module, fusion))
    if opcodes & (_ARITHMETIC - _INDEX_ARITHMETIC):
        return "vector"
    if opcodes & _SLICES:
        return "slice"
    return "vector" if opcodes & _ARITHMETIC else "copy"


def _opcodes(module: Module, fusion: Instruction) -> Counter[str]:
    """Count the opcodes inside a fusion, including nested fusions."""
    opcodes: Counter[str] = Counter()
    for inner in module.get_fused_instructions(fusion):
        if inner.opcode == "fusion":
            opcodes += _opcodes(module, inner)
        else:
            opcodes[inner.opcode] += 1
    return opcodes


_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FLOATS = ("bf16", "f16", "f32", "f8e4m3fn", "f8e5m2")


@dataclass(frozen=True)
class AttentionWork:
    """An attention kernel's work.

    Attributes:
        flops: FLOPs, counted without masks.
        head_size: channels of a head.
        seen_share: fraction of them that the mask leaves, on the device that has most. Kernels skip the others.
    """

    flops: int
    head_size: int
    seen_share: float


def is_attention(kernel: Instruction) -> bool:
    """Return whether a Pallas kernel is one of the known attention kernels."""
    return bool(_SPLASH.search(kernel.name) or _SPLASH.search(kernel.op_name))


def count_attention(module: Module, kernel: Instruction) -> AttentionWork:
    """Return the work of one of JAX's splash kernels, for which the compiler has no cost model.

    The forward kernel has 2 products (q k and p v), the gradient of the queries 3, and that of keys and values 4, or 5
    if one kernel computes all three gradients. A product is B heads S T head_size multiply-adds.

    Args:
        module: the program.
        kernel: an attention kernel in it, see `is_attention`.
    """
    match = _SPLASH.search(kernel.name) or _SPLASH.search(kernel.op_name)
    assert match is not None
    phase = match[1]
    tensors = []
    for operand in module.operands(kernel):
        # Mask data are integers.
        tensors += [array for array in arrays(operand.type) if array.dtype in _FLOATS and len(array.dims) >= 2]
    # Both are [..., heads, S, head_size], or have the last two dimensions swapped.
    queries, keys = tensors[:2]
    head_size, length = sorted(keys.dims[-2:])
    products = _PRODUCTS[phase]
    if phase == "dkv":
        # A third gradient of at least the keys' rank is that of the queries; running sums have a lower rank.
        gradients = [array for array in arrays(kernel.type) if len(array.dims) >= len(keys.dims)]
        if len(gradients) > 2:
            products += 1
    return AttentionWork(
        2 * products * math.prod(queries.dims) * length, head_size, _find_seen_share(module, kernel, phase)
    )


def _find_seen_share(module: Module, kernel: Instruction, phase: str) -> float:
    """Return the fraction of pairs of a query and a key that the kernel's mask leaves, on the device that has most."""
    integers: list[Array] = []
    floats: list[Array] = []
    for operand in module.operands(kernel):
        for array in arrays(operand.type):
            (floats if array.dtype in _FLOATS else integers).append(array)
    queries, keys = (max(array.dims[-2:]) for array in floats[:2])
    # First come two tables of blocks; then the positions of queries, if there is a mask, and two arrays of documents.
    tables, positions = integers[:2], integers[2:]
    if tables and len(positions) % 2 == 0:
        return 1.0
    # The tables have a row for each block of queries (of keys, for their gradients). A row is as long as the longest
    # list of blocks that one of them sees.
    _, num_blocks, list_length = tables[0].dims[-3:]
    if phase == "dkv":
        num_blocks, list_length = list_length, num_blocks
    length, listed_length = (keys, queries) if phase == "dkv" else (queries, keys)
    listed_share = list_length * length / (num_blocks * listed_length)
    # A window makes lists shorter. Otherwise, the last device's queries have all keys before them.
    return min(listed_share, 1 - queries / (2 * keys))
