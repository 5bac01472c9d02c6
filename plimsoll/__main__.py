"""The console command `plimsoll`, and `python -m plimsoll`."""

import sys

from plimsoll import __version__


def main() -> int:
    """Run the command of `sys.argv`."""
    # Answered before the imports of a command, which take most of a second.
    if sys.argv[1:2] == ["--version"]:
        print(f"plimsoll {__version__}")
        return 0

    from plimsoll.launch import startup

    startup.begin()

    from plimsoll.launch.__main__ import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
