"""`learner.nonfinite=rollback` leaves out exactly the batches that were not finite.

The reference is a run that never had those batches: its pipeline skips them by itself.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.framework.data.order import BatchOrder
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.program.program import Program
from plimsoll.framework.run.hooks import Hook
from plimsoll.framework.run.run import Run
from plimsoll.framework.run.trainer import Trainer
from tests.support.runs import losses, train, write_text
from tests.support.tiny import POISON

ROLL_BACK = "--config.learner.nonfinite=rollback"
STEPS = 12  # with a checkpoint every 4 steps
make_batch = DataPipeline.train_batch


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text for the runs; $TINY_TEXT is restored afterwards."""
    monkeypatch.setenv("TINY_TEXT", "")
    write_text(tmp_path / "text")


@pytest.fixture
def batch_by_step(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The index of the batch that each step was last trained on, recorded from what the program receives."""
    by_step: dict[int, int] = {}
    given: list[int] = []
    put, begin = Program.put, Trainer.__init__

    class Recorder(Hook):
        def after_step(self, run: Run, step: int) -> None:
            by_step[step] = given[-1]

    def record(self: Program, batch: dict[str, Any]) -> Any:
        clean = np.where(batch["tokens"] == POISON, 0, batch["tokens"])
        same = (
            i for i in range(30) if np.array_equal(make_batch(data[0], i, self.rows)["tokens"][:, 1:], clean[:, 1:])
        )
        given.append(next(same, -1))
        return put(self, batch)

    data: list[DataPipeline] = []

    def start(self: Trainer, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        assert isinstance(self.run.data, DataPipeline)
        data[:] = [self.run.data]
        self.hooks.append(Recorder())

    monkeypatch.setattr(Program, "put", record)
    monkeypatch.setattr(Trainer, "__init__", start)
    return by_step


def poison(monkeypatch: pytest.MonkeyPatch, *bad: int) -> None:
    """From now on, make the loss of the batches with these indices NaN."""

    def train_batch(self: DataPipeline, index: int, rows: Any, origin: int = 0) -> dict[str, np.ndarray]:
        batch = make_batch(self, index, rows, origin)
        if index in bad:
            batch["tokens"][:, 0] = POISON
        return batch

    monkeypatch.setattr(DataPipeline, "train_batch", train_batch)


def leaves(workdir: Path) -> dict[str, Any]:
    """Return shape, dtype and checksum of every array in the last checkpoint."""
    return json.loads((workdir / "checkpoints" / f"{STEPS:08d}" / "manifest" / "data.json").read_text())["leaves"]


def check_never_had(workdir: Path, bad: set[int], monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Check that a run has, bit for bit, the losses and arrays of one whose data never had these batches."""
    batches = [index for index in range(30) if index not in bad]

    def train_batch(self: DataPipeline, index: int, rows: Any, origin: int = 0) -> dict[str, np.ndarray]:
        return make_batch(self, batches[index], rows, origin)

    with monkeypatch.context() as patch:
        patch.setattr(DataPipeline, "train_batch", train_batch)
        reference = workdir.with_name(f"{workdir.name}-reference")
        assert train(reference, *flags) == 0
    assert losses(workdir) == losses(reference)
    assert leaves(workdir) == leaves(reference)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("bad", "flags"),
    [
        ({6}, ()),
        ({5, 6, 10}, ()),  # two in a row, and one that is found after a later checkpoint
        ({0, 2, 6}, ()),  # before the first checkpoint, and after it
        ({9}, ("--config.learner.accumulate=2", "--config.data.global_batch_size=16")),
        ({11}, ()),  # in the last step
    ],
)
def test_rollback_skips_only_nonfinite_batches(
    tmp_path: Path, monkeypatch, batch_by_step: dict[int, int], capsys, bad: set[int], flags: tuple[str, ...]
) -> None:
    poison(monkeypatch, *bad)
    assert train(tmp_path / "run", ROLL_BACK, *flags) == 0
    out = capsys.readouterr().out
    assert all(f"batch {index} is left out" in out for index in bad)
    good = [index for index in range(30) if index not in bad]
    assert batch_by_step == dict(zip(range(1, STEPS + 1), good, strict=False))
    check_never_had(tmp_path / "run", bad, monkeypatch, *flags)


@pytest.mark.pairs
def test_resumed_run_skips_the_same_batches(tmp_path: Path, monkeypatch, batch_by_step: dict[int, int], capsys) -> None:
    poison(monkeypatch, 2, 6)
    assert train(tmp_path / "run", ROLL_BACK, "--config.trainer.max_steps=8") == 0
    assert "rolled back to step 4; batch 6 is left out, and the 1 batches before it" in capsys.readouterr().out
    assert train(tmp_path / "run", ROLL_BACK) == 0
    assert [batch_by_step[step] for step in range(1, STEPS + 1)] == [0, 1, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13]
    assert "rolled back" not in capsys.readouterr().out, "what was left out before is not tried again"
    check_never_had(tmp_path / "run", {2, 6}, monkeypatch)


@pytest.mark.pairs
def test_nested_rollbacks_skip_both_batches(tmp_path: Path, monkeypatch, batch_by_step: dict[int, int]) -> None:
    """The newest checkpoint is lost in between, so the second rollback restores one that does not record the first."""
    poison(monkeypatch, 6, 10)
    roll_back = Trainer._roll_back
    calls: list[int] = []

    def lose_newest(self: Trainer, bad_step: int) -> int:
        calls.append(bad_step)
        self.run.wait_until_saved(bad_step)
        if len(calls) == 2:
            shutil.rmtree(Path(self.run.workdir.checkpoints) / "00000008" / "manifest")
        return roll_back(self, bad_step)

    monkeypatch.setattr(Trainer, "_roll_back", lose_newest)
    assert train(tmp_path / "run", ROLL_BACK) == 0
    assert calls == [7, 10], "each is found once"
    assert [batch_by_step[step] for step in range(1, STEPS + 1)] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13]
    check_never_had(tmp_path / "run", {6, 10}, monkeypatch)


def test_batches_come_in_order_except_skipped_ones() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        bad = tuple(int(i) for i in generator.choice(40, generator.integers(0, 12), replace=False))
        order = BatchOrder().without(*bad)
        good = [index for index in range(80) if index not in bad]
        assert [order.batch_after(step) for step in range(60)] == good[:60]
        assert BatchOrder.from_json(json.loads(json.dumps(order.to_json()))) == order


def test_data_position_from_an_older_version_is_kept() -> None:
    """Earlier versions stored how far rollbacks had shifted all batches: at step 20, batches 20 to 22 were left out."""
    order = BatchOrder.from_json({"fingerprint": "...", "next": 23, "offset": 3})
    assert [order.batch_after(step) for step in (20, 21)] == [23, 24]
    assert [order.without(24).batch_after(step) for step in (20, 21, 22)] == [23, 25, 26]
