"""Runs whose data changes at a step (weights, sequence length, batch size): across kills, and in every kind of step."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.api.loaded import _load_run_config
from plimsoll.configs import load
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.config import config_for
from plimsoll.framework.data.order import BatchOrder
from plimsoll.framework.data.stages import DataStage
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.stages import build_stage_programs, with_largest_stage
from plimsoll.launch import plan
from plimsoll.launch.cli import Parser
from tests.support.runs import CONFIG, losses, output, pair, rows, start, train
from tests.support.tiny import tiny

FAULTS = str(Path(__file__).parents[1] / "faults" / "fault_injection.py")


@pytest.fixture
def flags(text: Path) -> list[str]:
    """Two texts; the weights change after 3 steps, and sequences of 16 tokens become 32 after 7."""
    (text / "other.txt").write_text((text / "train.txt").read_text().upper())
    return [
        f"--data={text}/train.txt",
        f"--data={text}/other.txt",
        "--data_weights=3,1",
        "--config.data.seq_len=16",
        "--config.data.global_batch_size=16",
        "--data_at=3:weights=1,3",
        "--data_at=7:seq_len=32",
        "--config.trainer.max_steps=11",
        "--config.trainer.log_every=1",
        "--config.trainer.save_every=2",
        "--config.trainer.eval_every=5",
    ]


def read_state(workdir: Path) -> dict[str, np.ndarray]:
    """Return all arrays of the last checkpoint."""
    config = tiny()
    config.data.seq_len = 16
    config.data.global_batch_size = 16
    program = Program(config.instantiate(), jax.devices()[:1])
    found = Checkpointer(directory=workdir / "checkpoints", read_only=True).restore_latest(
        program.backend.abstract_checkpoint
    )
    assert found.step == 11
    return {str(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(found.state)}


def test_a_run_killed_in_each_stage_equals_one_that_was_not(flags: list[str], tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, *flags).wait(300) == 0, output(whole)
    # After step 6 the newest checkpoint is that of step 6; after 8, of the second length.
    for step in (2, 6, 8):
        process = start(killed, *flags, program=(FAULTS, "kill", str(step)))
        assert process.wait(300) == -signal.SIGKILL, output(killed)
    assert start(killed, *flags).wait(300) == 0, output(killed)
    assert "resumed from step" in output(killed)
    assert losses(killed) == losses(whole)
    assert set(losses(whole)) == set(range(1, 12))
    expected, found = read_state(whole), read_state(killed)
    assert expected.keys() == found.keys()
    for path, array in expected.items():
        assert np.array_equal(array, found[path]), path
    tokens = {row["step"]: row["tokens"] for row in rows(whole) if "train/loss" in row}
    assert tokens == {step: step * 256 for step in range(1, 12)}
    text = output(whole)
    assert "step 3: the stage from step 3 on (16 sequences of 16 tokens, weights 0.25, 0.75) begins" in text
    assert "step 7: the stage from step 7 on (8 sequences of 32 tokens, weights 0.25, 0.75) begins" in text
    # 48 sequences at 3 : 1, 64 at 1 : 3, and 32 at 1 : 3.
    assert "train.0 draws" in text
    assert "60 sequences, 41.67% of the run" in text
    assert {"eval/text/loss", "eval/other/loss"} <= set().union(*rows(whole))


@pytest.mark.parametrize(
    "memory",
    [
        [],
        ["--config.memory.update=layer_programs"],
        pytest.param(["--config.memory.update=in_backward", "--config.learner.clip=none"], marks=pytest.mark.pairs),
        pytest.param(
            [
                "--config.memory.update=streamed",
                "--config.memory.prefetch=layer",
                "--config.memory.optimizer_state=pinned_host",
                "--config.memory.gradients=pinned_host",
                "--config.learner.clip=none",
            ],
            marks=pytest.mark.pairs,
        ),
    ],
    ids=lambda memory: "-".join(memory).replace("--config.memory.", "") or "after_backward",
)
def test_losses_equal_two_programs_chained_by_hand(memory: list[str], flags: list[str], tmp_path: Path):
    assert train(tmp_path / "run", *flags, *memory) == 0
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["data"]["stages"]["7"]["seq_len"] == 32
    experiment = load(str(tmp_path / "run/config.json")).instantiate()
    experiment.data.setup(tmp_path / "run")
    first = Program(experiment)
    programs = {one.stage.start: one.program for one in build_stage_programs(first) if one.stage is not None}
    assert programs[0] is programs[3] is first is not programs[7]
    state = first.init()
    chained = {}
    for step in range(11):
        program = programs[7] if step >= 7 else first
        if step == 7:
            state = first.complete_update(state)
        batch = experiment.data.train_batch(step, program.rows)
        assert batch["tokens"].shape == ((8, 32) if step >= 7 else (16, 16))
        state, metrics = program.step(state, program.put(batch))
        chained[step + 1] = float(metrics["loss"])
    assert chained == losses(tmp_path / "run")


@pytest.mark.pairs
def test_two_processes_cross_the_border(flags: list[str], tmp_path: Path):
    processes = pair(tmp_path / "two", *flags)
    assert [process.wait(300) for process in processes] == [0, 0], output(tmp_path / "two")
    assert start(tmp_path / "one", *flags, devices=4).wait(300) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_plain_run_is_annealed_by_resuming_it_with_a_stage(flags: list[str], text: Path, tmp_path: Path, capsys):
    plain = [flag for flag in flags if not flag.startswith("--data")]
    first = f"--data={text}/train.txt"
    assert train(tmp_path / "run", *plain, first, "--config.trainer.max_steps=4") == 0
    later = [
        first,
        f"--data={text}/other.txt",
        "--data_weights=1,0",
        "--data_at=4:weights=1,1",
        "--data_at=4:seq_len=32",
    ]
    capsys.readouterr()
    assert train(tmp_path / "run", *plain, *later, "--config.trainer.max_steps=6") == 0
    out = capsys.readouterr().out
    assert "resumed from step 4" in out
    assert "the data differs" not in out
    # A stage that has been trained on may not change.
    later[3] = "--data_at=4:weights=3,1"
    assert train(tmp_path / "run", *plain, *later, "--config.trainer.max_steps=8") == 2
    assert "config.data.stages.4.weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--data_at=7:seq_len=64"], "data.stages.7: data.seq_len = 64 exceeds model.embed.max_positions = 32"),
        (["--config.mesh.fsdp=2", "--config.mesh.seq=4", "--data_at=7:seq_len=2"], "mesh.seq = 4 does not divide"),
        (["--data_at=7:global_batch_size=12"], "data.stages.7: mesh.data * mesh.fsdp = 8 does not divide the 12"),
        (["--data_at=7:seq_len=24"], "seq_len = 24 does not divide the 256 tokens of a step"),
        (["--data_at=7:rope=3"], "--data_at=7:rope=3: expected STEP:FIELD=VALUE"),
        (["--data_at=-7:seq_len=32"], "--data_at=-7:seq_len=32: expected STEP:FIELD=VALUE"),
        (["--data_at=9:weights=0,0"], "at least one weight above 0"),
        (["--data_at=9:weights=1"], "expected one for each of 2 sources, given 1"),
    ],
)
def test_a_stage_that_cannot_run_is_refused_before_anything_is_tokenized(
    extra: list[str], message: str, flags: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("plimsoll.framework.data.pipeline.write_tokens", lambda *a: pytest.fail("tokenized"))
    assert train(tmp_path / "run", *flags, *extra) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.count("\n") == 0


def test_every_stage_must_fit(flags: list[str], tmp_path: Path, capsys):
    grow = ["--data_at=9:global_batch_size=512", "--device_memory_gib=0.003"]
    assert train(tmp_path / "run", *flags, *grow) == 4
    out = capsys.readouterr().out
    assert "the stage from step 9 on (512 sequences of 32 tokens, weights 0.25, 0.75): the training step needs" in out
    assert not (tmp_path / "run").exists()


def test_a_plan_covers_every_stage(flags: list[str], tmp_path: Path, capsys):
    data = [flag for flag in flags if "trainer" not in flag]
    argv = [f"--config={CONFIG}:tiny", *data, "--target=h100", "--estimate", f"--json={tmp_path}/plan.json"]
    assert plan.main(argv) == 0
    out = capsys.readouterr().out
    assert "data.seq_len=16 data.global_batch_size=16" in out
    assert "data.seq_len=32 data.global_batch_size=8" in out
    assert "sequences of" in out.partition("largest stage: ")[2]
    reports = json.loads((tmp_path / "plan.json").read_text())
    assert [report["in_effect"]["data.seq_len"] for report in reports] == [16, 32]
    assert plan.main([*argv, "--device_memory_gib=0.0001", "--verdict_only"]) == 4
    # The longest sequences do not need the most if their batch is small.
    largest = [*argv, "--data_at=8:global_batch_size=64", "--data_at=9:seq_len=64", "--data_at=9:global_batch_size=1"]
    capsys.readouterr()
    assert plan.main([*largest, "--compare=memory.remat=none,full"]) == 0
    assert "planning the largest stage: 64 sequences of 32 tokens\n" in capsys.readouterr().err
    command = Parser("train", None)
    command.add_data()
    config = command.parse(
        [word for word in largest if not word.startswith(("--target", "--estimate", "--json"))]
    ).config
    data = with_largest_stage(config).data
    assert (data.seq_len, data.global_batch_size) == (32, 64)


def test_each_target_resolves_stages_by_its_rules(tmp_path: Path, capsys):
    rule = {"$class": "plimsoll.AcceleratorRule", "pattern": "h100*", "set": {"data.global_batch_size": 128}}
    flags = [f"--config.accelerator_rules={json.dumps([rule])}", "--data_at=9:global_batch_size=64"]
    argv = [f"--config={CONFIG}:tiny", *flags, "--estimate", f"--json={tmp_path}/plan.json"]
    batches = {"h100": 128, "rtx4090": 64}
    for names in ("h100,rtx4090", "rtx4090,h100"):
        assert plan.main([*argv, f"--target={names}"]) == 0
        reports = json.loads((tmp_path / "plan.json").read_text())
        found = [report["in_effect"]["data.global_batch_size"] for report in reports]
        assert found == [batches[name] for name in names.split(",")]
    assert "planning the largest stage: 64 sequences of 32 tokens or 128" in capsys.readouterr().err


@dataclass
class FakeCheckpointer:
    """A checkpoint of one step, with this JSON part."""

    step: int
    extra: dict[str, Any]

    def steps(self) -> list[int]:
        return [self.step]

    def manifest(self, step: int) -> Any:
        assert step == self.step
        return SimpleNamespace(extra=self.extra)


def test_a_loaded_run_has_the_stage_of_its_last_batch(tmp_path: Path):
    config = tiny()
    config.data.stages = {"10": config_for(DataStage, seq_len=16)}
    (tmp_path / "config.json").write_text(config.to_json())
    lengths = {}
    for step in (9, 10, 11):
        for left_out in ((), (4,)):
            extra = {"config": config.to_dict(), "data": BatchOrder(left_out).to_json()}
            loaded = _load_run_config(tmp_path, FakeCheckpointer(step, extra), None, print)
            lengths[step, left_out] = loaded.data.seq_len
    # With batch 4 left out, the tenth step trained on batch 10.
    assert lengths == {(9, ()): 32, (9, (4,)): 32, (10, ()): 32, (10, (4,)): 16, (11, ()): 16, (11, (4,)): 16}
