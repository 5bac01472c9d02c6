"""Executes the cells of a notebook: `python -m tests.api.notebook_cells < FILE`. The last line of output is a JSON list:
for each cell the names of its value's pictures, or null for a cell without a value."""

import json
import sys
from typing import Any


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


def shown(value: Any) -> list[str] | None:
    """The names of the methods by which a notebook draws a value. All are called."""
    if value is None:
        return None
    pictures = [name for name in ("_repr_html_", "_repr_png_") if name in dir(value)]
    for name in pictures:
        assert getattr(value, name)(), name
    return pictures


if __name__ == "__main__":
    notebook = json.load(sys.stdin)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cell_names: dict[str, Any] = {}
    print(json.dumps([shown(executed("".join(cell["source"]), cell_names)) for cell in cells]))
