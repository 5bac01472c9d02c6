"""Floating-point operations of attention kernels, which the compiler knows nothing of.

The splash kernels of JAX, whoever calls them: forward 2 products (q k and p v), the gradient of the queries 3, that of
keys and values 4, or 5 where one kernel makes all three. A product is B heads S T head_size multiply-adds.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from framework.plan.hlo.arrays import Array, arrays
from framework.plan.hlo.computations import Instruction
from framework.plan.hlo.module import Module

_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FLOATS = ("bf16", "f16", "f32", "f8e4m3fn", "f8e5m2")


class Attention(NamedTuple):
    """A kernel's work: FLOPs as if nothing were masked, and the size of a head."""

    flops: int
    head_size: int


def is_attention(kernel: Instruction) -> bool:
    """Whether a Pallas kernel is one of the attention kernels known here."""
    return bool(_SPLASH.search(kernel.name) or _SPLASH.search(kernel.op_name))


def attention(module: Module, kernel: Instruction) -> Attention:
    """The work of an attention kernel."""
    match = _SPLASH.search(kernel.name) or _SPLASH.search(kernel.op_name)
    assert match is not None
    phase = match[1]
    tensors = []
    for operand in module.operands(kernel):
        tensors += [array for array in arrays(operand.type) if _is_tensor(array)]
    # Both are [..., heads, S, head_size], or have the last two dimensions the other way round.
    queries, keys = tensors[:2]
    head_size, length = sorted(keys.dims[-2:])
    products = _PRODUCTS[phase]
    if phase == "dkv":
        # A third gradient as large as the keys is that of the queries; running sums are of lower
        # rank.
        gradients = [array for array in arrays(kernel.type) if len(array.dims) >= len(keys.dims)]
        if len(gradients) > 2:
            products += 1
    return Attention(2 * products * math.prod(queries.dims) * length, head_size)


def _is_tensor(array: Array) -> bool:
    # The data of a mask are integers.
    return array.dtype in _FLOATS and len(array.dims) >= 2
