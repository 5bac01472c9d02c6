"""Parses array types in a program's text: `bf16[8,1024]{1,0:T(8,128)(2,1)S(1)}`.

The part in braces is the layout: dimensions from minor to major, tiles, and the memory space. On TPU, space 0 (omitted
in the text) is HBM, 1 is the on-chip vector memory (VMEM), and 5 is host memory.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

# Memory spaces of a TPU.
HBM = 0
VMEM = 1
HOST = 5
# The names of all other types end in their number of bits.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\((\d+)(?:,(\d+))?\)")


@dataclass(frozen=True)
class Array:
    """An array type: dtype, dimensions, and whether it is in host memory."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes without the padding of tiled layouts."""
        return math.prod(self.dims) * element_bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class StoredArray:
    """An array type with its memory space and the bytes that it occupies there, including tile padding."""

    array: Array
    space: int
    padded_bytes: int


def element_bits(dtype: str) -> int:
    """Return the bits of one element; 32 for types that hold no numbers (token, opaque)."""
    digits = "".join(filter(str.isdigit, dtype))
    return _BITS.get(dtype) or int(digits or 32)


# Cached, because many instructions have the same type and each type is read several times.
@lru_cache(maxsize=65536)
def parse_stored_arrays(text: str) -> tuple[StoredArray, ...]:
    """Return all array types in a text, in order, with their memory spaces and padded sizes."""
    stored_arrays = []
    for dtype, dims_text, layout in _SHAPE.findall(text):
        dims = tuple(int(number) for number in dims_text.split(",") if number)
        space_match = _SPACE.search(layout)
        # HBM is omitted in the text.
        space = int(space_match[1]) if space_match else HBM
        # The minor dimensions are padded to whole tiles. Only the first tile matters: later ones, such as `(2,1)` in
        # T(8,128)(2,1), subdivide it and add no padding.
        padded = list(dims)
        if tile := _TILE.search(layout):
            minor_to_major = [int(axis) for axis in layout.split(":")[0].split(",") if axis.strip().isdigit()]
            sizes = [int(size) for size in tile.groups() if size]
            # A tile's sizes are listed from major to minor; the last one is along the most minor dimension.
            for axis, size in zip(minor_to_major, reversed(sizes), strict=False):
                padded[axis] = -(-dims[axis] // size) * size
        padded_bytes = math.prod(padded) * element_bits(dtype) // 8
        stored_arrays.append(StoredArray(Array(dtype, dims, on_host=space == HOST), space, padded_bytes))
    return tuple(stored_arrays)


def arrays(text: str) -> list[Array]:
    """Return all array types in a text, in order."""
    return [stored_array.array for stored_array in parse_stored_arrays(text)]


def bytes_in(text: str, *spaces: int) -> int:
    """Return the padded bytes of all arrays in a text that are in one of the memory spaces."""
    total = 0
    for stored_array in parse_stored_arrays(text):
        if stored_array.space in spaces:
            total += stored_array.padded_bytes
    return total
