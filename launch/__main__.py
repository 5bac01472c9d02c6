"""`plimsoll VERB ...`, `python -m launch VERB ...`: runs a verb, or lists them. Imports only the verb that it runs."""

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import launch
from launch import cli


def verbs() -> dict[str, str]:
    """Verb -> first line of its docstring, read from the source so that listing them imports none of them."""
    found = {}
    for module in pkgutil.iter_modules(launch.__path__):
        path = Path(launch.__path__[0], f"{module.name}.py")
        if module.name.startswith("_") or module.ispkg or not path.is_file():
            continue
        tree = ast.parse(path.read_text())
        if module.name != "cli" and any(
            isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body
        ):
            found[module.name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


@cli.main
def main(argv: list[str]) -> int:
    """Dispatches to `launch.VERB.main`."""
    known = verbs()
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, known), default=0)
        print("usage: plimsoll VERB ...   (or: python -m launch.VERB ...)\n")
        for verb, line in known.items():
            print(f"  {verb:{width}}  {line}")
        print("\n`plimsoll VERB --help` shows the flags of a verb.")
        return 0
    verb = cli.choose("verb", argv[0], list(known))
    return importlib.import_module(f"launch.{verb}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
