"""Filters the standard output of C++ libraries, separately from the output of Python.

Gloo, which implements collectives between CPU processes, prints a line to standard output for every process group
(`[Gloo] Rank 0 is connected to 1 peer ranks...`), with no option to turn it off. These lines would mix with the lines
of a run, and with output that another program parses.
"""

from __future__ import annotations

import os
import sys
import threading

from plimsoll.framework.terminal import phases

_GREETING = b"[Gloo] Rank "


def drop_gloo_greetings() -> None:
    """Suppress Gloo's greetings from now on. Other C++ output still reaches standard output.

    Python's own output goes directly to the original standard output. It does not pass through a thread, so none of it
    is lost if the process ends abruptly.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        # In a notebook or a test, sys.stdout may not be a file.
        return
    if descriptor != 1:
        return
    sys.stdout.flush()
    # C++ code writes to descriptor 1 regardless of sys.stdout, so replace the descriptor with a pipe.
    python_output = os.dup(1)
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    python_stdout = os.fdopen(python_output, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    phases.replace_stdout(python_stdout)
    thread = threading.Thread(
        target=_copy_without_greetings, args=(reader, python_output), name="native output", daemon=True
    )
    thread.start()


def _copy_without_greetings(reader: int, output: int) -> None:
    """Copy lines from one descriptor to the other until either side is closed."""
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            if line.startswith(_GREETING):
                continue
            try:
                os.write(output, line)
            except OSError:
                # The reader of this process's output has closed it.
                return
