"""Faults injected into `plimsoll train`: the messages that users see, and the files that survive.

Test numbers are rows of the table in docs/faults.md. Rows 1 to 3 are in tests/config, 10 in tests/checkpoint; those
with several processes are in test_processes.py.
"""

import json
import os
import pickle
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from plimsoll.framework.metrics.memory import live_array_bytes
from plimsoll.framework.run.run import Run
from tests.support.runs import CONFIG, losses, output, rows, start, train, write_text


def steps(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config.mesh.fsdp=3"], ["mesh", "3", "8", "nearest: [2, 4]"]),
        (["--config.data.global_batch_size=12"], ["fsdp = 8", "12", "nearest global_batch_size: [8, 16]"]),
        (["--config.learner.accumulate=3"], ["accumulate = 3", "8", "nearest: [2, 4]"]),
        (["--config.mesh.fsdp=2", "--config.mesh.model=4"], ["mesh.model = 4", "num_kv_heads = 2", "[2]"]),
        (["--config.mesh.fsdp=4", "--config.mesh.expert=2"], ["expert = 2", "no experts"]),
        (["--config.model.vocab_size=256"], ["257 ids", "model.vocab_size = 256"]),
        (["--config.data.seq_len=64"], ["seq_len = 64", "max_positions = 32"]),
        (["--config.mesh.fsdp=1", "--config.mesh.data=-1", "--config.mesh.fsdp=-1"], ["one axis of -1"]),
    ],
)
def test_4_mesh_or_batch_does_not_divide(
    text: Path, tmp_path: Path, capsys, flags: list[str], words: list[str]
) -> None:
    assert train(tmp_path / "run", *flags) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.pairs
def test_5_oversized_config_is_refused_with_fitting_settings(text: Path, tmp_path: Path) -> None:
    workdir, limit = tmp_path / "run", ("--config.data.global_batch_size=32", "--device_memory_gib=0.0012")
    # A separate process: the settings that it compiles to find what fits take a gigabyte.
    assert start(workdir, *limit, devices=8).wait(300) == 4
    out = output(workdir)
    needs = re.search(r"the training step needs ([\d.]+) (\w+) per device, but ([\d.]+) (\w+) are available", out)
    assert needs is not None, out
    assert float(needs[1]) > float(needs[3]) == 1.23
    assert needs[2] == needs[4] == "MiB"
    assert re.search(r"largest groups: [a-z ]+ [\d.]+ \w+, [a-z ]+ [\d.]+ \w+, [a-z ]+ [\d.]+ \w+\n", out), out
    fitting = re.findall(r"would fit: (.*) \(", out)
    assert len(fitting) == 3, out
    assert not workdir.exists()
    # The suggested settings do fit, and --force trains with the settings as they are.
    assert train(tmp_path / "fits", *limit, "--dry_run", *fitting[0].split()) == 0
    assert train(workdir, *limit, "--force", "--config.trainer.max_steps=1") == 0
    assert steps(workdir) == [1]


def test_6_missing_data_is_named_before_any_compile(text: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        "plimsoll.framework.program.jit_step.JitStep.compiled_step", property(lambda self: pytest.fail("compiled"))
    )
    (text / "train.txt").unlink()
    assert train(tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert str(text / "train*.txt") in error
    assert "data.source" in error


@pytest.mark.pairs
def test_7_a_garbled_token_cache_is_named(text: Path, tmp_path: Path, capsys) -> None:
    assert train(tmp_path / "run", "--config.trainer.max_steps=1") == 0
    tokens = next((tmp_path / "run").rglob("*.bin"))
    tokens.write_bytes(tokens.read_bytes()[:-7])
    capsys.readouterr()
    assert train(tmp_path / "run", "--config.trainer.max_steps=2") == 2
    assert str(tokens) in capsys.readouterr().err
    assert steps(tmp_path / "run") == [1]


@pytest.fixture(scope="module")
def run_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with checkpoints of steps 4, 8 and 12, for tests to copy."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TEXT", "")
        write_text(place / "text")
        assert train(place / "run") == 0
    return place / "run"


