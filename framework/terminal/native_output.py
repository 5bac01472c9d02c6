"""Filters what C++ libraries write to standard output, apart from what Python writes.

Gloo, the collectives of CPU processes, greets every group of processes with a line on standard
output (`[Gloo] Rank 0 is connected to 1 peer ranks...`), and has no switch for it. Such lines would
stand among the lines of a run, and in the output that another program reads from it.
"""

from __future__ import annotations

import os
import sys
import threading

from framework.terminal import phases

_GREETING = b"[Gloo] Rank "


def leave_out_greetings() -> None:
    """Leaves out Gloo's greetings from now on; other C++ output to standard output passes.

    Python's own output goes straight to where standard output was: it waits for no thread, and none
    of it is lost where the process ends at once.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        # A notebook's or a test's object is no file.
        return
    if descriptor != 1:
        return
    sys.stdout.flush()
    # C++ writes to descriptor 1 whatever Python does with sys.stdout, so a pipe takes its place.
    python_output = os.dup(1)
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    python_stdout = os.fdopen(
        python_output,
        "w",
        buffering=1,
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
    )
    phases.replace_stdout(python_stdout)
    thread = threading.Thread(
        target=_pass_on,
        args=(reader, python_output),
        name="native output",
        daemon=True,
    )
    thread.start()


def _pass_on(reader: int, output: int) -> None:
    """Copies lines from one descriptor to the other, without greetings.

    It ends when nobody can write or read any more.
    """
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            if line.startswith(_GREETING):
                continue
            try:
                os.write(output, line)
            except OSError:
                # The reader of this process's output has left.
                return
