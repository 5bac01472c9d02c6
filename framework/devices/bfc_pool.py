"""Simulates the pool from which JAX takes a GPU's memory: how much of it a sequence of allocations occupies.

The pool (BFC, best fit with coalescing; xla/tsl/framework/bfc_allocator.cc) hands out a free block without splitting it
if less than 128 MiB and less than half of the block would be left. A step of many programs allocates and frees arrays
of different sizes, so what stays empty in such blocks adds up: 1.3 GiB of 39.6 were measured for Llama 3 8B by layer
programs on an H200 (docs/benchmarks/gpu.md).
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from dataclasses import dataclass

ALLOCATOR_VARIABLE = "XLA_PYTHON_CLIENT_ALLOCATOR"
_ALIGNMENT = 256
# A block is split if at least this would be left, or more than what was asked for.
_MIN_REMAINDER = 128 << 20
# Far more than any device has: the simulation measures how much is occupied.
_POOL_BYTES = 1 << 50


def is_default_allocator() -> bool:
    """Return whether JAX uses this pool on GPUs, and not the allocator of CUDA or none."""
    return os.environ.get(ALLOCATOR_VARIABLE, "default") in ("default", "bfc")


@dataclass
class _Block:
    size: int
    is_free: bool


class BfcPool:
    """A pool of memory, in which blocks are allocated and freed.

    Attributes:
        end: bytes from the start of the pool to the end of the highest block that was ever in use.
    """

    def __init__(self) -> None:
        self.end = 0
        self._blocks = {0: _Block(_POOL_BYTES, is_free=True)}  # by address
        self._addresses = [0]  # sorted
        self._free = [(_POOL_BYTES, 0)]  # sorted (size, address) of the free blocks

    def allocate(self, size: int) -> int | None:
        """Allocate a block of at least `size` bytes; return its address, None for no bytes."""
        if not size:
            return None
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        # The smallest block that is large enough.
        block_size, address = self._free.pop(bisect_left(self._free, (size, -1)))
        if block_size >= 2 * size or block_size - size >= _MIN_REMAINDER:
            self._add(address + size, block_size - size)
            block_size = size
        self._blocks[address] = _Block(block_size, is_free=False)
        self.end = max(self.end, address + block_size)
        return address

    def free(self, address: int | None) -> None:
        """Free a block, and merge it with its free neighbors."""
        if address is None:
            return
        size = self._blocks[address].size
        number = bisect_left(self._addresses, address)
        neighbors = [*self._addresses[number + 1 : number + 2], *self._addresses[max(0, number - 1) : number]]
        self._remove(address)
        for neighbor in neighbors:
            block = self._blocks[neighbor]
            if block.is_free:
                self._free.pop(bisect_left(self._free, (block.size, neighbor)))
                self._remove(neighbor)
                size += block.size
                address = min(address, neighbor)
        self._add(address, size)

    def _add(self, address: int, size: int) -> None:
        self._blocks[address] = _Block(size, is_free=True)
        insort(self._addresses, address)
        insort(self._free, (size, address))

    def _remove(self, address: int) -> None:
        del self._blocks[address]
        self._addresses.pop(bisect_left(self._addresses, address))
