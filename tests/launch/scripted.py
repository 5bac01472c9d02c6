"""A stand-in for `plimsoll train`: its arguments are a script, then the flags that `plimsoll local` adds."""

import sys


def main() -> int:
    """Run the script as `python -c SCRIPT INDEX WORDS...` would."""
    words = sys.argv[1:]
    own = [word for word in words[1:] if not word.startswith(("--coordinator=", "--num_processes=", "--process_id="))]
    index = next((word.partition("=")[2] for word in words if word.startswith("--process_id=")), "0")
    sys.argv = ["-c", index, *own]
    exec(compile(words[0], "<script>", "exec"), {"__name__": "__main__"})
    return 0
