"""The floating-point operations of grouped products, whose arrays have room for more rows than a router fills."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from framework.layers.experts.grouped import EVEN_ROWS

_SCOPE = re.compile(rf"{EVEN_ROWS}(\d+)")


def grouped_flops(name: str, float_shapes: Iterable[tuple[int, ...]]) -> int:
    """FLOPs of a kernel under an even router; 0 if it is no grouped product.

    Args:
        name: the path of scopes that the kernel is called in.
        float_shapes: the shapes of its operands and results of floats: rows, and the weights [E, I, O] or their
            gradients.
    """
    match = _SCOPE.search(name)
    if match is None:
        return 0
    weights = [shape for shape in float_shapes if len(shape) == 3]
    if not weights:
        return 0
    even_rows = int(match[1])
    return 2 * even_rows * math.prod(weights[0][1:])
