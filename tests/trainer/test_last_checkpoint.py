"""A finished run that is started again reports this before any work starts, and changes no file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.config.accelerator_rules import apply_accelerator_rules
from plimsoll.framework.program.experiment import AcceleratorRule
from plimsoll.framework.run import start as run_start
from plimsoll.framework.run.last_checkpoint import LastCheckpoint
from plimsoll.framework.run.run import Run
from tests.support.runs import rows, train, write_text
from tests.support.tiny import tiny


class Killed(NamedTuple):
    """Files left by a run that was killed after its last save."""

    rows: list[dict]
    checkpoints: dict[str, tuple[int, bytes]]


FLAGS = ("--config.trainer.max_steps=4", "--config.trainer.save_every=2")


@pytest.fixture(scope="module")
def restarted_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Killed]]:
    """(workdir of a four-step run that finished in its second start, the files that the first start left)."""
    root = tmp_path_factory.mktemp("finished")
    saved = Run.save

    def die(run: Run, step: int) -> None:
        saved(run, step)
        if step == 4:
            run.checkpointer.wait()
            raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TEXT", "")
        write_text(root / "text")
        with patch.context() as dying:
            dying.setattr(Run, "save", die)
            with pytest.raises(RuntimeError, match="killed"):
                train(root / "run", *FLAGS)
        left = Killed(rows(root / "run"), files(root / "run" / "checkpoints"))
        assert train(root / "run", *FLAGS) == 0
        yield root / "run", left


@pytest.fixture
def final_workdir(restarted_run: tuple[Path, Killed]) -> Path:
    """The workdir of a finished run of four steps."""
    return restarted_run[0]


def files(workdir: Path) -> dict[str, tuple[int, bytes]]:
    """Return (modification time, content) of every file, by relative path."""
    return {
        str(path.relative_to(workdir)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(workdir.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if the command gets as far as the code that compiles and trains."""

    def start(*_: Any) -> int:
        raise AssertionError("the run was started")

    monkeypatch.setattr(run_start, "_train_and_record", start)


@pytest.mark.pairs
@pytest.mark.parametrize("steps", [4, 3, 1])
@pytest.mark.parametrize("resume", ["auto", "must"])
def test_finished_run_is_reported_and_writes_nothing(
    final_workdir: Path, never_starts: None, steps: int, resume: str, capsys: pytest.CaptureFixture
):
    before = files(final_workdir)
    flags = [f"--config.trainer.max_steps={steps}", "--config.trainer.save_every=2", f"--resume={resume}"]
    assert train(final_workdir, *flags) == 0
    *changes, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"step 4 of {steps}: nothing to do ({final_workdir}/checkpoints; ")
    wanted = [f"config changed since the checkpoint: config.trainer.max_steps: 4 -> {steps}"]
    assert changes == (wanted if steps != 4 else [])
    assert files(final_workdir) == before


@pytest.mark.pairs
def test_other_config_changes_are_reported(final_workdir: Path, never_starts: None, capsys: pytest.CaptureFixture):
    assert (
        train(final_workdir, "--config.trainer.max_steps=4", "--config.trainer.save_every=2", "--config.data.seed=5")
        == 0
    )
    assert "config changed since the checkpoint: config.data.seed: 3 -> 5" in capsys.readouterr().out


def test_the_changes_of_accelerator_rules_are_not_reported():
    """The stored config has the changes of the rule that the run applied; the config of the command line has not."""
    config = tiny()
    config.accelerator_rules = [
        config_for(AcceleratorRule, pattern="v5e-*", set={"memory.remat": "full", "learner.accumulate": 4}),
        config_for(AcceleratorRule, pattern="cpu-*", set={"learner.accumulate": 2, "data.seed": 9}),
    ]
    stored = config.copy()
    apply_accelerator_rules(stored, "cpu-1")
    last = LastCheckpoint("checkpoints", 4, stored.to_dict(), {}, complete=True)
    assert len(last.lines(config.trainer.max_steps, config)) == 1
    assert len(last.lines(config.trainer.max_steps, stored)) == 1
    # The command line takes precedence over rules.
    config.learner.accumulate = 1
    change, _ = last.lines(config.trainer.max_steps, config, ["learner.accumulate"])
    assert change.endswith("config.learner.accumulate: 2 -> 1")


@pytest.mark.parametrize("steps", [4, 2])
@pytest.mark.parametrize("change", ["model", "data"])
def test_finished_run_of_another_model_or_other_data_is_refused(
    final_workdir: Path,
    change: str,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    before = files(final_workdir)
    flags = [f"--config.trainer.max_steps={steps}", "--config.trainer.save_every=2"]
    if change == "model":
        flags.append("--config.model.stack.num_layers=4")
        message = f"{final_workdir} belongs to another model: config.model.stack.num_layers: 2 -> 4; "
    else:
        monkeypatch.setenv("TINY_TEXT", "")
        text = write_text(tmp_path / "other")
        (text / "train.txt").write_text("other text " * 800)
        message = "the data differs from the checkpoint's"
    assert train(final_workdir, *flags) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "another --workdir" in printed.err
    assert "nothing to do" not in printed.out
    assert "config changed since" not in printed.out
    assert files(final_workdir) == before


@pytest.mark.parametrize("change", ["path", "chunk_tokens"])
def test_changes_that_fit_a_finished_run_are_not_refused(
    final_workdir: Path, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Test the same text in another folder, and a field of the model that does not change its weights."""
    before = files(final_workdir / "checkpoints")
    if change == "path":
        monkeypatch.setenv("TINY_TEXT", "")
        write_text(tmp_path / "copy")
        flags = []
    else:
        flags = ["--config.model.head.chunk_tokens=16"]
    assert train(final_workdir, *FLAGS, *flags) == 0
    assert "step 4 of 4: nothing to do" in capsys.readouterr().out
    assert files(final_workdir / "checkpoints") == before


@pytest.mark.pairs
def test_never_resuming_is_refused_before_anything_starts(
    final_workdir: Path, never_starts: None, capsys: pytest.CaptureFixture
):
    before = files(final_workdir)
    assert train(final_workdir, "--config.trainer.max_steps=4", "--resume=never") == 2
    assert "--resume=never, but " in (message := capsys.readouterr().err)
    assert "holds checkpoints up to step 4" in message
    assert files(final_workdir) == before


@pytest.mark.pairs
def test_a_dry_run_and_a_longer_one_start(final_workdir: Path, never_starts: None):
    for flags in (["--config.trainer.max_steps=4", "--dry_run"], ["--config.trainer.max_steps=5"]):
        with pytest.raises(AssertionError, match="the run was started"):
            train(final_workdir, *flags)


@pytest.mark.pairs
def test_a_run_killed_after_its_last_save_is_evaluated_and_not_saved_again(restarted_run: tuple[Path, Killed]):
    workdir, left = restarted_run
    assert max(row["step"] for row in left.rows) == 4
    assert not any("eval/held/loss" in row for row in left.rows)
    assert "resumed from step 4" in (workdir / "log.txt").read_text()
    assert [row["step"] for row in rows(workdir) if "eval/held/loss" in row] == [4]
    assert files(workdir / "checkpoints") == left.checkpoints
    assert json.loads((workdir / "health" / "process-00000.json").read_text())["exit"] == 0
