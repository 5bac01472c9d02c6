"""Configures whether the C library keeps the memory that CPU programs free.

XLA on CPU allocates a step's temporary buffers at the start of the step and frees them at its end. By default, the C
library returns large blocks to the kernel. The kernel then hands them out again as pages, which it zeroes one by one
when they are first touched: this takes 26 of the 65 ms of processor time in a step of `nanogpt-cpu`. But a training
process needs the same blocks again immediately.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

# Parameters of mallopt, as glibc's malloc.h numbers them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
# Bytes of the arrays of the largest run, at the peak of its step, whose freed memory is kept.
MAX_KEPT_BYTES = 512 << 20
# Smallest block that `return_freed_blocks` returns. The kernel zeroes 1 MiB in about 0.2 ms.
_LARGE_BLOCK_BYTES = 1 << 20
# Outcomes of the calls of `keep_freed_memory`, which lasts until the process ends.
_outcomes: list[bool] = []
# Environment variables with which a user configures malloc.
_USER_VARIABLES = (
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations, until the process ends. Return whether that succeeded.

    The process then stays at least as large as its peak. Nothing changes with other C libraries, or if the environment
    configures malloc. Only for runs of up to MAX_KEPT_BYTES: small blocks that are allocated between two steps break
    up the space that the first one freed, so a second step of 1.3 GiB in a process of 3.6 GiB added 1.4 GiB.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    # Allocate all blocks from the heap. A block with its own mapping would be returned to the kernel when freed.
    if not mallopt(_M_MMAP_MAX, 0):
        return False
    # Never return the end of the heap to the kernel.
    is_kept = bool(mallopt(_M_TRIM_THRESHOLD, -1))
    _outcomes.append(is_kept)
    return is_kept


def return_freed_blocks() -> bool:
    """Make glibc return every freed block of at least 1 MiB to the kernel at once. Return whether that succeeded.

    For steps that are too large to keep their memory. By default, glibc raises the limit from which a block has its own
    mapping to the size of the largest block that was freed, up to 32 MiB. The arrays of single layers are then in the
    heap, which other blocks break up: a run of 2.3 GiB of layers took 0.7 GiB more.
    """
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES))


def keeps_freed_memory() -> bool:
    """Return whether `keep_freed_memory` has succeeded in this process."""
    return any(_outcomes)


def share_one_heap() -> bool:
    """Make glibc use one heap for all threads. Return whether that succeeded. Call it before there are other threads.

    By default threads have separate heaps, which are returned to the kernel regardless of `keep_freed_memory`. A step
    of `nanogpt-cpu` with a batch of 48 took 52,000 page faults and 75 ms of system time; with one heap, it takes 60
    page faults and 3 ms.

    Memory that is freed in one heap is not available to the threads of another, either. A rollback reads the checkpoint
    in new threads: 50 of them raised the memory of a process with 82 MiB of state from 1.2 to 2.0 GiB.
    """
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))


def release_freed_memory() -> None:
    """Return memory that was freed to the kernel, such as that of the compiler, which frees many small blocks."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's mallopt; None with other C libraries, or if the user configures malloc."""
    if sys.platform != "linux" or any(name in os.environ for name in _USER_VARIABLES):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
