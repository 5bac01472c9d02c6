"""The notebooks of the documentation: their cells, and what a cell shows when it is run."""

import json
from typing import Any

from tests.support.runs import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def notebook(name: str) -> dict[str, Any]:
    """A notebook, as its file has it."""
    return json.loads((FOLDER / name).read_text())


def code_cells(name: str) -> list[str]:
    """The source of each cell of code, in order."""
    return ["".join(cell["source"]) for cell in notebook(name)["cells"] if cell["cell_type"] == "code"]


def executed(source: str, names: dict[str, Any]) -> Any:
    """Executes a cell; the value of its last line if that is an expression, as a notebook shows it."""
    *lines, last = source.splitlines()
    try:
        expression = compile(last, "cell", "eval")
    except SyntaxError:
        exec(compile(source, "cell", "exec"), names)
        return None
    exec(compile("\n".join(lines), "cell", "exec"), names)
    return eval(expression, names)
