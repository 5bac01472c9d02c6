"""Resuming: settings that may change (batch size, rates, logging), and changes that are refused before compiling."""

import json
from pathlib import Path

import optax
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.data.order import BatchOrder
from plimsoll.framework.data.stages import DataStage
from plimsoll.framework.run import resuming
from tests.support.runs import losses, train
from tests.support.tiny import tiny

SAVED = "00000004"
RATE = "--config.learner.optimizer.learning_rate"


def position(workdir: Path, step: str) -> dict:
    """Return the data position stored in the checkpoint of a step."""
    manifest = json.loads((workdir / "checkpoints" / step / "manifest" / "data.json").read_text())
    return manifest["extra"]["data"]


@pytest.mark.pairs
def test_resuming_allows_only_permitted_config_changes(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "run"
    schedule = '{"$class": "optax.linear_schedule", "init_value": 0.01, "end_value": 0.001, "transition_steps": 4}'
    assert train(saved, "--config.trainer.max_steps=4", f"{RATE}={schedule}") == 0
    assert position(saved, SAVED)["sequences"] == 32
    capsys.readouterr()
    with monkeypatch.context() as patch:
        # These are refused before anything is compiled.
        patch.setattr("plimsoll.framework.run.offload_self_test.check", pytest.fail)
        patch.setattr("plimsoll.framework.plan.memory_budget.measure_need", pytest.fail)
        for flags, message in {
            (
                "--config.model.stack.num_layers=4",
            ): f"{saved} belongs to another model: config.model.stack.num_layers: 2 -> 4; config.",
            ("--config.data.seed=4",): "config.data.seed: 3 -> 4. Batches would not continue",
            ("--config.data.document_mask=true",): "config.data.document_mask: false -> true",
        }.items():
            assert train(saved, *flags) == 2
            error = capsys.readouterr().err
            assert message in error
            assert "another --workdir" in error
        written = (text / "train.txt").read_text()
        (text / "train.txt").write_text(written + "and one line more than there was before\n" * 20)
        assert train(saved) == 2
        error = capsys.readouterr().err
        assert "config.data.source: same name, different content; an epoch: " in error
        assert "--force continues anyway" in error
        (text / "train.txt").write_text(written)
    changed = ("--config.data.global_batch_size=16", "--config.learner.accumulate=2", "--config.trainer.log_every=2")
    assert train(saved, *changed, f"{RATE}=1e-3", "--config.trainer.max_steps=6") == 0
    printed = capsys.readouterr().out
    assert "global batch 8 -> 16: the data order continues at sequence 32, not at step 4" in printed
    # A plain number has no slot for the step count of the schedule that it replaces.
    assert "config.learner.optimizer.learning_rate: 0.001 from now on, as a constant schedule" in printed
    rate = config_for(optax.constant_schedule, value=0.001)
    stored_config = json.loads((saved / "config.json").read_text())
    assert stored_config["learner"]["optimizer"]["learning_rate"] == rate.to_dict()
    assert list(losses(saved)) == [1, 2, 3, 4, 6]
    stored = position(saved, "00000006")
    assert (stored["sequences"], stored["next"], stored["origin"]) == (64, 6, -32)


def test_errors_for_another_model_and_other_data_are_one_short_line(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture
) -> None:
    bpe = ("--config.data.tokenizer=BPETokenizer", "--config.model.vocab_size=300", "--config.trainer.max_steps=1")
    size = "--config.data.tokenizer.vocab_size"
    saved = tmp_path / "run"
    assert train(saved, *bpe, f"{size}=270") == 0
    capsys.readouterr()
    other = ("dim=16", "stack.num_layers=3", "embed.max_positions=64", "vocab_size=310", "param_dtype=bfloat16")
    assert train(saved, *bpe, f"{size}=270", *(f"--config.model.{field}" for field in other)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {saved} belongs to another model: config.model.")
    assert line.count(" -> ") == 3
    assert "; and 2 more fields; choose another --workdir" in line
    # With the same source, the tokenizer in the workdir is compared with its setting.
    assert train(saved, *bpe, f"{size}=280") == 2
    assert "has 270 ids, but data.tokenizer.vocab_size is 280" in capsys.readouterr().err
    source = f'--config.data.source.paths=["{text}/valid.txt"]'
    for steps in (1, 2):
        assert train(saved, *bpe, f"{size}=280", source, f"--config.trainer.max_steps={steps}") == 2
        error = capsys.readouterr().err
        assert f"the run in {saved} trained on other data: config.data.source.paths" in error
        assert "choose another --workdir (its tokenizer has 270 ids, and this data needs 280)" in error


def test_old_checkpoints_read_their_batch_size_from_the_config() -> None:
    data = tiny().data.copy()
    data.global_batch_size = 4
    older = {"config": {"data": {"global_batch_size": 8}}, "data": {"next": 10, "fingerprint": "x", "offset": 0}}
    built = data.instantiate()
    assert resuming.order_after(older, 10, built) == BatchOrder(origin=40)
    (line,) = resuming.batch_lines(older, 10, built)
    assert line == "global batch 8 -> 4: the data order continues at sequence 80, not at step 10"


@pytest.mark.parametrize(
    ("left_out", "new_size", "message"),
    [
        ((6,), 2, None),  # batches 9 to 12 of size 2, before the stage
        ((2, 6), 8, None),
        ((21,), 4, "a rollback left out batch 21, and with another size the stage from step 20 on would read"),
        # 64 to 71 are in the first stage with 8 sequences a batch, and no longer with 2.
        ((8,), 1, "a rollback left out batch 8"),
        ((21,), 8, None),  # the same size
    ],
)
def test_another_batch_size_does_not_move_a_left_out_batch_into_a_later_stage(
    left_out: tuple[int, ...], new_size: int, message: str | None
) -> None:
    data = tiny().data.copy()
    data.global_batch_size = new_size
    data.stages = {"20": config_for(DataStage, global_batch_size=16)}
    extra = {"data": {**BatchOrder(left_out).to_json(), "batch_size": 8, "next": 5}}
    if message is not None:
        with pytest.raises(ValueError, match=message):
            resuming.order_after(extra, 5, data.instantiate())
        return
    order = resuming.order_after(extra, 5, data.instantiate())
    assert order == BatchOrder(left_out).with_batch_size(5, 8, new_size)
