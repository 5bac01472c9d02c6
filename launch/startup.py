"""Startup steps of a verb's process that precede all slow imports."""

import os

from plimsoll.framework.terminal import interrupts


def begin() -> None:
    """Handle Ctrl-C from now on, and set environment variables that libraries read on import. May be called again."""
    interrupts.begin()

    from plimsoll.framework.devices.allocator import share_one_heap

    # Libraries imported later start threads, and each thread would have its own heap.
    share_one_heap()
    # Hide XLA's informational messages and warnings, unless the user asks for them. Errors are still shown.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
