"""Importing this ties the process to its parent: it is killed when that ends, however that ends (Linux; see prctl(2)).

The server of `launch.local` imports it first, and each of its forks ties itself again, as a fork is not tied.
"""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tie() -> None:
    """Elsewhere than on Linux it does nothing: a launcher that is killed then leaves its processes behind."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


tie()
