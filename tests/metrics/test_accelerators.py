"""The accelerator table, checked against names that Cloud, jax and the driver use, and names made from devices."""

import dataclasses
import fnmatch
import subprocess
import sys

import jax
import pytest

from plimsoll.framework.devices.accelerators import ACCELERATORS, GIB, accelerator_name, find_spec, spec_for
from plimsoll.framework.devices.reserved_memory import get_limit_bytes


@dataclasses.dataclass
class Device:
    """The attributes of a jax device that the functions read."""

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
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000-server"),
        ("Tesla T4", "t4"),
        ("cpu", "cpu"),
    ],
)
def test_jax_device_kinds_and_names_resolve(kind, name):
    assert spec_for(kind).name == name
    assert spec_for(name) is spec_for(kind)
    assert spec_for([Device(kind)]) is spec_for(kind)


def test_names_and_kinds_mean_one_row():
    names = {spec.name for spec in ACCELERATORS}
    aliases = [alias for spec in ACCELERATORS for alias in spec.aliases]
    assert len(set(aliases)) == len(aliases)
    assert not names & set(aliases)
    for spec in ACCELERATORS:
        # A device that is only a compile target has the first kind of its row.
        assert spec_for([Device(spec.device_kinds[0], spec.platform)]) is spec
        for name in (spec.name, *spec.aliases):
            assert spec_for(name).name == spec.name
    kinds = [kind for spec in ACCELERATORS for kind in spec.device_kinds]
    shared_kinds = {kind for kind in kinds if kinds.count(kind) > 1}
    assert shared_kinds == {"NVIDIA GeForce RTX 4060 Ti"}  # distinguished by their memory


@pytest.mark.parametrize(
    ("taken_gib", "name"), [(None, "rtx4060ti-8"), (7.0, "rtx4060ti-8"), (14.3, "rtx4060ti-16"), (99, "rtx4060ti-16")]
)
def test_gpus_with_one_name_are_distinguished_by_memory(taken_gib, name):
    class Card(Device):
        def memory_stats(self):
            if taken_gib is None:
                raise RuntimeError("not of this process")
            return {"bytes_limit": int(taken_gib * GIB)}

    assert accelerator_name([Card("NVIDIA GeForce RTX 4060 Ti", "gpu")]) == f"{name}x1"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        *[
            ("4090", "rtx4090"),
            ("RTX 4090", "rtx4090"),
            ("rtx-4090", "rtx4090"),
            ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ],
        *[("A100-80GB", "a100-80"), ("a100_40", "a100-40"), ("H100", "h100"), ("h100-sxm", "h100"), ("t4", "t4")],
        *[("H100 NVL", "h100-nvl"), ("h100pcie", "h100-pcie"), ("Tesla T4", "t4"), ("rtx a6000", "a6000")],
        *[("RTX 6000 Ada", "rtx6000ada"), ("rtx pro 6000", "rtxpro6000"), ("4060ti-16gb", "rtx4060ti-16")],
        *[("v5litepod", "v5e"), ("v7", "tpu7x"), ("trillium", "v6e")],
    ],
)
def test_names_are_understood_as_people_type_them(typed, name):
    assert spec_for(typed).name == name


@pytest.mark.parametrize("typed", ["a100", "v100", "4060ti", "rtx6000", "", "90"])
def test_unknown_gpus_are_not_guessed(typed):
    assert find_spec(typed) is None


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (devices("TPU v5 lite", 8), "v5e-8"),
        (devices("TPU v5 lite", 256), "v5e-256"),
        (devices("TPU v6 lite", 16), "v6e-16"),
        (devices("TPU v5", 4, num_cores=2), "v5p-8"),
        (devices("TPU v5", 512, num_cores=2), "v5p-1024"),
        (devices("TPU v4", 4, num_cores=2), "v4-8"),
        (devices("TPU v4", 8, num_cores=1), "v4-8"),  # the same four chips, listed as cores
        (devices("TPU7x", 8), "tpu7x-8"),
        (devices("NVIDIA H200", 8, platform="gpu"), "h200x8"),
        (devices("NVIDIA A100-SXM4-80GB", 1, platform="gpu"), "a100-80x1"),
        (devices("cpu", 8, platform="cpu"), "cpu-8"),
        (devices("TPU v5 lite", 4, slice_index=0) + devices("TPU v5 lite", 4, slice_index=1), "2xv5e-4"),
        (devices("NVIDIA L4", 2, platform="gpu"), "l4x2"),
        (devices("NVIDIA GeForce RTX 2080", 2, platform="gpu"), "geforce-rtx-2080x2"),
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


def test_local_devices_have_a_name():
    assert accelerator_name(jax.devices()) == f"cpu-{len(jax.devices())}"
    assert spec_for(jax.devices()).peak_flops("float32") is None


def test_figures_are_per_jax_device():
    v5e, v7, v4 = (spec_for(name) for name in ("v5e", "tpu7x", "v4"))
    assert get_limit_bytes(v5e) == 15.75 * GIB  # the number in the compiler's out-of-memory message
    assert v5e.peak_flops("bfloat16") == 197e12
    assert v7.devices_per_chip * v7.peak_flops() == 2307e12  # pyright: ignore[reportOperatorIssue]
    core = spec_for(devices("TPU v4", 2, num_cores=1))
    assert core.devices_per_chip == 2
    assert 2 * core.peak_flops() == v4.peak_flops()  # pyright: ignore[reportOperatorIssue]
    assert get_limit_bytes(core) == 15.25 * GIB


