"""Counts the FLOPs of matrix products and convolutions; a multiply-add counts 2.

The TPU compiler writes every matrix product as a convolution. A contracted dimension is then the kernel's input feature
or a window as large as the dimension; a batch dimension is a window in which each result uses only one position. So the
count includes only window positions that meet an input element, as in XLA's own cost analysis
(xla/service/hlo_cost_analysis.cc).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.framework.layers.block_rounding import PRODUCT_KERNEL
from plimsoll.framework.plan.grouped_products import count_grouped_flops
from plimsoll.framework.plan.hlo.arrays import arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module

PRODUCTS = ("convolution", "dot")
_FLOATS = ("bf16", "f16", "f32")
# 8-bit numbers in the text of a program, and what `AcceleratorSpec.peak_flops` calls them.
EIGHT_BIT = {"f8e4m3fn": "fp8", "f8e5m2": "fp8", "s8": "int8"}
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


class Flops:
    """FLOPs of a program's matrix products, by instruction.

    A loop itself counts as 0, because callers ask for the instructions in its body one by one.
    """

    def __init__(self, module: Module):
        self._module = module
        self._by_computation: dict[str, int] = {}

    def look_up(self, instruction: Instruction) -> int:
        """Return the FLOPs of one instruction and of everything that it calls, except loops and branches."""
        if instruction.opcode == "convolution":
            return _count_convolution(self._module, instruction)
        if instruction.opcode == "dot":
            return _count_dot(self._module, instruction)
        if instruction.opcode == "fusion":
            return self._count_computation(instruction.get_called_computation("calls"))
        if instruction.opcode == "call":
            return self._count_computation(instruction.get_called_computation("to_apply"))
        if is_block_product(instruction):
            return 2 * math.prod(arrays(instruction.type)[0].dims) * _operand_dims(self._module, instruction, 0)[-1]
        if instruction.opcode == "custom-call":
            types = [instruction.type, *(operand.type for operand in self._module.operands(instruction))]
            float_shapes = [array.dims for kind in types for array in arrays(kind) if array.dtype in _FLOATS]
            return count_grouped_flops(instruction.op_name, float_shapes)
        return 0

    def operand_dtype(self, instruction: Instruction) -> str:
        """Return the dtype of the operands of the largest matrix product in an instruction; "" if there is none."""
        product = self.product(instruction)
        if product is None:
            return ""
        operand = self._module.instructions[product.operands[0]]
        return arrays(operand.type)[0].dtype

    def product(self, instruction: Instruction) -> Instruction | None:
        """Return the largest matrix product in a fusion; None if there is none.

        Its name is more informative than that of the fusion's last operation.
        """
        products = list(self._products(instruction))
        return max(products, key=self.look_up, default=None)

    def _products(self, instruction: Instruction) -> Iterator[Instruction]:
        if instruction.opcode in PRODUCTS or (instruction.opcode == "custom-call" and self.look_up(instruction)):
            yield instruction
        for inner in self._module.get_fused_instructions(instruction):
            yield from self._products(inner)

    def _count_computation(self, computation: str) -> int:
        if computation not in self._by_computation:
            inner = self._module.computations.get(computation, [])
            self._by_computation[computation] = sum(map(self.look_up, inner))
        return self._by_computation[computation]


def is_block_product(instruction: Instruction) -> bool:
    """Return whether an instruction is our kernel for 8-bit floats in blocks, of left [M, K] and right [N, K]."""
    return instruction.opcode == "custom-call" and f"/{PRODUCT_KERNEL}/" in instruction.op_name


def _operand_dims(module: Module, instruction: Instruction, index: int) -> tuple[int, ...]:
    operand = module.instructions[instruction.operands[index]]
    return arrays(operand.type)[0].dims


def _count_dot(module: Module, dot: Instruction) -> int:
    left_dims = _operand_dims(module, dot, 0)
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    contracted_axes = []
    if match:
        contracted_axes = [int(axis) for axis in match[1].split(",") if axis]
    contracted_size = math.prod(left_dims[axis] for axis in contracted_axes)
    result_size = math.prod(arrays(dot.type)[0].dims)
    return 2 * result_size * contracted_size


@dataclass(frozen=True)
class _Window:
    """One spatial dimension of a convolution."""

    size: int
    stride: int
    pad_low: int
    input_dilation: int
    kernel_dilation: int


def _count_convolution(module: Module, convolution: Instruction) -> int:
    labels = _LABELS.search(convolution.attributes)
    if labels is None:
        return 0
    input_labels, kernel_labels, result_labels = labels.groups()
    input_dims = _operand_dims(module, convolution, 0)
    kernel_dims = _operand_dims(module, convolution, 1)
    result_dims = arrays(convolution.type)[0].dims
    multiplied = 1
    # Digits label spatial dimensions; the other dimensions of the result are batch and output features.
    for label, size in zip(result_labels, result_dims, strict=True):
        if not label.isdigit():
            multiplied *= size
    # The kernel's input features are those of one feature group.
    for label, size in zip(kernel_labels, kernel_dims, strict=True):
        if label == "i":
            multiplied *= size
    for index, window in enumerate(_windows(convolution.attributes)):
        label = str(index)
        if label in result_labels and label in input_labels:
            positions = result_dims[result_labels.index(label)]
            length = input_dims[input_labels.index(label)]
            multiplied *= _count_overlaps(positions, length, window)
    return 2 * multiplied


def _windows(attributes: str) -> list[_Window]:
    """Parse the spatial dimensions of a convolution from `window={size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=2x2}`."""
    match = _WINDOW.search(attributes)
    fields = dict(re.findall(r"(\w+)=([\dx_\-]+)", match[1])) if match else {}
    sizes = fields["size"].split("x") if fields.get("size") else []
    columns = [sizes]
    for key, default in (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1")):
        columns.append(fields[key].split("x") if key in fields else [default] * len(sizes))
    windows = []
    for size, stride, pad, input_dilation, kernel_dilation in zip(*columns, strict=True):
        # The text gives the padding at both ends; only the low end is needed, because the high end follows from the
        # result's size.
        low_pad = pad.split("_")[0]
        windows.append(_Window(int(size), int(stride), int(low_pad), int(input_dilation), int(kernel_dilation)))
    return windows


def _count_overlaps(positions: int, length: int, window: _Window) -> int:
    """Count the pairs of a result position and a window position that meet an element of the input.

    Args:
        positions: size of the result along this dimension.
        length: size of the input along this dimension.
        window: the window along this dimension.
    """
    stride = window.stride
    dilation = window.input_dilation
    is_plain = window.pad_low == 0 and dilation == 1 and window.kernel_dilation == 1
    if is_plain and (positions - 1) * stride + window.size <= length:
        return positions * window.size
    # Dilation makes holes between the elements; this is the position of the last element.
    end = (length - 1) * dilation
    common = math.gcd(stride, dilation)
    # One of every `period` positions meets an element, the others meet holes.
    period = dilation // common
    total = 0
    for offset in range(window.size):
        shift = offset * window.kernel_dilation - window.pad_low
        # At such an offset all positions meet holes.
        if shift % common:
            continue
        lowest = max(0, -(shift // stride))
        highest = min(positions - 1, (end - shift) // stride)
        # The first position that meets an element solves position * stride + shift = 0 modulo dilation.
        inverse = pow(stride // common, -1, period) if period > 1 else 0
        first = (-shift // common) * inverse % period
        if lowest > first:
            periods_before = -(-(lowest - first) // period)
            first += periods_before * period
        if highest >= first:
            total += (highest - first) // period + 1
    return total
