"""Floating-point operations of matrix products and convolutions; a multiply-add counts 2.

The TPU's compiler writes every matrix product as a convolution. A contracted dimension is then the kernel's input
feature or a window as large as the dimension; a batch dimension is a window of which each result uses one place. So
places that really meet are counted, as XLA's own cost analysis does (xla/service/hlo_cost_analysis.cc).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from framework.plan.hlo.arrays import arrays
from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.module import Module

PRODUCTS = ("convolution", "dot")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


class Flops:
    """The matrix products of a program, by instruction; loops count once, as their bodies' instructions are asked for
    one by one."""

    def __init__(self, module: Module):
        self._module = module
        self._of_computation: dict[str, int] = {}

    def of(self, instruction: Instruction) -> int:
        """Of one instruction, and of all that it calls but loops and branches."""
        if instruction.opcode == "convolution":
            return _convolution(self._module, instruction)
        if instruction.opcode == "dot":
            return _dot(self._module, instruction)
        if instruction.opcode == "fusion":
            return self._of_called(instruction.called("calls"))
        if instruction.opcode == "call":
            return self._of_called(instruction.called("to_apply"))
        return 0

    def product(self, instruction: Instruction) -> Instruction | None:
        """The largest matrix product in a fusion, whose name says more than that of the fusion's last operation."""
        products = list(self._products(instruction))
        return max(products, key=self.of, default=None)

    def _products(self, instruction: Instruction) -> Iterator[Instruction]:
        if instruction.opcode in PRODUCTS:
            yield instruction
        for inner in self._module.fused(instruction):
            yield from self._products(inner)

    def _of_called(self, computation: str) -> int:
        if computation not in self._of_computation:
            inner = self._module.computations.get(computation, [])
            self._of_computation[computation] = sum(map(self.of, inner))
        return self._of_computation[computation]


def _operand_dims(module: Module, instruction: Instruction, index: int) -> tuple[int, ...]:
    return arrays(module.instructions[instruction.operands[index]].type)[0].dims


def _dot(module: Module, dot: Instruction) -> int:
    left = _operand_dims(module, dot, 0)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    axes = [int(axis) for axis in contracted[1].split(",") if axis] if contracted else []
    return 2 * math.prod(arrays(dot.type)[0].dims) * math.prod(left[axis] for axis in axes)


class _Window(NamedTuple):
    """One spatial dimension of a convolution."""

    size: int
    stride: int
    pad_low: int
    input_dilation: int
    kernel_dilation: int


def _convolution(module: Module, convolution: Instruction) -> int:
    labels = _LABELS.search(convolution.attributes)
    if labels is None:
        return 0
    input_labels, kernel_labels, result_labels = labels.groups()
    input_dims, kernel_dims = (_operand_dims(module, convolution, index) for index in (0, 1))
    result_dims = arrays(convolution.type)[0].dims
    multiplied = 1
    for label, size in zip(result_labels, result_dims, strict=True):
        multiplied *= 1 if label.isdigit() else size  # batch and output features
    for label, size in zip(kernel_labels, kernel_dims, strict=True):
        multiplied *= size if label == "i" else 1  # input features, of one group
    for index, window in enumerate(_windows(convolution.attributes)):
        label = str(index)
        if label in result_labels and label in input_labels:
            places = result_dims[result_labels.index(label)]
            length = input_dims[input_labels.index(label)]
            multiplied *= _meetings(places, length, window)
    return 2 * multiplied


def _windows(attributes: str) -> list[_Window]:
    found = _WINDOW.search(attributes)
    fields = dict(re.findall(r"(\w+)=([\dx_\-]+)", found[1])) if found else {}
    sizes = fields.get("size", "").split("x") if fields.get("size") else []

    def numbers(key: str, default: str) -> list[str]:
        return fields[key].split("x") if key in fields else [default] * len(sizes)

    pads = [pad.split("_")[0] for pad in numbers("pad", "0_0")]
    columns = (sizes, numbers("stride", "1"), pads, numbers("lhs_dilate", "1"), numbers("rhs_dilate", "1"))
    return [_Window(*map(int, column)) for column in zip(*columns, strict=True)]


def _meetings(places: int, length: int, window: _Window) -> int:
    """How many pairs of a result's place and a place in the window meet an element of the input.

    Args:
        places: of the result, along this dimension. length: of the input.
    """
    stride, dilation = window.stride, window.input_dilation
    plain = window.pad_low == 0 and dilation == 1 and window.kernel_dilation == 1
    if plain and (places - 1) * stride + window.size <= length:
        return places * window.size
    end = (length - 1) * dilation  # where the last element is, between the holes that dilation makes
    common = math.gcd(stride, dilation)
    period = dilation // common  # of places that meet elements, not holes
    total = 0
    for offset in range(window.size):
        shift = offset * window.kernel_dilation - window.pad_low
        if shift % common:
            continue  # it meets holes only
        lowest = max(0, -(shift // stride))
        highest = min(places - 1, (end - shift) // stride)
        inverse = pow(stride // common, -1, period) if period > 1 else 0
        first = (-shift // common) * inverse % period
        first += -(-(lowest - first) // period) * period if lowest > first else 0
        total += (highest - first) // period + 1 if highest >= first else 0
    return total
