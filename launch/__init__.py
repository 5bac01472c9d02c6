"""The verbs of `plimsoll VERB`. One module per verb, each with `main(argv=None) -> int`."""

import os
import sys

# Python sets argv[0] to "-m" while it looks for the module to run, so this process is a verb and not a program that
# imports one. Handle Ctrl-C before any slow import.
if sys.argv[0] == "-m" or sys.argv[0].endswith("/plimsoll"):
    from launch import own_packages

    own_packages.insist()

    from framework.terminal import interrupts

    interrupts.begin()

    from framework.devices.allocator import share_one_heap

    # Libraries imported later start threads, and each thread would have its own heap.
    share_one_heap()
    # Hide XLA's informational messages and warnings, unless the user asks for them. Errors are still shown.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
