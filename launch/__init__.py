"""The verbs of `plimsoll VERB`. One module per verb, each with `main(argv=None) -> int`."""

import os
import sys

# Python calls itself "-m" while it looks for the module that it is to run: this process is a verb,
# and no program that imports one. Ctrl-C is seen to before anything that takes time is imported.
if sys.argv[0] == "-m" or sys.argv[0].endswith("/plimsoll"):
    from launch import own_packages

    own_packages.insist()

    from framework.terminal import interrupts

    interrupts.begin()

    from framework.devices.allocator import share_one_heap

    # Libraries that are imported later start threads, and each of these would have a heap.
    share_one_heap()
    # XLA's errors are shown, and its remarks and warnings, in a format of their own, where somebody
    # asks for them.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
