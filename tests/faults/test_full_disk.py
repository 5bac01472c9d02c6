"""Runs on a full disk: training continues, and anything that cannot continue reports it in one line.

The file size limit (RLIMIT_FSIZE) stands in for the disk: the kernel refuses writes beyond it.
"""

import importlib
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.metrics import retrying
from plimsoll.framework.run.hooks import Hook
from plimsoll.framework.run.run import Run
from plimsoll.framework.run.trainer import Trainer
from tests.support.runs import CONFIG, losses, train

ALONE = "--config.trainer.compilation_cache=None"  # no cache: JAX reports errors of its own files itself
LAST_SAVE = "--config.trainer.save_every=12"
ROOM = 1200  # maximum bytes of a file; metrics.jsonl and log.txt have more after a few steps


def set_limit(limit: int) -> None:
    """Limit the size of every file to `limit` bytes; -1 removes the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


@contextmanager
def full_disk(limit: int = ROOM) -> Iterator[None]:
    """Simulate a full disk: no file grows beyond `limit` bytes."""
    set_limit(limit)
    try:
        yield
    finally:
        set_limit(-1)


class Disk(Hook):
    """Fills the disk after one step and frees it after another; None: never frees it."""

    def __init__(self, full: int, room: int | None):
        self.full, self.room = full, room

    def after_step(self, run: Run, step: int) -> None:
        if step in (self.full, self.room):
            run.checkpointer.wait()  # a save in progress would fail in another way, which tests/checkpoint covers
            set_limit(ROOM if step == self.full else -1)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Retry rows immediately, report a full disk while there is a limit, and remove the limit afterwards."""
    usage = shutil.disk_usage

    def disk_usage(path: str) -> Any:
        is_full = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != -1
        return usage(path)._replace(free=0) if is_full else usage(path)

    monkeypatch.setattr(retrying, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with full_disk(-1):
        yield monkeypatch


def fills(disk: pytest.MonkeyPatch, full: int, room: int | None) -> None:
    """From now on, fill a run's disk after step `full`, until step `room`."""
    begin = Trainer.__init__

    def start(self: Trainer, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.hooks.append(Disk(full, room))

    disk.setattr(Trainer, "__init__", start)


@pytest.mark.pairs
def test_training_continues_and_no_row_is_lost(text: Path, tmp_path: Path, disk, capsys) -> None:
    with disk.context() as patch:
        fills(patch, 3, 9)
        assert train(tmp_path / "run", LAST_SAVE, ALONE) == 0
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl cannot be written: File too large. Training continues") == 1
    assert out.count("metrics.jsonl is written again, with the") == 1
    assert "none was lost" in out
    assert out.count("log.txt cannot be written") == 1
    assert list(losses(tmp_path / "run")) == list(range(1, 13))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "lines are missing: the disk was full)" in log
    assert "step 12/12" in log
    assert train(tmp_path / "other", LAST_SAVE, ALONE) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


@pytest.mark.pairs
def test_full_disk_reports_the_lost_data(text: Path, tmp_path: Path, disk, capsys) -> None:
    with disk.context() as patch:
        fills(patch, 10, None)
        assert train(tmp_path / "run", ALONE) == 1, "its last step is not on disk"
    set_limit(-1)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert "metrics.jsonl: " in captured.out
    assert "rows were lost, of steps" in captured.out
    assert "NOT SAVED at step 12" in captured.out
    written = list(losses(tmp_path / "run"))
    assert written == list(range(1, len(written) + 1)), "no half row, and none out of order"
    assert len(written) < 12
    # Once the disk has room again, the same command resumes.
    assert train(tmp_path / "run", ALONE) == 0
    assert "resumed from step 8" in capsys.readouterr().out
    assert list(losses(tmp_path / "run")) == list(range(1, 13))


@pytest.mark.pairs
def test_a_restart_on_a_full_disk_trains(text: Path, tmp_path: Path, disk, capsys) -> None:
    assert train(tmp_path / "run", ALONE, "--config.trainer.max_steps=8") == 0
    undisturbed = losses(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("00000008"):
        path.rename(path.with_name("mine"))
    size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    capsys.readouterr()
    with full_disk(size // 2):
        assert train(tmp_path / "run", ALONE, "--config.trainer.max_steps=8") == 1
    out = capsys.readouterr().out
    assert "resumed from step 4" in out
    assert "NOT SAVED at step 8" in out
    assert {step: loss for step, loss in undisturbed.items() if step <= 4} == losses(tmp_path / "run")


@pytest.mark.pairs
def test_tokenizing_on_a_full_disk_is_a_one_line_error(text: Path, tmp_path: Path, disk, capsys) -> None:
    with full_disk():
        assert train(tmp_path / "run", ALONE) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: data.source: File too large: ")
    assert "tokens.bin" in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "run").glob("data/*tokens*")), "no half of a token file is left"


@pytest.mark.pairs
@pytest.mark.parametrize("verb", ["plan", "prepare"])
def test_verbs_name_the_file_in_one_line(text: Path, tmp_path: Path, disk, capsys, verb: str) -> None:
    out = tmp_path / "out"
    flags = {"plan": [f"--html={out}", "--target=cpu-1", "--estimate"], "prepare": [f"--out={out}"]}[verb]
    with full_disk(100):
        assert importlib.import_module(f"plimsoll.launch.{verb}").main([f"--config={CONFIG}:tiny", *flags]) == 1
    error = capsys.readouterr().err
    assert "File too large" in error
    assert "out" in error
    assert "Traceback" not in error
