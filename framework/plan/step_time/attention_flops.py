"""Counts the FLOPs of attention kernels, for which the compiler has no cost model.

It covers JAX's splash kernels, from any caller. The forward kernel has 2 products (q k and p v), the gradient of the
queries 3, and that of keys and values 4, or 5 if one kernel computes all three gradients. A product is
B heads S T head_size multiply-adds.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from plimsoll.framework.plan.hlo.arrays import Array, arrays
from plimsoll.framework.plan.hlo.computations import Instruction
from plimsoll.framework.plan.hlo.module import Module

_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FLOATS = ("bf16", "f16", "f32", "f8e4m3fn", "f8e5m2")


class AttentionWork(NamedTuple):
    """An attention kernel's work: FLOPs counted without masks, and the head size."""

    flops: int
    head_size: int


def is_attention(kernel: Instruction) -> bool:
    """Return whether a Pallas kernel is one of the known attention kernels."""
    return bool(_SPLASH.search(kernel.name) or _SPLASH.search(kernel.op_name))


def count_attention(module: Module, kernel: Instruction) -> AttentionWork:
    """Return the work of an attention kernel.

    Args:
        module: the program.
        kernel: an attention kernel in it, see `is_attention`.
    """
    match = _SPLASH.search(kernel.name) or _SPLASH.search(kernel.op_name)
    assert match is not None
    phase = match[1]
    tensors = []
    for operand in module.operands(kernel):
        tensors += [array for array in arrays(operand.type) if _is_tensor(array)]
    # Both are [..., heads, S, head_size], or have the last two dimensions swapped.
    queries, keys = tensors[:2]
    head_size, length = sorted(keys.dims[-2:])
    products = _PRODUCTS[phase]
    if phase == "dkv":
        # A third gradient of at least the keys' rank is that of the queries; running sums have a lower rank.
        gradients = [array for array in arrays(kernel.type) if len(array.dims) >= len(keys.dims)]
        if len(gradients) > 2:
            products += 1
    return AttentionWork(2 * products * math.prod(queries.dims) * length, head_size)


def _is_tensor(array: Array) -> bool:
    # Mask data are integers.
    return array.dtype in _FLOATS and len(array.dims) >= 2
