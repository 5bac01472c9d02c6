"""`plimsoll sweep`: which runs it makes, what it refuses before it starts, and how it continues."""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import plimsoll as pl
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, sweep, sweep_plan
from plimsoll.launch.sweep_runs import Sweep, SweepRun, build_runs
from tests.support import runs as support

RATE = "learner.optimizer.learning_rate"
TINY = f"--config={support.CONFIG}:tiny"
FITS = {"fits": True, "bytes": 1, "verdict": "fits", "host_fits": True, "host_verdict": "", "step_seconds": 0.5}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text; $TINY_TEXT is restored afterwards."""
    monkeypatch.setenv("TINY_TEXT", "")
    return support.write_text(tmp_path / "text")


@dataclass
class Trained:
    """The runs that a sweep has started, and how they end.

    Attributes:
        lines: their command lines.
        codes: exit codes by learning rate; 0 for any other.
    """

    lines: list[list[str]] = field(default_factory=list)
    codes: dict[float, int] = field(default_factory=dict)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Replace training and planning: a run ends at once, with metrics that its learning rate determines."""
    seen = Trained()

    def train_one(words: list[str], workdir: Path, label: str) -> int:
        seen.lines.append(words)
        rate = next(float(word.rpartition("=")[2]) for word in words if RATE in word)
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "config.json").write_text("{}")
        row = {"step": 4, "train/loss": rate, "eval/held/loss": abs(math.log10(rate) + 2)}
        (workdir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return seen.codes.get(rate, 0)

    monkeypatch.setattr(sweep, "_train_one", train_one)
    monkeypatch.setattr(sweep_plan, "price_runs", lambda command, overrides, limits: [FITS] * len(overrides))
    return seen


def test_grid_has_every_combination():
    runs = build_runs(["config.a.b=1,2", "c=[1,2];[3]"], [], None, 0)
    assert [run.folder for run in runs] == ["000", "001", "002", "003"]
    assert [dict(run.overrides) for run in runs] == [
        {"a.b": "1", "c": "[1,2]"},
        {"a.b": "1", "c": "[3]"},
        {"a.b": "2", "c": "[1,2]"},
        {"a.b": "2", "c": "[3]"},
    ]


def test_draws_have_their_distribution_and_their_seed():
    texts = ["a=log:1e-4:1e-2", "b=uniform:-1:1", "c=int:2:4", "d=choice:x,y"]
    runs = build_runs([], texts, 4000, 7)
    values = [dict(run.overrides) for run in runs]
    logs = np.array([math.log10(float(value["a"])) for value in values])
    # The mean and the standard deviation of a uniform distribution, within four standard errors.
    for drawn, low, high in ((logs, -4, -2), (np.array([float(value["b"]) for value in values]), -1, 1)):
        assert drawn.min() >= low - 1e-3
        assert drawn.max() <= high + 1e-3
        width = (high - low) / math.sqrt(12)
        assert abs(drawn.mean() - (low + high) / 2) < 4 * width / math.sqrt(len(drawn))
        assert abs(drawn.std() - width) < 0.05 * width
    counts = np.unique([value["c"] for value in values], return_counts=True)
    assert counts[0].tolist() == ["2", "3", "4"]
    assert (abs(counts[1] - 4000 / 3) < 4 * math.sqrt(4000 * 2 / 9)).all()
    assert {value["d"] for value in values} == {"x", "y"}
    assert build_runs([], texts, 4000, 7) == runs
    assert build_runs([], texts, 4000, 8) != runs
    # More draws only add runs, so that a sweep can be extended.
    assert build_runs([], texts, 10, 7) == runs[:10]


def test_every_combination_has_the_same_draws():
    runs = build_runs(["a=1,2"], ["b=log:1:2"], 3, 0)
    assert [dict(run.overrides)["a"] for run in runs] == ["1", "2"] * 3
    draws = [dict(run.overrides)["b"] for run in runs]
    assert draws[::2] == draws[1::2]
    assert len(set(draws)) == 3


def test_labels_tell_keys_apart():
    run = SweepRun("000", [("a.rate", "1"), ("b.rate", "2"), ("c.width", "3")])
    assert run.label([run]) == "000 a.rate=1, b.rate=2, width=3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], None), "expected --grid KEY=A,B or --random"),
        ((["a"], [], None), "--grid a: expected KEY=A,B"),
        ((["a=1,,2"], [], None), "--grid a=1,,2: expected KEY=A,B"),
        ((["a=1,1"], [], None), "a value is given twice"),
        ((["a=1", "config.a=2"], [], None), "a is given twice"),
        ((["a=1"], [], 3), "--runs requires --random"),
        (([], ["a=log:1:2"], None), "--random requires --runs=N"),
        (([], ["a=log:1:2"], 0), "expected at least 1"),
        (([], ["a=log:0:2"], 1), "expected finite bounds with 0 < LOW < HIGH"),
        (([], ["a=int:2:2"], 1), "expected finite bounds with LOW < HIGH"),
        (([], ["a=normal:0:1"], 1), "expected KEY=log:LOW:HIGH"),
        (([], ["a=int:1.5:2"], 1), "expected KEY=log:LOW:HIGH"),
        (([], ["a=choice:"], 1), "expected KEY=log:LOW:HIGH"),
    ],
)
def test_malformed_flags(arguments: tuple[list[str], list[str], int | None], message: str):
    grid, randoms, num_draws = arguments
    with pytest.raises(cli.UsageError, match=re.escape(message)):
        build_runs(grid, randoms, num_draws, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [f"--grid={RATE[:-1]}=1e-3"],
            "run 000 learning_rat=1e-3: --config.learner.optimizer.learning_rat=1e-3: no such",
        ),
        ([f"--grid={RATE}=1e-3,x"], "run 001 learning_rate=x"),
        (["--grid=trainer.stop.wall_clock=1h,2"], "run 001 wall_clock=2: trainer.stop: .*expected a duration"),
        ([f"--grid={RATE}=1e-3", "--workdir=s3://a/b"], "expected a local folder"),
    ],
)
def test_wrong_settings_start_nothing(
    flags: list[str], message: str, text: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
):
    assert sweep.main([TINY, f"--workdir={tmp_path / 'sweep'}", *flags]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(message, line)
    assert not trained.lines
    assert not (tmp_path / "sweep").exists()


def test_runs_that_do_not_fit_are_refused(
    text: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    plans = [FITS, {**FITS, "fits": False, "verdict": "DOES NOT FIT: 9 GiB of 8 GiB"}]
    monkeypatch.setattr(sweep_plan, "price_runs", lambda command, overrides, limits: plans)
    flags = [TINY, f"--workdir={tmp_path / 'sweep'}", f"--grid={RATE}=0.1", "--grid=data.global_batch_size=4,8"]
    assert sweep.main(flags) == ExitCode.TOO_BIG
    printed = capsys.readouterr().out
    assert "run 001 learning_rate=0.1, global_batch_size=8: DOES NOT FIT: 9 GiB of 8 GiB" in printed
    assert "1 of 2 runs do not fit" in printed
    assert not trained.lines
    assert not (tmp_path / "sweep").exists()
    assert sweep.main([*flags, "--force"]) == 0
    assert len(trained.lines) == 2
    assert all("--force" in words for words in trained.lines)


def test_rates_are_planned_once(text: Path, tmp_path: Path, trained: Trained, monkeypatch, capsys):
    planned = []

    def price(command: object, overrides: dict, limits: dict) -> list:
        planned.append(overrides)
        return [FITS] * len(overrides)

    monkeypatch.setattr(sweep_plan, "price_runs", price)
    flags = [TINY, f"--workdir={tmp_path / 'sweep'}", f"--grid={RATE}=0.1,0.2", "--grid=learner.accumulate=1,2"]
    assert sweep.main([*flags, "--dry_run"]) == 0
    (by_label,) = planned
    first, second = by_label.values()
    assert [dict(first)["learner.accumulate"], dict(second)["learner.accumulate"]] == ["1", "2"]
    # 4 runs of 12 steps of half a second.
    assert "4 runs; the largest fits; about 24.0 s of training steps" in capsys.readouterr().out
    assert not trained.lines
    assert not (tmp_path / "sweep").exists()


def test_runs_may_differ_in_their_image_size(tmp_path: Path, trained: Trained, monkeypatch, capsys):
    """The shape of the model follows the size of the images, as in `plimsoll train`."""
    (tmp_path / "images").mkdir()
    for index in range(40):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 20), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.png")
    data = ["--config=digits-glow", f"--data={tmp_path / 'images'}"]
    assert sweep.main([*data, f"--workdir={tmp_path / 'sweep'}", "--grid=data.image_size=8,16", "--dry_run"]) == 0
    args = argparse.Namespace(data=[str(tmp_path / "images")], data_weights=None)
    overrides = {size: [("data.image_size", size)] for size in ("8", "16")}
    commands = sweep_plan.build_commands(args, "digits-glow", overrides)
    assert [list(command.config.model.image_shape) for command in commands.values()] == [[8, 8, 1], [16, 16, 1]]


def test_failed_runs_do_not_end_a_sweep_and_are_repeated(
    text: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "sweep"
    flags = [TINY, f"--workdir={folder}", f"--grid={RATE}=0.1,0.01,1.0,0.001", "--config.trainer.seed=3"]
    trained.codes |= {0.1: ExitCode.NONFINITE, 1.0: ExitCode.FAILED}
    assert sweep.main(flags) == ExitCode.FAILED
    assert len(trained.lines) == 4
    assert all("--config.trainer.seed=3" in words for words in trained.lines)
    printed = capsys.readouterr().out
    assert "best: 001 learning_rate=0.01: eval/held/loss 0 at step 4" in printed
    assert (folder / "sweep.png").is_file()
    results = json.loads((folder / "results.json").read_text())
    assert results["runs"][3]["metrics"]["eval/held/loss"]["last"] == 1.0
    # Only a failure that may not happen again is repeated; a loss that is not finite would be again.
    trained.lines.clear()
    trained.codes.clear()
    assert sweep.main(flags) == ExitCode.FAILED
    assert [words[1] for words in trained.lines] == [f"--workdir={folder / '002'}"]
    assert "3 of 4 runs have ended and are skipped" in capsys.readouterr().out
    # Another sweep does not mix with this one.
    for other in (f"--grid={RATE}=0.1,0.01,1.0", f"--grid={RATE}=0.1,0.01,1.0,0.002"):
        assert sweep.main([*flags[:2], other, flags[3]]) == 2
        assert "holds a sweep of 4 runs with other settings" in capsys.readouterr().err
    assert sweep.main(flags[:3]) == 2
    assert "holds a sweep of" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[", "{}", '{"config": 1, "flags": [], "runs": [1], "format": 1}', "[" * 99999])
def test_a_damaged_file_is_named(content: str, tmp_path: Path):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ValueError, match=r"sweep\.json cannot be read"):
        Sweep("a", []).resume(tmp_path)


def test_plans_of_runs_are_those_of_plan(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The other process has one device.
    monkeypatch.setenv("XLA_FLAGS", support.xla_flags(1))
    parser = cli.Parser("sweep")
    sweep.add_flags(parser)
    command = parser.parse([TINY, f"--workdir={tmp_path}"])
    limits = {"device_memory_gib": 0.002, "host_memory_gib": None}
    overrides = {size: [("data.global_batch_size", size)] for size in ("4", "8")}
    plans = sweep_plan.price_runs(command, overrides, limits)
    for plan, size in zip(plans, overrides, strict=True):
        config = pl.load_config(f"{support.CONFIG}:tiny", {"data.global_batch_size": size})
        expected = pl.plan(config, "cpu:1", estimate=True, device_memory_gib=0.002)
        assert plan["bytes"] == expected.peak_bytes
        assert plan["fits"] == expected.fits
    assert [plan["fits"] for plan in plans] == [True, False]
    with pytest.raises(ValueError, match=r"run mine: mesh"):
        sweep_plan.price_runs(command, {"mine": [("mesh.model", "3")]}, limits)


@pytest.mark.pairs
def test_a_killed_sweep_continues(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def start(folder: Path) -> subprocess.Popen:
        words = [sys.executable, "-m", "plimsoll", "sweep", TINY, f"--workdir={folder}", f"--grid={RATE}=0.001,0.002"]
        # Enough steps after the 25th for the signal to arrive.
        words += [*support.LONG, "--config.trainer.max_steps=300"]
        environment = {**os.environ, "XLA_FLAGS": support.xla_flags(1), "JAX_PLATFORMS": "cpu"}
        environment["PYTHONPATH"] = str(support.ROOT)
        with open(f"{folder}.out", "ab") as out:
            return subprocess.Popen(words, cwd=support.ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def reaches(folder: Path, run: str, step: int) -> Callable[[], bool]:
        return lambda: max(support.losses(folder / run), default=0) >= step

    whole = tmp_path / "whole"
    assert start(whole).wait(timeout=300) == 0, support.output(whole)
    broken = tmp_path / "broken"
    process = start(broken)
    support.wait_for(reaches(broken, "000", 25))
    process.kill()
    process.wait()
    # The run ends with the sweep, and SIGTERM to the next start saves.
    process = start(broken)
    support.wait_for(reaches(broken, "001", 1))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143, support.output(broken)
    assert start(broken).wait(timeout=300) == 0, support.output(broken)
    for run in ("000", "001"):
        assert support.losses(broken / run) == support.losses(whole / run)
    log = (broken / "000.log").read_text()
    # Which step depends on how far the run came before the signal arrived.
    assert re.search(r"resumed from step [1-9]", log)
    assert "1 of 2 runs have ended and are skipped" in support.output(broken)
