"""Memory versus depth: the command's files, its errors, and inversion, whose memory does not grow with depth."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from plimsoll.framework.metrics.memory import MemoryInUse
from tests.support.small import ROOT
from tools import memory_vs_depth
from tools.depth_configs import LANGUAGE
from tools.memory_vs_depth import DepthRow, main, table

SMALL = ["--config.model.dim=32"]
COMPILERS = {"v5e-1": ("plan-tpu", "libtpu"), "h200x1": ("plan-gpu", "jax_cuda12_plugin", "jax_cuda13_plugin")}
COLUMNS = (
    "config,target,policy,layers,parameters_bytes,peak_bytes,temp_bytes,fits,measured_peak_bytes,step_seconds,"
    "processor_seconds,jax_version"
)


def run(out: Path, *flags: str) -> tuple[dict[tuple[str, int], dict[str, str]], str]:
    """Run the command in its own process and return ({(policy, layers): its line in the CSV}, stdout)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-P", "-m", "tools.memory_vs_depth", f"--out={out}", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_output(out), done.stdout


def read_output(out: Path) -> dict[tuple[str, int], dict[str, str]]:
    """Check that exactly the two output files exist, and return the CSV's lines by (policy, layers)."""
    text = out.with_suffix(".csv").read_text()
    assert text.splitlines()[0] == COLUMNS
    assert out.read_bytes().startswith(b"\x89PNG\r\n")
    assert {*out.parent.iterdir()} == {out, out.with_suffix(".csv")}
    return {(row["policy"], int(row["layers"])): row for row in csv.DictReader(text.splitlines())}


def temporaries(rows: dict[tuple[str, int], dict[str, str]], policy: str) -> list[int]:
    """Return the temporary bytes of a policy, by depth."""
    return [int(row["temp_bytes"]) for (name, _), row in rows.items() if name == policy]


@pytest.mark.pairs
def test_measured_on_this_machine(tmp_path: Path) -> None:
    """Compare 8 and 32 layers: without remat, memory grows by megabytes per layer.

    With inversion, it grows only by the gradients that wait for the update.
    """
    names = ["none", "invert", "invert+in_backward"]
    rows, output = run(tmp_path / "depth.png", *SMALL, "--layers=32,8", "--rounds=1", f"--policies={','.join(names)}")
    assert list(rows) == [(name, depth) for depth in (8, 32) for name in names]
    parameters = {depth: int(rows["none", depth]["parameters_bytes"]) for depth in (8, 32)}
    grown = {name: temporaries(rows, name)[1] - temporaries(rows, name)[0] for name in names}
    gradients = parameters[32] - parameters[8]
    assert grown["none"] > 100e6
    assert gradients < grown["invert"] < 1.5 * gradients
    assert grown["invert+in_backward"] < 3.0 * gradients  # a CPU copies the stacks that a loop updates
    assert max(temporaries(rows, "invert")) < 0.1 * temporaries(rows, "none")[1]
    for (name, depth), row in rows.items():
        assert row["config"] == LANGUAGE
        assert row["target"] == "cpu-1"
        assert row["fits"] == "True"
        assert row["measured_peak_bytes"] == ""  # a CPU has no memory statistics
        assert row["jax_version"] == jax.__version__
        assert float(row["step_seconds"]) > 0.0
        assert float(row["processor_seconds"]) > 0.0
        assert int(row["parameters_bytes"]) == parameters[depth]
        assert int(row["peak_bytes"]) > int(row["temp_bytes"]) > 0
        assert any(line.split()[:2] == [name, str(depth)] for line in output.splitlines())


