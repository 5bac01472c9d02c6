"""The console command `plimsoll`, and `python -m plimsoll`."""

import sys

from plimsoll.launch import startup

startup.begin()

from plimsoll.launch.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
