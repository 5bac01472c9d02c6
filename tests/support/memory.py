"""Keeps the memory of a test process small: two of them share a laptop of 8 GiB.

A process drops its compiled programs and caches when it has grown, after a test. It keeps them otherwise, since every
file needs the same small programs of jax.numpy.
"""

import ctypes
import functools
import gc
import os
import sys
from pathlib import Path

import pytest

# Bytes by which a process may grow until it forgets.
GROWTH = 600_000_000


class Level:
    """What was left in memory when this process last forgot, in bytes; more than it has, before it knows."""

    floor = sys.maxsize


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def forget() -> None:
    """Drops compiled programs, results that test modules cache, and memory that was freed and not given back."""
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
    # glibc keeps what was freed between blocks that are in use.
    ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Forgets after a test, if the process has grown."""
    if sys.platform == "linux" and resident_bytes() > Level.floor + GROWTH:
        forget()
        Level.floor = resident_bytes()


def pytest_collection_finish() -> None:
    """Modules live as long as the process: collections that do not walk through them are quick, and
    `jax.checking_leaks` makes one for every function that it traces."""
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        Level.floor = resident_bytes()
