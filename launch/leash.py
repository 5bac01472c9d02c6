"""Importing this ties the process to its parent: it is killed when that ends, however that ends (Linux; see prctl(2)).

The server of `plimsoll local` imports it first, and each of its forks ties itself again, as a fork is not tied.
"""

import ctypes
import signal

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def tie() -> None:
    """Ties this process to its parent. Elsewhere than on Linux it does nothing: a launcher that is killed then leaves
    its processes behind."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


tie()
# A fork of the server gets back the handler of this moment, until it has its own. Python's raises
# an exception, and so a traceback, wherever the server or the fork is.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
