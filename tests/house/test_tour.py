"""docs/tour.md: each file exists and contains the names that the tour points to."""

import ast
import re

import pytest

from tests.support.runs import ROOT

STOPS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)


def get_definitions(tree: ast.AST) -> dict[str, ast.AST]:
    """Return the functions and classes that a module or class defines, by name."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name: node for node in ast.iter_child_nodes(tree) if isinstance(node, kinds)}


def test_the_tour_has_stops():
    assert len(STOPS) > 30


@pytest.mark.parametrize(("file", "name"), STOPS)
def test_tour_stop_exists(file: str, name: str):
    node: ast.AST = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        assert part in get_definitions(node), f"{file} has no {name}"
        node = get_definitions(node)[part]