def test_peak_is_for_the_default_precision():
    assert spec_for("v5e").peak_flops("float32") == 197e12  # bfloat16 passes
    assert spec_for("a100-80").peak_flops("float32") == 156e12  # TF32
    assert spec_for("h200").peak_flops("bfloat16") == 989.5e12  # dense, not the sparse 1979
    assert spec_for("h200").peak_flops("float64") is None
    assert spec_for("cpu").peak_flops("bfloat16") is None
    t4 = spec_for("t4")  # no bfloat16 and no TF32 in its tensor cores
    assert [t4.peak_flops(dtype) for dtype in ("bfloat16", "float16", "float32")] == [None, 65e12, 8.1e12]
    assert spec_for("rtxpro6000-server").peak_flops("float32") is None  # TF32; NVIDIA has not published its rate


@pytest.mark.parametrize(
    ("name", "fp8", "int8"),
    # Dense, in TFLOP/s and TOP/s, from the makers' pages; data sheets of GPUs round them.
    [
        ("h100", 1979, 1979),
        ("h100-pcie", 1513, 1513),
        ("h200", 1979, 1979),
        ("b200", 4500, 4500),
        ("a100-80", None, 624),
        ("v100-16", None, None),
        ("v4", None, None),
        ("v5e", None, 394),
        ("v6e", None, 1836),
        ("tpu7x", 2307, None),
    ],
)
def test_peaks_of_8_bit_products_are_those_of_data_sheets(name, fp8, int8):
    spec = spec_for(name)
    for dtype, published in (("fp8", fp8), ("int8", int8)):
        peak = spec.peak_flops(dtype)
        assert (peak is None) == (published is None)
        if peak is not None:
            assert peak == pytest.approx(published * 1e12, rel=2e-3)


@pytest.mark.parametrize("spec", ACCELERATORS, ids=lambda spec: spec.device_kinds[0])
def test_rows_are_plausible(spec):
    if spec.platform == "cpu":
        assert get_limit_bytes(spec) is None
        return
    assert 6 * GIB < get_limit_bytes(spec) <= spec.memory_bytes < 200 * GIB
    assert spec.peak_bf16_flops is None or 2e13 < spec.peak_bf16_flops < 3e15
    assert 2e11 < spec.hbm_bytes_per_second < 1e13


# FLOP per cycle of an SM for dense bfloat16 matmuls (7.x: float16) accumulated in float32, on server and workstation
# cards, from the CUDA programming guide and NVIDIA's whitepapers. GeForce cards have half of this rate.
SM_FLOPS = {"7.0": 1024, "7.5": 1024, "8.0": 2048, "8.6": 1024, "8.9": 1024, "9.0": 4096, "10.0": 8192, "12.0": 1024}


@pytest.mark.parametrize(
    "spec",
    # NVIDIA has published neither clock nor rate of the server edition.
    [spec for spec in ACCELERATORS if spec.platform == "gpu" and spec.name != "rtxpro6000-server"],
    ids=lambda spec: spec.name,
)
def test_published_rates_match_the_multiprocessor_counts(spec):
    cycles = spec.multiprocessors * spec.clock_ghz * 1e9
    fp32_units = 64 if spec.compute_capability in ("7.0", "7.5", "8.0") else 128
    sm_flops = SM_FLOPS[spec.compute_capability] / (2 if "GeForce" in spec.device_kinds[0] else 1)
    peak = spec.peak_flops("float16")
    # The maximum clock is up to 14% above the clock during matmuls.
    assert 0.86 < peak / (cycles * sm_flops) < 1.02
    assert 0.97 < spec.peak_f32_flops / (cycles * fp32_units * 2) < 1.02
    if spec.peak_tf32_flops:
        assert spec.peak_tf32_flops == pytest.approx(peak / 2, rel=0.02)


def test_invalid_names_are_reported():
    with pytest.raises(ValueError, match=r"unknown accelerator 'v5x'; nearest: .*v5e"):
        spec_for("v5x")
    with pytest.raises(ValueError, match="one kind"):
        accelerator_name(devices("TPU v4", 1) + devices("TPU v5", 1))
    with pytest.raises(ValueError, match="no devices"):
        accelerator_name([])


def test_unknown_device_trains_without_figures():
    spec = spec_for(devices("NVIDIA L40", 1, platform="gpu"))
    assert (spec.name, spec.platform, get_limit_bytes(spec), spec.peak_flops()) == ("l40", "gpu", None, None)


def test_importing_metrics_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from plimsoll.framework.devices import accelerators\n"
        "from plimsoll.framework.metrics import memory, plot, throughput, writers\n"
        "from plimsoll.framework.terminal import progress, tables\n"
        "print([m for m in ('jax', 'numpy', 'rich', 'tensorboardX', 'matplotlib', 'wandb') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
