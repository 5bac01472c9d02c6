"""`plimsoll plan --from`: what it prints, its flags to paste, and its errors."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.framework.plan import targets
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import plan
from tests.support.runs import ROOT

JOB = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 4
seq_len = 256
steps = 10
[activation_checkpoint]
mode = "full"
"""
MEGATRON = """#!/bin/bash
MODEL="--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256"
torchrun --nproc_per_node 4 pretrain_gpt.py $MODEL --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
    --micro-batch-size 1 --global-batch-size 4 --vocab-size 1000 --bf16 --train-iters 3 --sequence-parallel
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def run(tmp_path: Path, *words: str) -> tuple[int, Any]:
    path = tmp_path / "plan.json"
    code = plan.main([*words, f"--json={path}"])
    return code, json.loads(path.read_text())


def test_a_run_is_described_and_planned(tmp_path: Path, job: Path, capsys: pytest.CaptureFixture):
    code, report = run(tmp_path, "--from", str(job), "--training.local_batch_size=2", "--target=h100x2")
    assert code == ExitCode.DONE
    text = capsys.readouterr().out
    assert f"{job}: torchtitan" in text
    assert "4 rows of 256 tokens on 2 devices" in text
    assert "1 settings that change neither memory nor time" in text
    assert "fits: " in text
    assert report["fits"]
    assert report["from"]["framework"] == "torchtitan"
    assert report["from"]["mesh"]["shards"] == 2
    # The flags that it prints give the same config.
    words = shlex.split(report["from"]["command"])
    assert words[:2] == ["plimsoll", "plan"]
    _, own = run(tmp_path, *words[2:], "--estimate", "--verdict_only")
    assert own["breakdown"]["parameters"] == report["breakdown"]["parameters"]
    assert own["tokens_per_step"] == report["tokens_per_step"] == 4 * 256


def test_the_number_of_devices_is_that_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "run.sh"
    path.write_text(MEGATRON)
    code, report = run(tmp_path, f"--from={path}", "--target=a100-80")
    assert code == ExitCode.DONE
    assert report["target"] == "a100-80x4"
    assert {axis: size for axis, size in report["mesh"].items() if size > 1} == {"pipe": 2, "model": 2}
    assert "memory is counted as Megatron-LM uses it" in capsys.readouterr().out


@pytest.mark.pairs
def test_several_targets_are_one_table(tmp_path: Path, job: Path, capsys: pytest.CaptureFixture):
    code, reports = run(tmp_path, "--from", str(job), "--target=h100x2,v5e-4")
    assert code == ExitCode.DONE
    assert [report["target"] for report in reports] == ["h100x2", "v5e-4"]
    assert "v5e-4" in capsys.readouterr().out


def test_a_run_that_does_not_fit(tmp_path: Path, job: Path):
    code, report = run(tmp_path, "--from", str(job), "--target=h100x2", "--device_memory_gib=0.01")
    assert (code, report["fits"]) == (ExitCode.TOO_BIG, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from"], "--from needs a file: --from FILE [ARGS...]"),
        (["--from", "missing.toml", "--target=h100"], "--from=missing.toml: no such file"),
        (["--from", "{job}"], "--target=NAME is required"),
        (["--from", "{job}", "--target=h1000"], "unknown target 'h1000'"),
        (["--from", "{job}", "--target=h100", "--config=gpt2-124m"], "--from cannot be combined with --config"),
        (["--from", "{job}", "--target=h100", "--auto"], "--from cannot be combined with --auto"),
        (["--from", "{job}", "--target=h100", "--markdown=x.md"], "--from cannot be combined with --markdown"),
        (["--from", "{job}", "--target=h100", "--data_at=5:seq_len=8"], "--from cannot be combined with --data_at"),
        (["--from", "{job}", "--target=h100", "--estimate"], "--compiled compiles it"),
        (["--from", "{job}", "word", "--target=h100"], "'word' is neither a file, nor a flag"),
        (["--from", "{job}", "A=1", "--target=h100"], "A=1 sets no variable of this file"),
        (["--from", "{job}", "--training.seq_len=x", "--target=h100"], "training.seq_len = 'x'; expected a number"),
        (["--config=gpt2-124m", "--target=h100", "--compiled"], "--compiled is for --from"),
    ],
)
def test_wrong_command_lines(job: Path, words: list[str], message: str, capsys: pytest.CaptureFixture):
    code = plan.main([word.replace("{job}", str(job)) for word in words])
    error = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_compiling_without_a_compiler(job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(targets, "installed_compiler", lambda platform: "")
    assert plan.main(["--from", str(job), "--target=h100x8", "--compiled"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "--compiled: no compiler for h100x8: pip install" in error
    assert "without it, the plan is an estimate" in error


def test_a_section_that_contains_itself(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "job.yaml"
    path.write_text("model: &model\n  num_layers: 2\n  hidden_size: 64\n  num_attention_heads: 2\n  inner: *model\n")
    assert plan.main(["--from", str(path), "--target=h100"]) == ExitCode.USAGE
    assert capsys.readouterr().err == f"error: --from={path}: sections that are nested too deeply\n"


def test_a_wrong_file_is_reported_before_jax_starts(tmp_path: Path):
    path = tmp_path / "pod.yaml"
    path.write_text("kind: Pod\n")
    code = "import sys; from plimsoll.launch import plan; plan.main(sys.argv[1:]); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--from", str(path), "--target=h100"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "of no framework known here" in done.stderr
    assert done.stderr.count("\n") == 1
