"""`plimsoll compare`: the differences, values and curves of runs, from the files of their workdirs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from plimsoll.framework.metrics.jsonl import JsonlWriter
from plimsoll.launch import compare, comparison


def write_run(folder: Path, config: dict[str, Any], losses: dict[int, tuple[float, float]]) -> str:
    """Write a workdir whose rows have these (training loss, evaluated loss) by step."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"$class": "mine.Experiment", **config}))
    writer = JsonlWriter(folder / "metrics.jsonl")
    for step, (train, evaluated) in losses.items():
        writer.write(step, {"train/loss": train, "train/tokens_per_second": 1000.0 * step})
        writer.write(step, {"eval/held/loss": evaluated, "eval/held/accuracy": 1.0 / evaluated})
    writer.close()
    return str(folder)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs whose configs differ in a number and a class, and lack a field of each other."""
    first = {"learner": {"optimizer": {"$class": "optax.adamw", "b1": 0.9}, "clip": 1.0}, "rules": [{"a": 1}, {"a": 2}]}
    second = {"learner": {"optimizer": {"$class": "optax.lion"}, "clip": 1.0}, "rules": [{"a": 1}, {"a": 3}]}
    return [
        write_run(tmp_path / "x" / "run", first, {1: (5.0, 5.5), 2: (4.0, 4.25), 3: (3.0, 4.5)}),
        write_run(tmp_path / "y" / "run", second, {1: (5.0, 5.0), 2: (float("nan"), float("nan"))}),
    ]


def test_json_has_every_difference_and_value(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "curves.png"
    assert compare.main([*runs, f"--out={out}", "--json", "--metric=train/loss", "--metric=eval/held/loss"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == {
        "learner.optimizer": ["optax.adamw", "optax.lion"],
        "learner.optimizer.b1": [0.9, "-"],
        "rules.1.a": [2, 3],
    }
    assert [run["name"] for run in found["runs"]] == ["x/run", "y/run"]
    first, second = (run["metrics"] for run in found["runs"])
    assert first["eval/held/loss"] == {"last": 4.5, "best": 4.25, "best_step": 2}
    assert second["eval/held/loss"] == {"last": "nan", "best": 5.0, "best_step": 1}
    pixels = image.imread(out)
    # Two panels with a curve of the first color.
    is_blue = np.all(abs(pixels[..., :3] - [0x30 / 255, 0x63 / 255, 0x8E / 255]) < 0.02, axis=-1)
    half = len(pixels) // 2
    for panel in np.split(is_blue, [half]):
        assert np.sum(panel) > 100


def test_tables(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert compare.main([*runs, f"--out={tmp_path / 'curves.png'}"]) == 0
    printed = capsys.readouterr().out
    assert "optax.adamw" in printed
    # The default metrics are losses, and the best evaluation has its step.
    assert "best eval/held/loss (step)" in printed
    assert "4.25 (2)" in printed
    assert "accuracy" not in printed


def test_the_highest_accuracy_is_the_best(runs: list[str]):
    (first, _) = comparison.read_runs(runs)
    assert first.best("eval/held/accuracy") == (2, 1 / 4.25)


def test_dollars_are_no_formulas(tmp_path: Path):
    folder = write_run(tmp_path / "$x$_", {}, {1: (1.0, 1.0)})
    records = comparison.read_runs([folder, folder], ["$x_{", "$"])
    assert comparison.plot(records, ["train/loss"], tmp_path / "a.png").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["x/run"], "expected the workdirs of at least two runs, given 1"),
        (["x/run", "nowhere"], "nowhere holds no config.json"),
        (["x/run", "y/run", "--metric=eval/held/los"], "no run has this metric; did you mean 'eval/held/loss'"),
        (["x/run", "y/run", "--out=a.jpg"], "expected a .png file"),
        (["x/run", "y/run", "--out=none/a.png"], "the folder none does not exist"),
    ],
)
def test_what_is_refused(
    flags: list[str], message: str, runs: list[str], tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert compare.main(flags) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_a_broken_config_is_named(runs: list[str], capsys: pytest.CaptureFixture[str]):
    for content in (b"[" * 100_000, b"\xff", b"[1]"):
        (Path(runs[1]) / "config.json").write_bytes(content)
        assert compare.main(runs) == 2
        assert "y/run/config.json" in capsys.readouterr().err
