"""What the C library does with memory that a program on CPU gives back.

XLA for CPU asks for a step's temporary buffers at its begin and frees them at its end. The C library hands large blocks
back to the kernel, which gives them out again as pages that it zeroes one by one, when each is first touched: 26 of the
65 ms of processor time of a step of `nanogpt-cpu`. A process that trains wants the same blocks again at once.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed for the next request, until the process ends; whether it does.

    The process then stays as large as it was at its peak. Left alone are other C libraries, and an environment that
    says itself what malloc is to do.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _OF_THE_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # All blocks from the heap, none by a mapping of its own; and the heap's end is never given back.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
