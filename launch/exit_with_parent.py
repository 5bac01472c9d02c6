"""Importing this module ties the process to its parent: it is killed when the parent ends, for whatever reason.

The fork server of `plimsoll local` imports it first. Each fork ties itself again, because a fork does not inherit
this.
"""

import signal

from plimsoll.framework.terminal.kill_with_parent import kill_with_parent

__all__ = ["kill_with_parent"]

kill_with_parent()
# A fork of the server starts with the handler set here, until it installs its own. Python's default handler raises an
# exception, and so prints a traceback from wherever the server or the fork is.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