@pytest.mark.pairs
def test_compiled_for_a_target_without_times(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A plain stack saves each layer's input, float32 [12, 64, 32], and its gradients."""
    out, config = tmp_path / "depth.png", ["--config=nanogpt-cpu", "--config.model.stack.unroll=1", *SMALL]
    assert main([*config, "--policies=full", "--layers=2,6", "--target=cpu:1", f"--out={out}"]) == 0
    assert "step" not in capsys.readouterr().out
    rows = read_output(out)
    assert all(row["step_seconds"] == row["processor_seconds"] == "" for row in rows.values())
    shallow, deep = temporaries(rows, "full")
    gradients = int(rows["full", 6]["parameters_bytes"]) - int(rows["full", 2]["parameters_bytes"])
    assert 1.0 <= (deep - shallow) / (gradients + 4 * 12 * 64 * 32 * 4) < 1.5


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--layers=16,0"], "--layers=16,0: expected positive numbers of layers"),
        (["--layers=16,-4"], "--layers=16,-4: expected positive numbers of layers"),
        (["--layers=many"], "--layers=many: expected positive numbers of layers"),
        (["--layers="], "--layers=: expected positive numbers of layers"),
        (["--target=v5f-1"], "unknown target 'v5f-1'; nearest: v5e-1"),
        (["--target=h200x11"], "no such size; nearest: h200x8"),
        (["--policies=none,inverted"], "no policy 'inverted'; did you mean 'invert'"),
        (["--rounds=-1"], "--rounds=-1: expected 0 or more"),
        (["--out=x.pdf"], "--out=x.pdf: expected a .png file"),
        (["--out=/no/such/folder/x.png"], "in an existing folder"),
        (["--depth_field=model.stack.layers"], "model.stack"),
        (["--config=nanogpt-cpus"], "did you mean 'nanogpt-cpu'"),
        (["--config=nanogpt-cpu"], "policy invert: memory.remat = invert: pattern.0, Block, is not reversible"),
        (["--config.model.stack.pattern=[]"], "pattern"),
        (["--layer=3"], "did you mean '--layers'"),
    ],
)
def test_user_errors_come_before_compilation(
    flags: list[str], words: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_vs_depth, "_rows", lambda *_: pytest.fail("compiled"))
    assert main(["--target=cpu:1", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.pairs
def test_unsupported_policies_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPU, offload is refused: the output leaves out its line and reports this. Without other lines, no picture."""

    def rows(configs: dict[str, Any], target: Any, rounds: int) -> list[DepthRow]:
        return [DepthRow("", target.name, name, 0, 8, 2 << 20, 1 << 20, True) for name in configs]

    monkeypatch.setattr(memory_vs_depth, "_rows", rows)
    assert main(["--target=h200x1", "--layers=2,4", "--policies=full,offload", f"--out={tmp_path / 'x.png'}"]) == 0
    output = capsys.readouterr().out
    assert "left out: offload: memory.remat = offload: XLA's GPU compiler computes wrong gradients" in output
    assert [line.split(",")[2] for line in (tmp_path / "x.csv").read_text().splitlines()[1:]] == ["full", "full"]
    assert main(["--target=h200x1", "--policies=offload", f"--out={tmp_path / 'y.png'}"]) == 2
    assert "h200x1 supports none of them" in capsys.readouterr().err
    assert not (tmp_path / "y.png").exists()


@pytest.mark.pairs
def test_device_peak_is_used_if_it_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reports its highest peak so far, 30 after initialization.

    Programs run in order of the memory they need, and only those that raise the peak have a measured peak.
    """
    seen = iter([30, 30, 50, 70])
    monkeypatch.setattr(
        "plimsoll.framework.metrics.memory.memory_in_use", lambda _: MemoryInUse(0, next(seen), 0, 0, 0)
    )
    program = SimpleNamespace(
        mesh=jax.sharding.Mesh(jax.devices()[:1], "x"),
        put=lambda batch: batch,
        init=lambda: 0,
        step=lambda state, batch: (state + 1, {}),
        experiment=SimpleNamespace(model=SimpleNamespace(vocab_size=8)),
        batch_specs={},
    )
    peaks = {"none": 70, "invert": 20, "full": 50}
    found = memory_vs_depth._measure(dict.fromkeys(peaks, program), peaks, 1)
    assert {name: one["measured_peak_bytes"] for name, one in found.items()} == {"invert": None, "full": 50, "none": 70}


def test_table_compares_with_none_at_the_same_depth() -> None:
    sizes = 1 << 20, 3 << 20, 2 << 20
    rows = [
        DepthRow("c", "t", name, depth, *sizes, fits, None, seconds, 2 * seconds)
        for name, depth, fits, seconds in [
            ("none", 4, True, 1.0), ("invert", 4, True, 1.25), ("none", 8, False, 2.0), ("invert", 8, True, 3.0)
        ]
    ]  # fmt: skip
    lines = [" ".join(line.split()) for line in table(rows).splitlines()]
    assert "invert 4 1.00 MiB 3.00 MiB 2.00 MiB 1250.0 ms 1.25 2500.0 ms 1.25" in lines
    assert "none 8 1.00 MiB 3.00 MiB (does not fit) 2.00 MiB 2000.0 ms 1.00 4000.0 ms 1.00" in lines
    assert "invert 8 1.00 MiB 3.00 MiB 2.00 MiB 3000.0 ms 1.50 6000.0 ms 1.50" in lines


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", COMPILERS)
def test_inversion_with_the_update_in_the_backward_pass_needs_the_same_at_any_depth(
    target: str, tmp_path: Path
) -> None:
    """Check the TPU and GPU compilers; the TPU's 128 MiB of on-chip memory would hide a smaller model's activations."""
    extra, *modules = COMPILERS[target]
    if not any(map(importlib.util.find_spec, modules)):
        pytest.skip(f"the compiler for {target} is not installed: pip install 'plimsoll-train[{extra}]'")
    rows, _ = run(
        tmp_path / "x.png",
        "--config=tools/depth_configs.py:language_large",
        "--policies=invert+in_backward",
        f"--target={target}",
    )
    found = temporaries(rows, "invert+in_backward")
    assert len(found) == 4
    assert min(found) > 200 << 20
    assert max(found) <= 1.02 * min(found)
