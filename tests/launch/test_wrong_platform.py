"""A kernel that is requested by name but is for a platform other than that of the run or the plan."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from plimsoll import configs
from plimsoll.framework.checkpoint.directory import COMMIT_MARKER
from plimsoll.launch import plan, train
from tests.support.runs import ROOT

BLOCK = "--config.model.stack.pattern.0"


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mlp.experts.implementation=triton", "experts.implementation = 'triton' is for gpu, not cpu; try auto"),
        ("attention.implementation=splash", "attention.implementation = 'splash' is for tpu, not cpu; try auto"),
    ],
)
def test_a_run_is_refused_before_its_data_is_prepared(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    workdir = tmp_path / "run"
    for flags in ([], ["--dry_run"]):
        code = train.main(["--config=moe-tiny", f"--workdir={workdir}", f"{BLOCK}.{setting}", *flags])
        assert code == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"
        assert not workdir.exists()


@pytest.mark.pairs
def test_plan_uses_the_target_platform(capsys: pytest.CaptureFixture):
    flags = ["--config=moe-tiny", "--estimate"]
    assert plan.main([*flags, "--target=h100x1", f"{BLOCK}.mlp.experts.implementation=megablox"]) == 2
    assert "'megablox' is for tpu, not gpu; try auto" in capsys.readouterr().err
    assert plan.main([*flags, "--target=v5e-1", f"{BLOCK}.mlp.experts.implementation=megablox"]) == 0


@pytest.mark.pairs
@pytest.mark.skipif(any(find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)), reason="JAX's CUDA plugin is installed")
@pytest.mark.parametrize(
    "command",
    [
        "train --config=stdlib-tiny --workdir=new",
        "plan --config=stdlib-tiny --target=local",
        "generate --workdir=run --prompt=x",
    ],
)
def test_a_platform_that_is_not_there_is_one_line(command: str, tmp_path: Path):
    name, *flags = command.split()
    # `generate` looks for devices once it has found a config and a checkpoint, before it loads the arrays.
    step = tmp_path / "run" / "checkpoints" / "00000001"
    for file in (
        COMMIT_MARKER,
        "_CHECKPOINT_METADATA",
        "state/_METADATA",
        "state/manifest.ocdbt",
        "manifest/data.json",
    ):
        (step / file).parent.mkdir(parents=True, exist_ok=True)
        (step / file).touch()
    (tmp_path / "run" / "config.json").write_text(configs.load("distil-tiny-alone").to_json())
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", f"launch.{name}", *flags]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error: JAX finds no device of JAX_PLATFORMS=cuda" in done.stderr.splitlines()[-1]
