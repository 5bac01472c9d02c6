"""Targets: figures published by Google Cloud and NVIDIA, the compilers' numbers, and errors for wrong names."""

import dataclasses
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from plimsoll.framework.devices.accelerators import ACCELERATORS, GIB, accelerator_name, spec_for
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.plan import gpu_description, targets
from plimsoll.framework.plan.targets import resolve

_MACHINE_GIB = (
    int(subprocess.check_output(["sed", "-n", "s/^MemTotal: *\\([0-9]*\\) kB/\\1/p", "/proc/meminfo"])) / 2**20
)


@pytest.fixture
def tpu():
    """Use the TPU compiler on a machine without a TPU."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'plimsoll-train[plan-tpu]'")
    targets.set_environment("v5e-16")


@pytest.mark.parametrize(
    ("name", "canonical", "devices", "hosts", "topology", "limit_gib", "host_gb"),
    [  # devices and hosts are from the tables in the Cloud docs, where the memory of v5e VMs is in GiB
        ("v5e-1", "v5e-1", 1, 1, "1x1", 15.75, 48 * 1.024**3),
        ("v5e-8", "v5e-8", 8, 1, "2x4", 15.75, 384 * 1.024**3),
        ("v5e-16", "v5e-16", 16, 4, "4x4", 15.75, 192 * 1.024**3),
        ("v5e-256", "v5e-256", 256, 64, "16x16", 15.75, 192 * 1.024**3),
        ("2xv5e-256", "2xv5e-256", 512, 128, "16x16", 15.75, 192 * 1.024**3),
        ("v5litepod-16", "v5e-16", 16, 4, "4x4", 15.75, 192 * 1.024**3),
        ("1xv5e-16", "v5e-16", 16, 4, "4x4", 15.75, 192 * 1.024**3),
        ("tpu:v5e:4x4", "v5e-16", 16, 4, "4x4", 15.75, 192 * 1.024**3),
        ("3xtpu:v5e:2x8", "3xv5e-16", 48, 12, "2x8", 15.75, 192 * 1.024**3),
        ("v6e-8", "v6e-8", 8, 1, "2x4", 31.25, 1440),
        ("v6e-64", "v6e-64", 64, 16, "8x8", 31.25, 720),
        ("v4-8", "v4-8", 4, 1, "2x2x1", 30.75, None),
        ("v4-1024", "v4-1024", 512, 128, "8x8x8", 30.75, None),
        ("v5p-8", "v5p-8", 4, 1, "2x2x1", 95.74, 448),
        ("v5p-1024", "v5p-1024", 512, 128, "8x8x8", 95.74, 448),
        ("v5p-12288", "v5p-12288", 6144, 1536, "16x16x24", 95.74, 448),
        ("tpu7x-8", "tpu7x-8", 8, 1, "2x2x1", 94.75, 960),
        ("tpu7x-128", "tpu7x-128", 128, 16, "4x4x4", 94.75, 960),
        ("h200", "h200x1", 1, 1, "", 0.987 * 139.8, None),
        ("h200x8", "h200x8", 8, 1, "", 0.942 * 139.8, None),
        ("h100x16", "h100x16", 16, 2, "", 0.897 * 79.11, None),
        ("a100-40x8", "a100-40x8", 8, 1, "", 0.819 * 39.42, None),
        ("a100-80", "a100-80x1", 1, 1, "", 0.981 * 79.26, None),
        ("4090", "rtx4090x1", 1, 1, "", 0.936 * 23.52, None),
        ("RTX-4090x16", "rtx4090x16", 16, 2, "", 0.902 * 23.52, None),
        ("gh200x2", "gh200x2", 2, 2, "", 0.969 * 94.5, 480),
        ("gb200x8", "gb200x8", 8, 2, "", 0.951 * 184.31, 960),
        ("v7-8", "tpu7x-8", 8, 1, "2x2x1", 94.75, 960),
        ("cpu:8", "cpu-8", 8, 1, "", _MACHINE_GIB / 8, _MACHINE_GIB * 1.024**3),
        ("cpu-8", "cpu-8", 8, 1, "", _MACHINE_GIB / 8, _MACHINE_GIB * 1.024**3),
    ],
)
def test_names(monkeypatch, name, canonical, devices, hosts, topology, limit_gib, host_gb):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    target = resolve(name)
    assert (target.name, target.num_devices, target.num_processes) == (canonical, devices, hosts)
    assert target.topology == topology
    assert target.spec is spec_for(
        re.sub(r"^\dx", "", canonical).rpartition("x" if target.platform == "gpu" else "-")[0]
    )
    assert target.limit_bytes == (None if limit_gib is None else pytest.approx(limit_gib * GIB, rel=1e-3))
    assert target.host_limit_bytes == (None if host_gb is None else pytest.approx(host_gb * 1e9, rel=1e-6))
    assert resolve(canonical) == target or ":" in name  # names are stable, but do not contain a custom topology


def test_target_name_size_matches_the_compiler(tpu):
    for family, cores, number in (("v4", 2, 9), ("v5e", 1, 8), ("v5p", 2, 9), ("v6e", 1, 8), ("tpu7x", 2, 9)):
        sizes = [size for size in range(1, 2049) if _is_target(f"{family}-{size}")]
        assert len(sizes) == number
        for size in sizes:
            target = resolve(f"{family}-{size}")
            devices = target.devices()
            assert len(devices) == target.num_devices == (size if family == "tpu7x" else size // cores)
            assert accelerator_name(devices) == target.name == f"{family}-{size}"
            assert spec_for(devices) is target.spec
            assert len({device.process_index for device in devices}) == target.num_processes


def _is_target(name: str) -> bool:
    try:
        return bool(resolve(name))
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["v5e-1", "v5e-8", "v4-8", "v5p-16", "v6e-16", "2xv5e-4", "2xtpu:v6e:2x2"])
def test_compiles(tpu, name):
    check_that_it_compiles(name)


@pytest.mark.parametrize(
    ("name", "rings"),
    [  # "all 4x4x4 and larger slices have full 3D torus": docs.cloud.google.com/tpu/docs/v5p; 2D: the scaling book
        ("v5p-64", (False, False, False)),  # 2x4x4
        ("v5p-128", (True, True, True)),
        ("tpu:v5p:4x4", (False, False, False)),
        ("v4-1024", (True, True, True)),
        ("v5e-64", (False, False, False)),
        ("v6e-128", (False, True, False)),  # 8x16
        ("2xv5e-256", (True, True, False)),
    ],
)
def test_long_dimensions_are_rings(name: str, rings: tuple[bool, bool, bool]) -> None:
    assert resolve(name).rings == rings


def test_a_cube_gathers_without_an_all_reduce(tpu: None) -> None:
    mesh = MeshShape().build(resolve("v5p-128").devices())
    cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["fsdp"], []))
    weight = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=cut)
    gathered = jax.jit(lambda weight: weight, out_shardings=whole).lower(weight).compile()
    collectives = set(re.findall(r"(all-\w+)(?:-start)?\(", gathered.as_text()))
    assert collectives == {"all-gather"}


@pytest.mark.parametrize(
    "name",
    # Each compute capability once, several hosts, and hosts joined by NVLink.
    ["v100-16", "t4", "a30", "4090", "a6000", "h200", "b200", "5090", "h200x8", "h100x16", "a100-80x2", "gb200x8"],
)
def test_compiles_for_gpus(name):
    if not gpu_description.installed_cuda():
        pytest.skip("no CUDA plugin of JAX: pip install 'plimsoll-train[plan-gpu]'")
    targets.set_environment(name)
    check_that_it_compiles(name)


def check_that_it_compiles(name: str) -> None:
    target = resolve(name)
    mesh = MeshShape().build(target.devices())
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["fsdp"], []))
    weight = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=rows)
    batch = jax.ShapeDtypeStruct((8 * target.num_devices, 256), jnp.bfloat16, sharding=rows)

    def step(weight, batch):
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(batch @ w), dtype="float32"))(weight)
        return loss, weight - gradient

    memory: Any = jax.jit(step, out_shardings=(everywhere, rows)).lower(weight, batch).compile().memory_analysis()
    # Each device has its rows of the weight and 8 rows of the batch, and gathers the whole weight for the product.
    arguments = (256 * 256 // target.num_devices + 8 * 256) * 2
    gathered = 256 * 256 * 2 if target.num_devices > 1 else 0
    assert memory.argument_size_in_bytes == arguments
    # Before compute capability 8.0, a bfloat16 product runs as float32 in cuBLAS, with a workspace of 4 MiB.
    workspace = 2**22 if (target.spec.compute_capability or "").startswith("7.") else 0
    assert arguments + gathered <= memory.peak_memory_in_bytes < 2**20 + workspace


@pytest.mark.parametrize(
    ("name", "cuda_cores", "shared_kb", "l2_mb", "gb_per_s"),
    # From NVIDIA's whitepapers: CUDA cores of the SXM boards, maximum KB of shared memory per block, MB of L2, GB/s of
    # HBM.
    [
        ("h200", 16896, 227, 60, 4800),
        ("h100", 16896, 227, 50, 3350),
        ("h100-pcie", 14592, 227, 50, 2039),
        ("a100-80", 6912, 163, 40, 2039),
        ("a100-40", 6912, 163, 40, 1555),
        ("rtx3060", 3584, 99, 2.25, 360),
        ("rtx4090", 16384, 99, 72, 1008),
        ("rtx5090", 21760, 99, 96, 1792),
        ("b200", 18944, 227, 126.5, 7672),
    ],
)
def test_gpus_are_described_as_published(name, cuda_cores, shared_kb, l2_mb, gb_per_s):
    spec = spec_for(name)
    text = gpu_description.gpu_description(spec)
    field = {key: float(value) for key, value in re.findall(r"(\w+): ([\d.]+)", text)}
    major, minor = spec.compute_capability.split(".")
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert field["core_count"] * field["fpus_per_core"] == cuda_cores
    assert field["shared_memory_per_block_optin"] == shared_kb * 1024 == field["shared_memory_per_core"] - 1024
    assert field["l2_cache_size"] == l2_mb * 2**20
    assert field["memory_bandwidth"] == pytest.approx(gb_per_s * 1e9, rel=1e-3)
    assert field["device_memory_size"] == spec.memory_bytes
    assert f'device_description_str: "{spec.device_kinds[0]}"' in text


@pytest.mark.parametrize("spec", [spec for spec in ACCELERATORS if spec.platform == "gpu"], ids=lambda spec: spec.name)
def test_every_gpu_can_be_described(spec):
    assert f"core_count: {spec.multiprocessors} " in gpu_description.gpu_description(spec, cuda=13)


def test_unknown_gpu_facts_are_not_guessed():
    unknown = dataclasses.replace(spec_for("l4"), l2_bytes=None, clock_ghz=None)
    with pytest.raises(
        ValueError, match=r"^l4: no compiler description, because clock_ghz, l2_bytes is unknown; .*estimate"
    ):
        gpu_description.gpu_description(unknown)
    newer = dataclasses.replace(spec_for("l4"), compute_capability="13.0")
    with pytest.raises(
        ValueError, match=r"^l4: no compiler description for compute capability 13.0; known: 7.0, .*12.0"
    ):
        gpu_description.gpu_description(newer)


def test_the_report_says_when_a_newer_architecture_was_compiled_for(monkeypatch):
    monkeypatch.setattr(targets, "installed_cuda", lambda: 13)
    note = "compiled for compute capability 7.5, the nearest that CUDA 13 compiles for: v100-16 has 7.0"
    assert resolve("v100-16x8").compiler_notes == [note]
    assert resolve("t4").compiler_notes == resolve("v5e-8").compiler_notes == []
    assert "{ major: 7 minor: 5 }" in gpu_description.gpu_description(spec_for("v100-16"), cuda=13)
    monkeypatch.setattr(targets, "installed_cuda", lambda: 12)
    assert resolve("v100-16x8").compiler_notes == []


def test_only_a_fraction_on_gpus_is_usable(monkeypatch):
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    for name in names:  # `plimsoll train` sets one of them if the environment does not
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, "0.5")
        assert resolve("a100-80").limit_bytes == 85_100_068_864 // 2
        monkeypatch.delenv(name)
    assert resolve("v5e-8").limit_bytes == 15.75 * GIB


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-24", r"'v5e-24': no such size; nearest: v5e-16, v5e-32$"),
        ("v5e-512", r"nearest: v5e-256$"),
        ("2xv5e-2", r"nearest: 2xv5e-1, 2xv5e-4$"),
        ("v5p-4", r"nearest: v5p-8$"),  # counted in cores; one host has 8
        ("h200x12", r"nearest: h200x8, h200x16$"),
        ("h200x0", r"nearest: h200x1$"),
        ("h200x1000000001", r"nearest: h200x1000000000, h200x1000000008$"),
        ("tpu:v5e:0x4", r"unknown target .*nearest: tpu:v5e:2x2"),
        ("v5-16", r"unknown target 'v5-16'; nearest: .*v5e-16"),
        ("h20", r"unknown target 'h20'; nearest: .*h200.*; all: plimsoll plan --targets$"),
        ("rtx4091x8", r"unknown target 'rtx4091x8'; nearest: rtx4090x8"),
        ("a100x8", r"unknown target 'a100x8'; nearest: a100-40x8, a100-80x8"),
        ("4060ti", r"unknown target '4060ti'; nearest: rtx4060ti-8, rtx4060ti-16;"),
        ("2x4090", r"unknown target '2x4090'; nearest: rtx4090"),
        ("4090x0", r"'4090x0': no such size; nearest: rtx4090x1$"),
        ("gb200x6", r"nearest: gb200x4, gb200x8$"),
        ("gb200x76", r"nearest: gb200x72, gb200x144$"),
        ("cpu:0", r"unknown target 'cpu:0'; nearest: cpu:8"),
        ("", r"unknown target ''; nearest: v5e-16, v5p-8, h200x8, rtx4090, cpu:8"),
    ],
)
def test_unknown_targets_suggest_the_nearest_names(name, message):
    with pytest.raises(ValueError, match=message):
        resolve(name)


def test_topology_that_the_compiler_refuses(tpu):
    with pytest.raises(ValueError, match=r"no compiler for the topology v5e:3x3: .*divisible"):
        resolve("tpu:v5e:3x3").devices()


def test_missing_compilers_are_named(monkeypatch):
    for module in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ValueError,
        match=r"^planning for v5e-8 needs libtpu: pip install -e '\.\[plan-tpu\]'; .*--estimate needs no compiler$",
    ):
        resolve("v5e-8").devices()
    with pytest.raises(ValueError, match=r"h200x8 needs the CUDA plugin of JAX: pip install -e '\.\[plan-gpu\]';"):
        resolve("h200x8").devices()


def test_local_devices():
    here = jax.devices()
    assert resolve("local").devices() == here
    assert (resolve("local").name, resolve("local").num_processes) == (f"cpu-{len(here)}", 1)
    assert resolve("cpu:2").devices() == here[:2]
    with pytest.raises(ValueError, match=f"cpu-4096: JAX has started with only {len(here)} CPU devices"):
        resolve("cpu:4096").devices()


def python(code: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TPU_", "XLA_", "JAX_"))}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=kept | environment)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.strip()


@pytest.mark.pairs
def test_cpu_devices_are_made_before_jax_starts():
    code = "from plimsoll.framework.plan.targets import *; print(len(resolve('cpu:5').devices()))"
    assert python(code, JAX_PLATFORMS="cpu") == "5"


def test_a_target_is_resolved_without_jax():
    code = (
        "import sys; from plimsoll.framework.plan.targets import resolve\n"
        "print(resolve('h200x16').num_devices, 'jax' in sys.modules)"
    )
    assert python(code) == "16 False"


def test_unset_environment_gets_defaults_and_libtpu_is_quiet():
    pytest.importorskip("libtpu")
    code = (
        "import os; from plimsoll.framework.plan.targets import *; set_environment('v5e-16')\n"
        "import jax; print(len(resolve('v5e-16').devices()), jax.default_backend(), os.environ['TPU_WORKER_HOSTNAMES'])"
    )
    assert python(code, TPU_WORKER_HOSTNAMES="10.0.0.1") == "16 cpu 10.0.0.1"  # nothing on stderr: see python()
    before = dict(os.environ)
    targets.set_environment("local")
    assert dict(os.environ) == before
