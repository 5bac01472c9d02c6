"""Files and checkpoints of runs that end in the middle of an evaluation, a save or an error."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.run import hooks
from plimsoll.framework.run.run import Run
from tests.support.runs import CONFIG, losses, rows, train

STEPS = ("--config.trainer.max_steps=4", "--config.trainer.save_every=2", "--config.trainer.eval_every=2")


def evaluations(workdir: Path) -> dict[int, list[float]]:
    """Return the losses of each evaluation in metrics.jsonl, by step."""
    found: dict[int, list[float]] = {}
    for row in rows(workdir):
        losses_of_row = [value for name, value in row.items() if name.startswith("eval/") and name.endswith("/loss")]
        if losses_of_row:
            found.setdefault(row["step"], []).extend(losses_of_row)
    return found


@pytest.fixture
def expected_evaluations(text: Path, tmp_path: Path) -> dict[int, list[float]]:
    """The evaluations of an uninterrupted run."""
    assert train(tmp_path / "undisturbed", *STEPS) == 0
    found = evaluations(tmp_path / "undisturbed")
    assert list(found) == [2, 4]
    return found


@pytest.mark.pairs
def test_a_kill_after_the_last_save_repeats_no_evaluation(
    expected_evaluations: dict[int, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(run: Run, step: int) -> bool:
        run.checkpointer.wait()
        raise RuntimeError("killed")

    with monkeypatch.context() as dying:
        dying.setattr(Run, "wait_until_saved", die)
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path / "run", *STEPS)
    assert evaluations(tmp_path / "run") == expected_evaluations
    assert train(tmp_path / "run", *STEPS) == 0
    assert evaluations(tmp_path / "run") == expected_evaluations


@pytest.mark.pairs
def test_an_evaluation_that_a_signal_interrupts_is_made_up_for(
    expected_evaluations: dict[int, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = hooks.evaluate_set

    def interrupt(*arguments: Any, should_continue: Callable[[], bool], **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluated(*arguments, should_continue=should_continue, **options)

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "evaluate_set", interrupt)
        assert train(tmp_path / "run", *STEPS) == 143
    assert evaluations(tmp_path / "run") == {}
    assert train(tmp_path / "run", *STEPS) == 0
    assert evaluations(tmp_path / "run") == expected_evaluations


@pytest.mark.pairs
def test_a_run_whose_saves_all_failed_starts_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The disk is full before the first checkpoint, but has room for rows of metrics."""
    usage = shutil.disk_usage
    flags = ("--config.trainer.max_steps=6", "--config.trainer.save_every=1")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=0))
        assert train(tmp_path / "run", *flags) == 1
    assert "NOT SAVED at step 6" in capsys.readouterr().out
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert train(tmp_path / "run", *flags) == 0
    assert "the previous run here ended at step 6, before its first checkpoint" in capsys.readouterr().out
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


OWN_HOOK = """
from pathlib import Path
from plimsoll.framework.config import config_for
from plimsoll.framework.run.hooks import Hook
from tests.support.tiny import tiny

class Fails(Hook):
    def after_step(self, run, step):
        if step == 3 and not Path("repaired").exists():
            raise KeyError("no such shelf")

def failing():
    config = tiny()
    config.trainer.hooks = [config_for(Fails)]
    return config
"""


@pytest.mark.pairs
def test_user_code_error_ends_the_run_after_a_save(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_HOOK)
    flags = ("--config.trainer.max_steps=4", "--config.trainer.save_every=100")
    with pytest.raises(KeyError, match="no such shelf"):
        train("run", *flags, file="mine.py", config="failing")
    assert "step 3 was saved; fix the error below" in capsys.readouterr().out
    Path("repaired").touch()
    assert train("run", *flags, file="mine.py", config="failing") == 0
    assert "resumed from step 3" in capsys.readouterr().out
    assert list(losses(Path("run"))) == [1, 2, 3, 4]
    assert train("whole", *flags, file=CONFIG) == 0
    assert losses(Path("run")) == losses(Path("whole"))
