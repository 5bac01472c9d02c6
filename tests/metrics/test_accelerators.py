"""The table of accelerators against names that Cloud, jax and the driver use, and names made from devices."""

import dataclasses
import fnmatch
import subprocess
import sys

import jax
import pytest

from framework.devices.accelerators import ACCELERATORS, GIB, accelerator_name, spec_for


@dataclasses.dataclass
class Device:
    """What the functions look at in a jax device."""

    device_kind: str
    platform: str = "tpu"
    slice_index: int | None = None
    num_cores: int | None = None


def devices(kind: str, count: int, **fields) -> list[Device]:
    return [Device(kind, **fields) for _ in range(count)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("cpu", "cpu"),
    ],
)
def test_jax_device_kinds_and_names_find_their_row(kind, name):
    assert spec_for(kind).name == name
    assert spec_for(name) is spec_for(kind)
    assert spec_for([Device(kind)]) is spec_for(kind)


def test_kinds_are_unique():
    kinds = [kind for spec in ACCELERATORS for kind in spec.device_kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (devices("TPU v5 lite", 8), "v5e-8"),
        (devices("TPU v5 lite", 256), "v5e-256"),
        (devices("TPU v6 lite", 16), "v6e-16"),
        (devices("TPU v5", 4, num_cores=2), "v5p-8"),
        (devices("TPU v5", 512, num_cores=2), "v5p-1024"),
        (devices("TPU v4", 4, num_cores=2), "v4-8"),
        (devices("TPU v4", 8, num_cores=1), "v4-8"),  # the same four chips, seen as cores
        (devices("TPU7x", 8), "tpu7x-8"),
        (devices("NVIDIA H200", 8, platform="gpu"), "h200x8"),
        (devices("NVIDIA A100-SXM4-80GB", 1, platform="gpu"), "a100-80x1"),
        (devices("cpu", 8, platform="cpu"), "cpu-8"),
        (devices("TPU v5 lite", 4, slice_index=0) + devices("TPU v5 lite", 4, slice_index=1), "2xv5e-4"),
        (devices("NVIDIA L4", 2, platform="gpu"), "l4x2"),
        (devices("TPU v3", 8), "tpu-v3-8"),
    ],
)
def test_accelerator_name(found, name):
    assert accelerator_name(found) == name


def test_names_serve_as_fnmatch_subjects():
    one, two = accelerator_name(devices("TPU v5 lite", 16)), "2xv5e-256"
    assert fnmatch.fnmatch(one, "v5e-*")
    assert not fnmatch.fnmatch(two, "v5e-*")
    assert fnmatch.fnmatch(two, "*v5e-*")


def test_the_devices_of_this_process_have_a_name():
    assert accelerator_name(jax.devices()) == f"cpu-{len(jax.devices())}"
    assert spec_for(jax.devices()).peak_flops("float32") is None


def test_figures_are_per_jax_device():
    v5e, v7, v4 = (spec_for(name) for name in ("v5e", "tpu7x", "v4"))
    assert v5e.limit_bytes == 15.75 * GIB  # the figure in the compiler's out-of-memory message
    assert v5e.peak_flops("bfloat16") == 197e12
    assert v7.devices_per_chip * v7.peak_flops() == 2307e12  # pyright: ignore[reportOperatorIssue]
    core = spec_for(devices("TPU v4", 2, num_cores=1))
    assert core.devices_per_chip == 2
    assert 2 * core.peak_flops() == v4.peak_flops()  # pyright: ignore[reportOperatorIssue]
    assert core.limit_bytes == 15.25 * GIB


def test_peak_is_that_of_the_default_precision():
    assert spec_for("v5e").peak_flops("float32") == 197e12  # bfloat16 passes
    assert spec_for("a100-80").peak_flops("float32") == 156e12  # TF32
    assert spec_for("h200").peak_flops("bfloat16") == 989.5e12  # dense, not the sparse 1979
    assert spec_for("h200").peak_flops("float64") is None
    assert spec_for("cpu").peak_flops("bfloat16") is None


@pytest.mark.parametrize("spec", ACCELERATORS, ids=lambda spec: spec.device_kinds[0])
def test_rows_are_plausible(spec):
    if spec.platform == "cpu":
        assert spec.limit_bytes is None
        return
    assert 8 * GIB < spec.limit_bytes <= spec.memory_bytes < 200 * GIB
    assert 1e14 < spec.peak_bf16_flops < 2e15
    assert spec.peak_tf32_flops is None or 1e13 < spec.peak_tf32_flops < spec.peak_bf16_flops


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"unknown accelerator 'v5x'; nearest: .*v5e"):
        spec_for("v5x")
    with pytest.raises(ValueError, match="one kind"):
        accelerator_name(devices("TPU v4", 1) + devices("TPU v5", 1))
    with pytest.raises(ValueError, match="no devices"):
        accelerator_name([])


def test_unknown_device_trains_without_figures():
    spec = spec_for(devices("NVIDIA L4", 1, platform="gpu"))
    assert (spec.name, spec.platform, spec.limit_bytes, spec.peak_flops()) == ("l4", "gpu", None, None)


def test_importing_metrics_imports_nothing_heavy():
    code = (
        "import sys, framework.devices.accelerators, framework.metrics.writers, framework.terminal.progress\n"
        "import framework.metrics.throughput, framework.metrics.memory, framework.terminal.tables\n"
        "import framework.metrics.plot, framework.metrics.throughput\n"
        "print([m for m in ('jax', 'numpy', 'rich', 'tensorboardX', 'matplotlib', 'wandb') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
