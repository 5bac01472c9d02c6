"""The commands of `plimsoll COMMAND`. One module per command, each with `main(argv=None) -> int`."""

import sys

# Python sets argv[0] to "-m" while it looks for the module to run: this process is `python -m plimsoll.launch.train`,
# not a program that imports a verb.
if sys.argv[0] == "-m":
    from plimsoll.launch import startup

    startup.begin()
