"""`plimsoll COMMAND ...`: runs a command, or lists them. Imports only the command that runs."""

import ast
import importlib
import sys
from pathlib import Path

import plimsoll
from plimsoll import launch
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli


def verbs() -> dict[str, str]:
    """Return {verb: first line of its docstring}, read from the source so that listing verbs imports none of them."""
    folder = Path(launch.__path__[0])
    line_by_verb = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text()
        # The decorator distinguishes verbs from shared modules.
        if "\n@cli.main\n" in source and path.stem != "__main__":
            doc = ast.get_docstring(ast.parse(source)) or ""
            line_by_verb[path.stem] = doc.partition("\n")[0]
    return line_by_verb


@cli.main
def main(argv: list[str]) -> int:
    """Dispatch to `launch.VERB.main`."""
    if argv[:1] == ["--version"]:
        print(f"plimsoll {plimsoll.__version__}")
        return ExitCode.DONE
    line_by_verb = verbs()
    if argv and argv[0] not in ("-h", "--help", "help"):
        verb = cli.choose("verb", argv[0], list(line_by_verb))
        module = importlib.import_module(f"plimsoll.launch.{verb}")
        return module.main(argv[1:])
    width = max(map(len, line_by_verb))
    lines = [f"  {verb:{width}}  {line}" for verb, line in line_by_verb.items()]
    print("usage: plimsoll COMMAND ...\n", *lines, sep="\n")
    print("\n`plimsoll COMMAND --help` shows the flags of a command.")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
