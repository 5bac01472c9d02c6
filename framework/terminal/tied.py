"""Ties a process to its parent: it is killed when that ends, however that ends (Linux; see prctl(2))."""

import ctypes
import signal

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def tie() -> None:
    """Ties this process to its parent. Elsewhere than on Linux it does nothing: a parent that is killed then leaves
    its processes behind."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
