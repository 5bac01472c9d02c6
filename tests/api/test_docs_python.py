"""docs/python.md and its notebook: what they show runs, in a process with one device. Each runs on a small config
where `make test` runs it, and as it is written among the pairs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import CONFIG, ROOT, write_text

FIRST, OWN_LOOP = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
NOTEBOOK = (ROOT / "docs" / "notebooks" / "first_run.ipynb").read_text()
WRITTEN = "nanogpt-cpu"  # the config that all of them name
SPECS = pytest.mark.parametrize("spec", [f"{CONFIG}:tiny", WRITTEN], ids=["tiny", "written"])


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text for the tiny config."""
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")


def python(folder: Path, *arguments: str, stdin: str = "") -> list[str]:
    """The lines that Python prints, which works in that folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@SPECS
@pytest.mark.once("tiny")
def test_the_notebook_runs_and_shows_pictures(spec: str, tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    source = NOTEBOOK.replace(WRITTEN, spec)
    pictures = json.loads(python(tmp_path, "-m", "tests.api.notebook_cells", stdin=source)[-1])
    assert pictures == [None, ["_repr_html_"], ["_repr_html_", "_repr_png_"], [], None, []]


@SPECS
@pytest.mark.once("tiny")
def test_a_loop_of_ones_own_goes_on_where_it_was_saved(spec: str, tmp_path: Path) -> None:
    source = OWN_LOOP.replace(WRITTEN, spec)
    first = python(tmp_path, "-c", source)
    assert [line.split()[0] for line in first] == ["10", "20", "30"]
    losses = [float(line.split()[1]) for line in first]
    assert losses == sorted(losses, reverse=True)
    resumed, last = python(tmp_path, "-c", source.replace("== 30", "== 40"))
    assert resumed == "resumed from step 30"
    step, loss = last.split()
    assert step == "40"
    assert float(loss) < losses[-1]


@pytest.mark.pairs
def test_the_first_lines_run(tmp_path: Path) -> None:
    assert any(re.match(" +verdict +fits", line) for line in python(tmp_path, "-c", FIRST))
