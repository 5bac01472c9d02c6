"""Training data of fewer rows than a batch: the batch shrinks, with a line."""

import json
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from plimsoll.framework.program.small_data import fit_batch_to_data
from tests.support.runs import losses, output, pair, rows, train
from tests.support.tiny import tiny

AXES = ("data", "fsdp", "expert", "seq", "model", "pipe")


@pytest.fixture
def little(text: Path) -> Path:
    """Text of 20 rows of 32 tokens."""
    (text / "train.txt").write_text((text / "train.txt").read_text()[:660])
    return text


@pytest.mark.parametrize(
    ("num_rows", "batch", "accumulate", "shards", "expected"),
    [
        (8, 8, 1, 1, (8, 1)),
        (9, 8, 1, 1, (8, 1)),
        (7, 8, 1, 1, (7, 1)),
        (1, 8, 1, 1, (1, 1)),
        (7, 8, 1, 2, (6, 1)),
        (7, 8, 2, 2, (4, 2)),
        # Fewer microbatches, none larger than the former ones.
        (3, 16, 4, 2, (2, 1)),
        (5, 16, 4, 2, (4, 2)),
        (63, 64, 4, 1, (60, 4)),
        (6, 14, 7, 1, (2, 1)),
    ],
)
def test_the_largest_batch_that_shards_and_microbatches_divide(
    num_rows: int, batch: int, accumulate: int, shards: int, expected: tuple[int, int]
):
    config = tiny()
    config.data.global_batch_size = batch
    config.learner.accumulate = accumulate
    experiment = config.instantiate()
    experiment.data._num_rows = num_rows
    mesh = AbstractMesh((1, shards, 1, 1, 1, 1), AXES)
    lines = fit_batch_to_data(config, experiment, mesh)
    found = (config.data.global_batch_size, config.learner.accumulate)
    assert found == expected
    assert experiment.data.global_batch_size == expected[0]
    assert len(lines) == (expected[0] != batch) + (expected[1] != accumulate)
    # The new settings fit together, and no microbatch has grown.
    config.instantiate().check(mesh)
    assert found[0] // found[1] <= batch // accumulate


def test_fewer_rows_than_shards_are_an_error():
    config = tiny()
    experiment = config.instantiate()
    experiment.data._num_rows = 3
    with pytest.raises(ValueError, match=r"has 3 rows of data.seq_len=32, too few for one batch: .* = 4 needs 4"):
        fit_batch_to_data(config, experiment, AbstractMesh((2, 2, 1, 1, 1, 1), AXES))


LARGE = "--config.data.global_batch_size=24"


def test_a_run_on_little_text_equals_one_of_that_batch(
    little: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    epochs = ("--config.trainer.max_steps=none", "--config.trainer.max_epochs=4", "--config.trainer.save_every=2")
    small = tmp_path / "small"
    # The mesh has 8 shards of a batch.
    assert train(small, LARGE, *epochs) == 0
    line = "data.global_batch_size 24 -> 16: the training data has 20 rows of data.seq_len = 32, and a batch is a"
    assert f"{line} multiple of 8" in capsys.readouterr().out
    assert json.loads((small / "config.json").read_text())["data"]["global_batch_size"] == 16
    assert train(tmp_path / "same", *epochs, "--config.data.global_batch_size=16") == 0
    assert "data.global_batch_size 24" not in capsys.readouterr().out
    assert losses(small) == losses(tmp_path / "same")
    assert list(losses(small)) == [1, 2, 3, 4, 5]
    assert rows(small)[-1]["epoch"] == 4.0
    # The same command again finds a finished run, and a longer one resumes it.
    assert train(small, LARGE, *epochs) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert train(small, LARGE, *epochs, "--config.trainer.max_epochs=6") == 0
    printed = capsys.readouterr().out
    assert "resumed from step 5" in printed
    assert "the data order continues" not in printed
    assert list(losses(small)) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.pairs
def test_two_processes_agree_on_the_batch(little: Path, tmp_path: Path):
    processes = pair(tmp_path / "run", LARGE, "--config.trainer.max_steps=3")
    assert [process.wait(timeout=300) for process in processes] == [0, 0], output(tmp_path / "run")
    assert "data.global_batch_size 24 -> 20: the training data has 20 rows" in output(tmp_path / "run")
