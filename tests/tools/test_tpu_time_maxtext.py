"""The count of MaxText's step, with a fake maxtext package that compiles a small matmul the way MaxText compiles."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.bench import step_programs, tpu_time_maxtext

TRAIN_COMPILE = """
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding


def main(argv):
    command, base, *fields = argv
    assert command == "train_compile" and base.endswith("configs/base.yml"), argv
    given = dict(field.split("=", 1) for field in fields)
    assert given["compile_topology"] == "v5e-4" and given["model_name"] == "gpt2-124m", given
    size = int(given["max_target_length"])
    assert given["base_emb_dim"] == "64", given
    device = topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    with jax.default_matmul_precision("default"):
        jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(x, x).compile(compiler_options={})
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python interpreter of an environment that has the fake package."""
    site = tmp_path / "site"
    package = site / "maxtext" / "trainers" / "pre_train"
    package.mkdir(parents=True)
    (package / "train_compile.py").write_text(TRAIN_COMPILE)
    (site / "maxtext-9.dist-info").mkdir()
    (site / "maxtext-9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: maxtext\nVersion: 9\n")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU's compiler is not installed")
def test_maxtext_step_is_compiled_saved_and_counted(python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--config=gpt2-124m", "--length=1024", f"--python={python}", f"--save={tmp_path / 'kept'}"]
    assert tpu_time_maxtext.main(["v5e-4", *options, "base_emb_dim=64"]) == 0
    assert "MaxText 9 gpt2-124m on v5e-4" in capsys.readouterr().out
    saved_step = step_programs.load(tmp_path / "kept")
    assert tpu_time_maxtext.count_step(saved_step).count.product_flops == 2 * 1024**3
    assert saved_step.about.tokens == 1024
    assert saved_step.about.peak_bytes == pytest.approx(3 * 2 * 1024**2, rel=1e-3)
    assert saved_step.about.versions["maxtext"] == "9"
    # Run the same command again with the saved step in place, and with a field that MaxText rejects.
    assert tpu_time_maxtext.main(["v5e-4", *options, "base_emb_dim=65"]) == 2
    assert "error: MaxText's train_compile failed: AssertionError" in capsys.readouterr().err


def test_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rest = ["--config=gpt2-124m", "--length=8", f"--save={tmp_path / 'kept'}"]
    for argv, phrase in [
        (["v5e-4", *rest, f"--python={tmp_path / 'none'}"], "expected the Python of an environment"),
        (["v5e-5", *rest, f"--python={sys.executable}"], "nearest: v5e-4"),
        (["v5e-4", *rest, f"--python={sys.executable}", "remat"], "remat: expected FIELD=VALUE"),
        (["v5e-4", *rest, f"--python={sys.executable}", "--config=gpt2-124n"], "gpt2-124m"),
    ]:
        assert tpu_time_maxtext.main(argv) == 2
        assert phrase in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
