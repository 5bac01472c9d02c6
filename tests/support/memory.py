"""Limits the memory of a test process, because two of them share a laptop with 8 GiB.

After a test, a process that has grown too much drops its compiled programs and caches. Otherwise it keeps them, since
every file needs the same small jax.numpy programs.
"""

import ctypes
import functools
import gc
import os
import sys
from pathlib import Path

import pytest

# Bytes that a process may grow by before it drops its caches.
GROWTH = 600_000_000


class ResidentBaseline:
    """Resident bytes after this process last dropped its caches; sys.maxsize until the first measurement."""

    floor = sys.maxsize


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def drop_caches() -> None:
    """Drop compiled programs and the caches of test modules, and return freed memory to the system."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("tests."):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()
    gc.collect()
    # glibc keeps freed memory between blocks that are in use.
    ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Drop the caches after a test if the process has grown too much."""
    if sys.platform == "linux" and resident_bytes() > ResidentBaseline.floor + GROWTH:
        drop_caches()
        ResidentBaseline.floor = resident_bytes()


def pytest_collection_finish() -> None:
    """Freeze the imported modules, which exist until the process ends, so that garbage collection skips them.

    `jax.checking_leaks` runs a collection for every function that it traces.
    """
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        ResidentBaseline.floor = resident_bytes()
