"""Ties a process to its parent: it is killed when the parent ends, for whatever reason (Linux only; see prctl(2))."""

import ctypes
import signal

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def kill_with_parent() -> None:
    """Kill this process when its parent ends.

    On systems other than Linux it does nothing, so a parent that is killed leaves its child processes behind.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
