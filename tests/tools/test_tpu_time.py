"""The command that counts a TPU step's time: a saved program, two side by side, and mistakes."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tools.bench import step_programs, tpu_time
from tools.bench.step_programs import StepInfo

RECORDED = Path(__file__).parents[1] / "plan" / "recorded" / "v5e_step.txt"
FLOPS = 6 * 2 * 256 * 512 * 512


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a saved step."""
    path = tmp_path / "step"
    path.mkdir()
    (path / "hlo.txt").write_text(RECORDED.read_text())
    about = StepInfo("small", "v5e-4", "v5e", tokens=256, model_flops=FLOPS / 2, traced_flops=FLOPS, peak_bytes=2**20)
    (path / step_programs.META).write_text(json.dumps(asdict(about)))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = tpu_time.main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_saved_step(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path):
    code, text = run(capsys, "--program", folder, "--top=3", f"--json={tmp_path / 'count.json'}")
    assert code == 0
    for phrase in ("assumptions", "197 TFLOP/s", "time by category", "all-gather", "to host", "MFU, upper bound"):
        assert phrase in text
    assert "1.0000 of what the traced program needs" in text
    product = next(line for line in text.splitlines() if line.strip().startswith("dot_general"))
    assert "model.py:36" in product
    report = json.loads((tmp_path / "count.json").read_text())
    assert report["figures"]["products, TFLOP"] == FLOPS / 1e12
    assert report["host"]["to host"]["hidden"] == pytest.approx(0)
    assert report["ideal_seconds"] == FLOPS / 2 / 197e12
    assert sum(one["sums"]["flops"] for one in report["operations"]) == FLOPS


def test_one_category(capsys: pytest.CaptureFixture[str], folder: Path):
    _, text = run(capsys, "--program", folder, "--category=vector")
    largest = text.partition("largest operations, vector\n")[2].partition("\ncollectives")[0].splitlines()[1:]
    assert largest
    assert all(" vector " in f"{line} " for line in largest)


def test_side_by_side(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path):
    twice = step_programs.load(folder)
    about = step_programs.StepInfo(**{**asdict(twice.about), "files": {"hlo.txt": 2}})
    step_programs.save(step_programs.CompiledStep(about, twice.parts), tmp_path / "twice")
    code, text = run(capsys, "--program", tmp_path / "twice", "--against", folder)
    assert code == 0
    rows = {
        line[: line.find("   ")].strip(): line.split() for line in text.partition("side by side")[2].splitlines()[2:]
    }
    assert rows["sync collectives, GB"][-1] == "2.000"
    assert rows["step, middle, ms"][-1] == "2.000"


def test_user_errors(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path):
    for argv, phrase in [
        ([], "expected a target and --config"),
        (["v5e-4"], "--config=NAME is required"),
        (["v5e-5", "--config=nanogpt-cpu"], "nearest: v5e-4, v5e-8"),
        (["h200", "--config=nanogpt-cpu"], "TPUs whose rates are known"),
        (["v5e-4", "--config=nanogpt"], "nanogpt-cpu"),
        (["v5e-4", "--config=nanogpt-cpu", "--config.modle=1"], "modle"),
        (["--program", tmp_path], "no compiled step in"),
        (["--program", folder, "v5e-4"], "expected a target"),
        (["--program", folder, "--config=nanogpt-cpu"], "leave out --config"),
        (["--program", folder, "--json", tmp_path / "none" / "x.json"], "none does not exist"),
    ]:
        code, text = run(capsys, *argv)
        assert code == 2, argv
        assert text.startswith("error: ")
        assert phrase in text
    (folder / "hlo.txt").write_text("no program\n")
    assert "found no ENTRY" in run(capsys, "--program", folder)[1]
    (folder / step_programs.META).write_text('{"target": "v5e-4"}')
    assert "expected a JSON object with name, target" in run(capsys, "--program", folder)[1]
