"""Runs other `plimsoll` commands as child processes that end with this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import IO

from plimsoll.framework.terminal import interrupts
from plimsoll.framework.terminal.kill_with_parent import kill_with_parent

# Seconds between two calls of `while_running`.
_INTERVAL = 1.0


def run_verb(
    verb: str, *flags: str, output: IO[bytes] | None = None, while_running: Callable[[], object] = lambda: None
) -> int:
    """Run `plimsoll VERB` on this machine.

    Args:
        verb: the verb.
        flags: its flags.
        output: file for its stdout and stderr; None for those of this process.
        while_running: called about once per second until it ends.

    Returns:
        Its exit code, 128 + n if signal n killed it.
    """
    # Flush first, so that this process's output precedes the command's, even if it goes to a file.
    sys.stdout.flush()
    words = [sys.executable, "-m", "plimsoll", verb, *flags]
    # In its own session it receives Ctrl-C once, from here, and saves first. It is killed with this process, so that
    # a repeated command finds its workdir free.
    stderr = None if output is None else subprocess.STDOUT
    process = subprocess.Popen(words, start_new_session=True, preexec_fn=kill_with_parent, stdout=output, stderr=stderr)

    def pass_on(number: int) -> None:
        process.send_signal(number)

    with interrupts.listen_for_signals(pass_on):
        while True:
            try:
                code = process.wait(timeout=_INTERVAL)
                break
            except subprocess.TimeoutExpired:
                while_running()
    return code if code >= 0 else 128 - code
