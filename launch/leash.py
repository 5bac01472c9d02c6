"""Importing this ties the process to its parent: it is killed when that ends, however that ends.

The server of `plimsoll local` imports it first, and each of its forks ties itself again, as a fork is not tied.
"""

import signal

from framework.terminal.tied import tie

__all__ = ["tie"]

tie()
# A fork of the server gets back the handler of this moment, until it has its own. Python's raises
# an exception, and so a traceback, wherever the server or the fork is.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
