"""The documentation pages on functions and their notebook: the examples run and print what the pages show."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import notebooks
from tests.support.pages import python_block, text_lines
from tests.support.runs import ROOT

REVERSIBLE = "docs/functions_reversible.md"
CHECKPOINTS = "docs/functions_checkpoints.md"
CELLS = notebooks.code_cells("functions.ipynb")
# Public thread -> the page that answers it, and a part of the example there.
EXAMPLES = {
    "Zygote.jl#1541": ("docs/functions_eager.md", 'name="dense"'),
    "jax#23316, 34 layers": ("docs/functions_lora.md", "(34, 1024, 4096)"),
    "jax#23316, equinox": ("docs/functions_lora.md", "eqx.nn.MLP"),
    "axlearn#867": ("docs/functions_stream.md", "pl.stream"),
}


def run_program(folder: Path, source: str) -> list[str]:
    """Run a program in a folder with one device, and return the lines that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def kibibytes(lines: list[str]) -> dict[str, int]:
    """Return {"reversible 16": KiB of temporaries, ...}."""
    rows = [re.fullmatch(r"(\w+ \d+) layers: (\d+) KiB", line) for line in lines]
    return {row[1]: int(row[2]) for row in rows if row}


@pytest.mark.pairs
def test_the_page_on_reversible_layers(tmp_path: Path) -> None:
    lines = run_program(tmp_path, python_block(REVERSIBLE, "# reversible.py"))
    measured = kibibytes(lines)
    assert measured["reversible 256"] == measured["reversible 16"]
    assert measured["plain 256"] > 10 * measured["plain 16"]
    # Versions of the compiler differ by some buffers.
    documented = kibibytes(text_lines(REVERSIBLE))
    assert measured.keys() == documented.keys()
    assert all(0.5 < measured[name] / documented[name] < 2 for name in measured)
    assert re.fullmatch(r"there and back: \{'0': '\d\.\de-04', '1': '\d\.\de-04'\}", lines[-1])


@pytest.mark.pairs
def test_the_page_on_checkpoints(tmp_path: Path) -> None:
    source = python_block(CHECKPOINTS, "# checkpoints.py")
    (first,) = run_program(tmp_path, source)
    assert first.startswith("[60, 80, 100] [")
    resumed, last = run_program(tmp_path, source.replace("101", "121"))
    assert resumed == "resumed from step 100 {'loader': [0, 800]}"
    assert last.startswith("[80, 100, 120] [")


def num_lines(source: str) -> int:
    """Return the number of lines of code, without blank lines, comments and imports."""
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = [line.strip() for line in source.splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines) - len(imports)


@pytest.mark.parametrize("thread", EXAMPLES)
def test_thread_example_is_short(thread: str) -> None:
    """`tests/api/test_docs_python.py` runs the examples."""
    page, part = EXAMPLES[thread]
    assert num_lines(python_block(page, part)) <= 15


def test_notebook_cells_are_short() -> None:
    assert max(map(num_lines, CELLS)) <= 15


def test_notebook_cells_run_and_print_their_stated_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("equinox")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    _, _, losses, refusal, lora, equinox, stream, eager, depth, restored = [
        notebooks.execute_cell(cell, names) for cell in CELLS
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    assert "'dense' is used twice" in refusal or "'branch' is used twice" in refusal
    assert lora["up"].a == (34, 64, 4)
    assert lora["down"].b == (34, 4, 64)
    assert equinox == [f"layers/{number}/weight" for number in range(5)]
    assert stream == eager == "pinned_host"
    assert depth[16] == depth[256]
    assert restored == ("pinned_host", 1, {"loader": [0, 8]})
