"""`plimsoll train` end to end: a run leaves the files that the README lists, resumes, stops and refuses."""

import functools
import json
import math
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from plimsoll import configs
from plimsoll.framework.data.tokenizers import ByteTokenizer
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.run.run import Run
from tests.support.runs import CONFIG, LONG, losses, output, rows, start, train, wait_for


@pytest.mark.pairs
def test_run_writes_all_its_files(reference_run: Path) -> None:
    assert list(losses(reference_run)) == list(range(1, 121))
    assert losses(reference_run)[120] < losses(reference_run)[1] - 1.0
    names = {path.name for path in reference_run.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "tensorboard", "log.txt", "loss.png"} <= names
    assert json.loads((reference_run / "config.json").read_text())["trainer"]["max_steps"] == 120
    assert (reference_run / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    final = next(row for row in rows(reference_run) if "eval/held/loss" in row)
    assert final["step"] == 120
    assert 0 < final["eval/held/bits_per_byte"] < 8
    out = Path(f"{reference_run}.out").read_text()
    assert "gzip -9" in out
    assert "bytes per device" in out
    assert "bytes per device" in (reference_run / "log.txt").read_text()


def kill_after_a_save(workdir: Path) -> None:
    """Start the run, and kill it at a random moment after its first checkpoint."""
    process = start(workdir, *LONG)
    wait_for(lambda: list(workdir.glob("checkpoints/*/commit_success.txt")))
    time.sleep(random.uniform(0.0, 0.3))
    process.kill()
    process.wait()
    assert max(losses(workdir)) < 120, "the run was over before it was killed"


def list_resumed_steps(workdir: Path) -> list[int]:
    return [row["resumed_from"] for row in rows(workdir) if "resumed_from" in row]


@pytest.mark.once("15-143")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_killed_stopped_by_a_signal_and_resumed_to_the_same_bits(
    reference_run: Path, text: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    workdir = tmp_path / "run"
    kill_after_a_save(workdir)
    # The signal comes long before the end, and only the step that it stops at is saved.
    process = start(workdir, "--config.trainer.max_steps=100000", "--config.trainer.save_every=100000")
    wait_for(lambda: list_resumed_steps(workdir))
    (saved,) = list_resumed_steps(workdir)
    assert saved in (20, 40, 60, 80, 100)
    wait_for(lambda: max(losses(workdir), default=0) >= saved + 3 or process.poll() is not None)
    process.send_signal(number)
    assert process.wait(timeout=120) == code, output(workdir)
    last = max(losses(workdir))
    steps = {int(path.name) for path in (workdir / "checkpoints").iterdir()}
    assert max(steps) == last
    assert not {step for step in steps if saved < step < last}
    end = max(120, last + 1)
    rest = start(workdir, *LONG, f"--config.trainer.max_steps={end}")
    assert rest.wait(timeout=300) == 0, output(workdir)
    assert list_resumed_steps(workdir) == [saved, last]
    assert {step: loss for step, loss in losses(workdir).items() if step <= 120} == losses(reference_run)
    steps = [row["step"] for row in rows(workdir) if "train/loss" in row]
    assert steps == list(range(1, end + 1)), "a step is repeated or missing"


@pytest.mark.pairs
@pytest.mark.parametrize("flags", [["--config.trainer.save_every=3"], ["--config.trainer.save_every_minutes=0.000001"]])
def test_saved_steps_row_is_written_before_the_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    save, seen = Run.save, []

    def record_save(run: Run, step: int) -> None:
        seen.append((step, max(losses(tmp_path / "run"))))
        save(run, step)

    monkeypatch.setattr(Run, "save", record_save)
    assert train(tmp_path / "run", "--config.trainer.save_every=100", "--config.trainer.max_steps=7", *flags) == 0
    assert len(seen) >= 3
    assert all(step == written for step, written in seen), seen


@pytest.mark.pairs
def test_a_start_before_the_first_checkpoint_leaves_no_second_rows(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(run: Run, step: int) -> None:
        raise RuntimeError("before the first checkpoint")

    flags = ("--config.trainer.save_every=5", "--config.trainer.max_steps=6")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", die)
        with pytest.raises(RuntimeError):
            train(tmp_path / "run", *flags)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    assert train(tmp_path / "run", *flags) == 0
    assert [row["step"] for row in rows(tmp_path / "run") if "train/loss" in row] == [1, 2, 3, 4, 5, 6]


@pytest.mark.pairs
def test_a_death_between_a_row_and_its_checkpoint_leaves_no_second_rows(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """When the run dies, both rows of step 4 (training and evaluation) are written, but its checkpoint is not."""
    save = Run.save

    def die(run: Run, step: int) -> None:
        if step == 4:
            run.checkpointer.wait()
            raise RuntimeError("before the checkpoint of step 4")
        save(run, step)

    workdir = tmp_path / "run"
    flags = ("--config.trainer.save_every=2", "--config.trainer.eval_every=2", "--config.trainer.max_steps=6")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", die)
        with pytest.raises(RuntimeError):
            train(workdir, *flags)
    assert "  starts at         step 0 (fresh initialization)\n" in capsys.readouterr().out
    kinds = ("train/loss", "eval/held/loss")
    assert [[row["step"] for row in rows(workdir) if kind in row] for kind in kinds] == [[1, 2, 3, 4], [2, 4]]
    before = time.time()
    assert train(workdir, *flags) == 0
    assert [[row["step"] for row in rows(workdir) if kind in row] for kind in kinds] == [[1, 2, 3, 4, 5, 6], [2, 4, 6]]
    assert list_resumed_steps(workdir) == [2]
    out = capsys.readouterr().out
    assert f"  starts at         step 2, resumed from {workdir / 'checkpoints'}\n" in out
    epochs = rows(workdir)[-1]["epoch"]
    assert f"  steps             6 ({epochs:.3g} epochs)\n" in out
    assert "step 4: eval/held/loss" in out
    data = configs.load(f"{CONFIG}:tiny").data
    for row in rows(workdir):
        assert (row["time"] >= before - 0.01) == (row["step"] > 2 or "resumed_from" in row)
        assert row["tokens"] == row["step"] * data.global_batch_size * data.seq_len
        assert row["epoch"] == pytest.approx(row["step"] * rows(workdir)[0]["epoch"])
    for row in rows(workdir):
        if "eval/held/loss" in row:
            assert row["eval/held/perplexity"] == pytest.approx(math.exp(row["eval/held/loss"]))


@pytest.mark.pairs
def test_resume_flags(reference_run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(reference_run, "--resume=never") == 2
    assert "holds checkpoints up to step 120" in capsys.readouterr().err
    assert train(tmp_path / "empty", "--resume=must") == 2
    assert "holds no valid checkpoint" in capsys.readouterr().err


@pytest.mark.pairs
def test_one_experiment_is_built(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run uses the experiment that the command line built."""
    built: list[Experiment] = []
    build = Experiment.__init__

    @functools.wraps(build)
    def counting(self: Experiment, **parts: Any) -> None:
        built.append(self)
        build(self, **parts)

    monkeypatch.setattr(Experiment, "__init__", counting)
    assert train(tmp_path / "run", "--dry_run") == 0
    assert len(built) == 1


@pytest.mark.pairs
def test_dry_run_trains_nothing(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(tmp_path / "run", "--dry_run") == 0
    assert "Nothing was trained" in capsys.readouterr().out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.pairs
def test_empty_prompt_sample_follows_the_separator(text, tmp_path, monkeypatch, capsys):
    """As with most published models, the sample then follows the token between documents."""
    monkeypatch.setattr(ByteTokenizer, "encode_prompt", lambda self, text: list(text.encode()))
    assert train(tmp_path / "run", "--config.trainer.sample_tokens=4", "--config.trainer.max_steps=1") == 0
    output = capsys.readouterr()
    assert "sample, continuing '':" in output.out + output.err