@pytest.fixture
def workdir(run_template: Path, text: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, with the same text."""
    return Path(shutil.copytree(run_template, tmp_path / "run"))


@pytest.mark.pairs
def test_8_corrupt_checkpoint_falls_back_with_a_warning(workdir: Path, capsys) -> None:
    undisturbed = losses(workdir)
    newest = workdir / "checkpoints" / max(path.name for path in (workdir / "checkpoints").iterdir())
    data = max((path for path in newest.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    capsys.readouterr()
    assert train(workdir, "--config.trainer.max_steps=13") == 0  # a finished run reads no arrays
    out = capsys.readouterr().out
    assert "step 12" in out
    assert "checksum" in out or "corrupt" in out, out
    assert "resumed from step 8" in out
    assert [row for row in losses(workdir).items() if row[0] <= 12] == list(undisturbed.items())


@pytest.mark.pairs
def test_9_a_partial_checkpoint_is_ignored_and_listed(text: Path, tmp_path: Path, capsys) -> None:
    workdir = tmp_path / "run"
    assert train(workdir, "--config.trainer.max_steps=8") == 0
    undisturbed = losses(workdir)
    partial = workdir / "checkpoints" / "00000008"
    (partial / "commit_success.txt").unlink()
    capsys.readouterr()
    assert train(workdir, "--config.trainer.max_steps=8") == 0
    out = capsys.readouterr().out
    assert f"{partial}: incomplete: commit_success.txt is missing" in out
    assert "resumed from step 4" in out
    assert losses(workdir) == undisturbed
    assert (partial / "commit_success.txt").exists(), "step 8 was saved again"


@pytest.mark.pairs
def test_13_full_disk_keeps_the_last_good_checkpoint(text: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    workdir = tmp_path / "run"
    usage = shutil.disk_usage
    full = type(usage(tmp_path))(1 << 40, 1 << 40, 1000)
    original = Run.save

    def save(self: Run, step: int) -> None:
        with monkeypatch.context() as patch:
            if step > 4:
                patch.setattr(shutil, "disk_usage", lambda path: full)
            original(self, step)

    monkeypatch.setattr(Run, "save", save)
    assert train(workdir) == 1
    out = capsys.readouterr()
    assert "NOT SAVED at step 8" in out.out
    assert "Saved steps: [4]" in out.out
    assert "last step was not saved" in out.out
    assert list(losses(workdir)) == list(range(1, 13)), "training went on"
    assert steps(workdir) == [4]


def poison(text: Path, byte: int, among: range, max_steps: int) -> tuple[str, int]:
    """Write a document with `byte`, and find a data seed with which exactly one step reads it, a step in `among`.

    Returns:
        (flag that sets the seed, 1-based step).
    """
    from plimsoll.configs import load

    (text / "train_poison.txt").write_text("xyz " * 9 + chr(byte) + " xyz" * 30)
    for seed in range(200):
        pipeline = load(f"{CONFIG}:tiny")
        pipeline.data.seed = seed
        data = pipeline.data.instantiate()
        data.setup(text.parent / "probe")
        hit = [step + 1 for step in range(max_steps) if np.any(data.train_batch(step, range(8))["tokens"] == byte)]
        if len(hit) == 1 and hit[0] in among:
            return f"--config.data.seed={seed}", hit[0]
    raise AssertionError("no seed puts the poison where it is wanted")


@pytest.mark.pairs
def test_14_not_finite_skip_and_stop(text: Path, tmp_path: Path, capsys) -> None:
    seed, bad = poison(text, 1, range(6, 8), 12)
    assert train(tmp_path / "skip", seed) == 0
    assert f"step {bad}: loss nan" in capsys.readouterr().out
    logged = losses(tmp_path / "skip")
    assert logged[bad] == "NaN"
    assert all(isinstance(logged[step], float) for step in logged if step != bad)
    assert [row["train/skipped"] for row in rows(tmp_path / "skip") if "train/skipped" in row].count(1.0) == 1

    assert train(tmp_path / "stop", seed, "--config.learner.nonfinite=stop") == 3
    assert "nothing was updated" in capsys.readouterr().out
    assert steps(tmp_path / "stop") == [4], "nothing was saved after the bad step"
    assert train(tmp_path / "stop", seed) == 0
    assert losses(tmp_path / "stop") == logged

    limit = ("--config.learner.nonfinite=skip", "--config.learner.max_nonfinite=1")
    assert train(tmp_path / "limit", seed, *limit) == 3
    assert "1 such steps in a row" in capsys.readouterr().out


def parameters(workdir: Path, step: int) -> dict:
    """Return the checksums of all leaves of a checkpoint except the counters."""
    leaves = json.loads((workdir / "checkpoints" / f"{step:08d}" / "manifest" / "data.json").read_text())["leaves"]
    return {name: leaf for name, leaf in leaves.items() if not name.startswith("counter")}


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["after_backward", "streamed", "in_backward"])
def test_15_a_loss_spike_is_skipped_and_counted(text: Path, tmp_path: Path, capsys, update: str) -> None:
    seed, bad = poison(text, 2, range(23, 26), 25)  # the first twenty updates are never skipped
    flags = (seed, f"--config.memory.update={update}", f"--config.trainer.save_every={bad - 1}")
    flags += (f"--config.trainer.max_steps={bad}",)
    if update == "in_backward":
        flags += ("--config.learner.clip_mode=previous_norm",)
    spike = (*flags, "--config.learner.spike=8")
    assert train(tmp_path / "skip", *spike, config="spiky") == 0
    assert re.search(
        rf"step {bad}: loss \d+\.\d+, .*nothing was updated \(a spike: learner.spike = 8", capsys.readouterr().out
    )
    row = next(row for row in rows(tmp_path / "skip") if row["step"] == bad and "train/loss" in row)
    assert row["train/loss"] > 50.0
    assert [row["train/skipped"] for row in rows(tmp_path / "skip") if "train/skipped" in row] == [0.0] * (bad - 1) + [
        1.0
    ]
    assert parameters(tmp_path / "skip", bad) == parameters(tmp_path / "skip", bad - 1), "bit for bit"

    assert train(tmp_path / "taken", *flags, config="spiky") == 0
    assert losses(tmp_path / "taken") == pytest.approx(losses(tmp_path / "skip"), rel=1e-5)
    assert not any(row.get("train/skipped") for row in rows(tmp_path / "taken"))
    before, after = (parameters(tmp_path / "taken", step) for step in (bad - 1, bad))
    assert all(before[name] != after[name] for name in before if name.startswith("parameter/"))

    if update == "after_backward":
        assert train(tmp_path / "limit", *spike, "--config.learner.max_nonfinite=1", config="spiky") == 3
        assert "stopped after 1 such steps in a row (learner.max_nonfinite)" in capsys.readouterr().out
        assert steps(tmp_path / "limit") == [bad - 1]


@pytest.mark.pairs
def test_20_checkpoint_from_another_model(text: Path, tmp_path: Path, capsys) -> None:
    workdir = tmp_path / "run"
    assert train(workdir, "--config.trainer.max_steps=1") == 0
    capsys.readouterr()
    assert train(workdir, "--config.model.stack.num_layers=3", "--config.learner.ema=0.9") == 2
    error = capsys.readouterr().err
    assert "config.model.stack.num_layers: 2 -> 3" in error
    assert "config.learner.ema: null -> 0.9" in error
    assert "ema/embed/token" in error  # a missing leaf
    assert "3,32,32" in error.replace(" ", "")
    assert steps(workdir) == [1]


@pytest.mark.pairs
def test_21_two_jobs_in_one_workdir(text: Path, tmp_path: Path, capsys) -> None:
    workdir = tmp_path / "run"
    first = start(workdir, "--config.trainer.max_steps=100000", "--config.trainer.save_every=100000")
    try:
        while not losses(workdir) and first.poll() is None:
            time.sleep(0.05)
        assert train(workdir) == 2
        error = capsys.readouterr().err
        assert str(first.pid) in error
        assert os.uname().nodename in error
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert train(workdir, "--config.trainer.max_steps=1") == 0, "the lock of a dead process is taken over"


@pytest.mark.pairs
def test_22_nothing_in_a_workdir_is_executed(workdir: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    for name in ("state.pkl", "checkpoint.pickle", "data.yaml"):
        (workdir / "checkpoints" / "00000012" / name).write_bytes(pickle.dumps(Payload()))
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    (workdir / "config.json").write_text(json.dumps({"$class": "configs.load", "spec": f"{tmp_path}/evil.py:f"}))
    assert train(workdir, "--config.trainer.max_steps=13") == 0
    assert not canary.exists()


@pytest.mark.pairs
@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", "", "a b", ".hidden"])
def test_23_unsafe_run_names(text: Path, tmp_path: Path, capsys, monkeypatch, name: str) -> None:
    from plimsoll.launch.train import main

    monkeypatch.chdir(tmp_path)
    assert main([f"--config={CONFIG}:tiny", f"--run_name={name}"]) == 2
    assert "--run_name" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.pairs  # tests/trainer/test_memory.py covers the same restore
def test_24_resuming_needs_no_more_memory(text: Path, tmp_path: Path, monkeypatch) -> None:
    peaks: list[int] = []
    original = Run.start

    def record_peak(self: Run, *args, **options) -> int:
        step = original(self, *args, **options)
        peaks.append(sum(size for (_, kind), size in live_array_bytes().items() if kind == "device"))
        return step

    monkeypatch.setattr(Run, "start", record_peak)
    assert train(tmp_path / "run", "--config.trainer.max_steps=1") == 0
    assert train(tmp_path / "run", "--config.trainer.max_steps=2") == 0
    assert peaks[1] <= 1.02 * peaks[0]
