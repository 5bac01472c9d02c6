"""The notebooks of the documentation: their cells, and the value that a cell shows when it runs."""

import json
from typing import Any

from tests.support.runs import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def notebook(name: str) -> dict[str, Any]:
    """Return the parsed JSON of a notebook."""
    return json.loads((FOLDER / name).read_text())


def code_cells(name: str) -> list[str]:
    """Return the source of each code cell, in order."""
    return ["".join(cell["source"]) for cell in notebook(name)["cells"] if cell["cell_type"] == "code"]


def execute_cell(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell. Like a notebook, return the value of its last line if that is an expression."""
    *lines, last = source.splitlines()
    try:
        expression = compile(last, "cell", "eval")
    except SyntaxError:
        exec(compile(source, "cell", "exec"), names)
        return None
    exec(compile("\n".join(lines), "cell", "exec"), names)
    return eval(expression, names)
