"""Runs the code of docs/python.md, its notebook and the function pages: as written, in a process with one device, and
with a small config in place of the config that the code names."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import notebooks
from tests.support.runs import CONFIG, ROOT, write_text, xla_flags

FIRST, OWN_LOOP = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
LORA, LORA_EQUINOX, TRAINED_PART = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "functions_lora.md").read_text(), re.DOTALL
)
CELLS = notebooks.code_cells("first_run.ipynb")
WRITTEN = "nanogpt-cpu"  # the config that all these pages name
SMALL = f"{CONFIG}:tiny"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with text for the small config."""
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(folder: Path, source: str) -> list[str]:
    """Run a program in that folder with one device and return the lines it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_is_well_formed(name: str) -> None:
    notebook = notebooks.notebook(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        kind = cell["cell_type"]
        results = {"outputs": [], "execution_count": None} if kind == "code" else {}
        assert cell == {"cell_type": kind, "id": cell["id"], "metadata": {}, "source": cell["source"], **results}


@pytest.mark.pairs
def test_notebook_cells_run_and_show_pictures(capsys: pytest.CaptureFixture) -> None:
    names: dict[str, Any] = {}
    _, plan, run, losses, _, bits_per_byte = [
        notebooks.execute_cell(cell.replace(WRITTEN, SMALL), names) for cell in CELLS
    ]
    assert "<iframe" in plan._repr_html_()
    assert "image/png" in run._repr_html_()
    assert losses.shape == run.metrics["train/loss"].steps.shape
    assert 0 < bits_per_byte < 20


@pytest.mark.pairs
def test_user_loop_resumes_from_its_save(capsys: pytest.CaptureFixture) -> None:
    source = OWN_LOOP.replace(WRITTEN, SMALL)
    exec(source, {})
    first = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in first] == ["10", "20", "30"]
    losses = [float(line.split()[1]) for line in first]
    assert losses == sorted(losses, reverse=True)
    exec(source.replace("== 30", "== 40"), {})
    resumed, last = capsys.readouterr().out.splitlines()
    assert resumed == "resumed from step 30"
    step, loss = last.split()
    assert step == "40"
    assert float(loss) < losses[-1]


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["functions_eager", "functions_stream"])
def test_function_pages_train(name: str, capsys: pytest.CaptureFixture) -> None:
    [source] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
    exec(source, {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    losses = [float(line[0]) for line in lines]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    if name == "functions_stream":
        assert [line[1] for line in lines] == ["pinned_host"] * 3


@pytest.mark.pairs
@pytest.mark.parametrize("source", [FIRST, OWN_LOOP, "\n".join(CELLS)], ids=["first", "loop", "notebook"])
def test_it_runs_as_it_is_written(source: str, folder: Path) -> None:
    lines = python(folder, source)
    if source == FIRST:
        assert any(re.match(" +verdict +fits", line) for line in lines)


@pytest.mark.pairs
def test_lora_around_34_layers_as_it_is_written() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    exec(LORA, {})


def test_lora_check_fails_without_lora() -> None:
    """Check a smaller version on the CPU: the page's step passes, and the same step with merged weights fails."""
    small = LORA.replace("1024", "64").replace("4096", "160").replace("bfloat16", "float32")
    small = small.replace(', target="v5e-1"', "").replace("512", "9")
    exec(small, {})
    merged = small.replace("pl.with_lora(loss)", "lambda p, a, x: loss(pl.lora_merge(p, a), x)")
    assert merged != small
    with pytest.raises(AssertionError, match=r"f32\[34,64,160\]"):
        exec(merged.replace('"^params/"', '"^p/"'), {})


def test_lora_around_an_equinox_module() -> None:
    pytest.importorskip("equinox")
    names: dict[str, Any] = {}
    exec(LORA_EQUINOX, names)
    assert len(names["gradient"]) == 5


def test_a_part_is_trained() -> None:
    names: dict[str, Any] = {}
    exec(TRAINED_PART, names)
    assert names["trained"]["body"] is None
    assert names["frozen"]["head"] is None
