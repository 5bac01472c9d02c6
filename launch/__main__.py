"""`plimsoll VERB ...`, `python -m launch VERB ...`: runs a verb, or lists them. Imports only the verb that it runs."""

import ast
import importlib
import sys
from pathlib import Path

import launch
from launch import cli


def verbs() -> dict[str, str]:
    """Verb -> first line of its docstring, read from the source so that listing them imports none of them."""
    sources = {path.stem: path.read_text() for path in sorted(Path(launch.__path__[0]).glob("*.py"))}
    return {
        name: (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        for name, source in sources.items()
        if "\n@cli.main\n" in source and name != "__main__"
    }


@cli.main
def main(argv: list[str]) -> int:
    """Dispatches to `launch.VERB.main`."""
    known = verbs()
    if argv and argv[0] not in ("-h", "--help", "help"):
        return importlib.import_module(f"launch.{cli.choose('verb', argv[0], list(known))}").main(argv[1:])
    lines = [f"  {verb:{max(map(len, known))}}  {line}" for verb, line in known.items()]
    print("usage: plimsoll VERB ...   (or: python -m launch.VERB ...)\n", *lines, sep="\n")
    print("\n`plimsoll VERB --help` shows the flags of a verb.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
