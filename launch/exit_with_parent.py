"""Importing this module makes the kernel kill this process when its parent ends, for whatever reason.

The fork server of `plimsoll local` imports it first. Each fork calls kill_with_parent again, because a fork does not
inherit the setting.
"""

import signal

from plimsoll.framework.terminal.kill_with_parent import kill_with_parent

__all__ = ["kill_with_parent"]

kill_with_parent()
# A fork of the server starts with the handler set here, until it installs its own. Python's default handler raises an
# exception, so a Ctrl-C during startup would print a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
