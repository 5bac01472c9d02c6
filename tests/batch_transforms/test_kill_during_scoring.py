"""SIGKILL while the reference is computed, and while the model trains: the next start continues to the same bits."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from plimsoll import configs
from plimsoll.launch.evaluate import main as evaluate
from tests.support.runs import ROOT, losses, output, rows, start, start_several, write_text

HALVES = str(ROOT / "tests" / "support" / "paired_rows.py")
KILLED = str(Path(__file__).parent / "kill_during_scoring.py")
RUN = {"file": HALVES, "config": "dpo"}
INJECTED = str(ROOT / "tests" / "faults" / "fault_injection.py")
FACTS = "reference/reference.json"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of an uninterrupted run."""
    root = tmp_path_factory.mktemp("calm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TEXT", "")
        write_text(root / "text")
        assert start(root / "run", **RUN).wait(timeout=500) == 0, output(root / "run")
    return root / "run"


@pytest.fixture
def text(calm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the uninterrupted run."""
    monkeypatch.setenv("TINY_TEXT", str(calm.parent / "text"))


def references(workdir: Path) -> dict[str, bytes]:
    """Return the files of stored values, by name."""
    return {file.name: file.read_bytes() for file in (workdir / "reference").glob("*.f32")}


def evaluations(workdir: Path) -> list[dict[str, float]]:
    """Return the metrics of the run's evaluations."""
    names = [name for row in rows(workdir) for name in row if name.startswith("eval/") and "seconds" not in name]
    return [{name: row[name] for name in set(names) if name in row} for row in rows(workdir) if "eval/held/loss" in row]


@pytest.mark.pairs
def test_reference_scoring_resumes_after_a_kill(calm: Path, text, tmp_path: Path):
    workdir = tmp_path / "run"
    assert start(workdir, **RUN, program=(KILLED, "5")).wait(timeout=500) == -signal.SIGKILL, output(workdir)
    done = json.loads((workdir / FACTS).read_text())["done"]
    assert done == {"train": 40, "held": 0}
    assert references(workdir) != references(calm)
    assert start(workdir, **RUN).wait(timeout=500) == 0, output(workdir)
    assert not re.search("computing (it|the reference) again", output(workdir))
    assert references(workdir) == references(calm)
    assert losses(workdir) == losses(calm)
    assert evaluations(workdir) == evaluations(calm) != []


@pytest.mark.pairs
def test_training_resumes_from_stored_values_after_a_kill(calm: Path, text, tmp_path: Path, capfd):
    workdir = tmp_path / "run"
    assert start(workdir, **RUN, program=(INJECTED, "kill", "8")).wait(timeout=500) == -signal.SIGKILL
    written = (workdir / FACTS).stat().st_mtime_ns
    assert start(workdir, **RUN).wait(timeout=500) == 0, output(workdir)
    assert "resumed from" in output(workdir)
    assert (workdir / FACTS).stat().st_mtime_ns == written
    assert losses(workdir) == losses(calm)
    # `plimsoll evaluate` uses the stored values too.
    configs.load(f"{HALVES}:dpo")  # makes the class in the user's file known
    scores = tmp_path / "scores.json"
    assert evaluate([f"--workdir={workdir}", "--validation", f"--json={scores}"]) == 0
    last = evaluations(calm)[-1]
    assert json.loads(scores.read_text())["validation"]["held"]["margin"] == pytest.approx(
        last["eval/held/margin"], rel=1e-4
    )
    assert "reference: stored" in capfd.readouterr().out


@pytest.mark.pairs
def test_killing_one_process_resumes_both(calm: Path, text, tmp_path: Path):
    mesh = ("--config.mesh.data=2", "--config.mesh.fsdp=1")
    for workdir, programs in ((tmp_path / "two", {}), (tmp_path / "killed", {1: (KILLED, "5")})):
        processes = start_several(workdir, 2, *mesh, **RUN, programs=programs)
        codes = [process.wait(timeout=500) for process in processes]
        if programs:
            assert codes[1] == -signal.SIGKILL
            assert 0 < json.loads((workdir / FACTS).read_text())["done"]["train"] < 250
            again: list[subprocess.Popen] = start_several(workdir, 2, *mesh, **RUN)
            codes = [process.wait(timeout=500) for process in again]
        assert codes == [0, 0], output(workdir)
    assert references(tmp_path / "two") == references(tmp_path / "killed")
    assert losses(tmp_path / "two") == losses(tmp_path / "killed")
