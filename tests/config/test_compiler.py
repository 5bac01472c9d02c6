"""Compiler options: set by config or by accelerator, and checked with the compiler itself."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework.config import ConfigError, config_for
from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.devices.compiler import Compiler, check_environment
from plimsoll.framework.devices.mesh import MeshShape
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.inference.scoring import Scorer
from plimsoll.framework.plan import cache
from plimsoll.framework.plan.build_report import compile_report
from plimsoll.framework.plan.memory_budget import measure_need
from plimsoll.framework.plan.targets import resolve, set_environment
from plimsoll.framework.program.experiment import AcceleratorRule
from plimsoll.framework.program.program import Program
from plimsoll.launch import cli
from tests.support import small


def mesh(name: str = "cpu:8"):
    return MeshShape().build(resolve(name).devices())


@pytest.fixture
def tpu():
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'plimsoll-train[plan-tpu]'")
    set_environment("v5e-8")


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"xla_cpu_enable_fast_mat": True},
            r"config\.compiler\.options\.xla_cpu_enable_fast_mat: the compiler reports: No such compile option: "
            r"'xla_cpu_enable_fast_mat'; did you mean 'xla_cpu_enable_fast_math'\?$",
        ),
        (
            {"xla_cpu_enable_fast_math": "false", "xla_backend_optimization_level": "two"},
            r"options\.xla_backend_optimization_level: the compiler reports: .*'two' is not a valid int32 value",
        ),
        ({"xla_cpu_enable_fast_math": "maybe"}, r"fast_math: the compiler reports: .*'maybe' is not a valid bool"),
        ({"xla_backend_optimization_level": 1.5}, r"'1\.5' is not a valid int32"),
        (
            {"xla_tpu_enable_latency_hiding_scheduler": True},
            r"latency_hiding_scheduler: an option for TPUs, but these devices are CPUs; set it for one "
            r"kind with accelerator_rules",
        ),
        ({"xla_gpu_enable_triton_gemm": True}, r"xla_gpu_enable_triton_gemm: an option for GPUs"),
    ],
)
def test_compiler_refusal_is_one_line(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        Compiler(options=options).check(mesh())
    assert "\n" not in str(caught.value)


def test_valid_options_and_no_options_pass():
    Compiler().check(mesh())
    Compiler(options={"xla_cpu_enable_fast_math": "true", "xla_backend_optimization_level": 1}).check(mesh())


def test_an_option_for_tpus_is_checked_by_their_compiler(tpu):
    good = {"xla_tpu_enable_latency_hiding_scheduler": "true", "xla_tpu_scoped_vmem_limit_kib": 65536}
    Compiler(options=good).check(mesh("v5e-8"))
    with pytest.raises(ValueError, match=r"schedule: .*; did you mean 'xla_tpu_enable_latency_hiding_scheduler'"):
        Compiler(options={"xla_tpu_enable_latency_hiding_schedule": True}).check(mesh("v5e-8"))
    with pytest.raises(ValueError, match=r"xla_tpu_scoped_vmem_limit_kib: the compiler reports: Failed to parse 'abc'"):
        Compiler(options={"xla_tpu_scoped_vmem_limit_kib": "abc"}).check(mesh("v5e-8"))
    with pytest.raises(ValueError, match=r"an option for GPUs, but these devices are TPUs"):
        Compiler(options={"xla_gpu_enable_latency_hiding_scheduler": True}).check(mesh("v5e-8"))


def test_a_thousand_chips_are_checked_in_seconds(tpu):
    pod = mesh("v5p-2048")
    start = time.monotonic()
    Compiler(options={"xla_tpu_enable_latency_hiding_scheduler": True}).check(pod)
    assert time.monotonic() - start < 15


def test_an_option_for_gpus_is_checked_by_their_compiler():
    pytest.importorskip("jax_cuda12_plugin", reason="no CUDA plugin of JAX: pip install 'plimsoll-train[plan-gpu]'")
    set_environment("h200x8")
    Compiler(options={"xla_gpu_enable_latency_hiding_scheduler": "true"}).check(mesh("h200x8"))
    with pytest.raises(ValueError, match=r"; did you mean 'xla_gpu_enable_latency_hiding_scheduler'"):
        Compiler(options={"xla_gpu_enable_latency_hiding_schedule": True}).check(mesh("h200x8"))
    with pytest.raises(ValueError, match=r"an option for TPUs, but these devices are GPUs"):
        Compiler(options={"xla_tpu_enable_latency_hiding_scheduler": True}).check(mesh("h200x8"))


@pytest.mark.pairs
def test_a_program_is_not_built_with_a_bad_option():
    experiment = small.experiment()
    experiment.override("compiler.options.xla_nope", "1")
    with pytest.raises(ValueError, match=r"config\.compiler\.options\.xla_nope: .*No such compile option"):
        small.program(experiment)


# --- from the config to the compiler ---------------------------------------------------------------------------------


def test_rules_and_overrides_compose():
    named = small.experiment()
    named.compiler.options = {"xla_dump_max_hlo_modules": 3, "xla_cpu_enable_fast_math": False}
    named.accelerator_rules = [
        config_for(AcceleratorRule, pattern="v5*", set={"compiler.options.xla_tpu_a": True, "memory.remat": "full"}),
        config_for(AcceleratorRule, pattern="v5p-*", set={"compiler.options.xla_tpu_b": 2}),
        config_for(AcceleratorRule, pattern="h200*", set={"compiler.options": {"xla_gpu_c": True}}),
    ]
    typed = [("compiler.options.xla_tpu_new", "true"), ("compiler.options.xla_tpu_b", "3")]
    command = cli.Command(None, "small", named, typed)  # pyright: ignore[reportArgumentType]
    config, lines = command.resolve("v5p-8")
    assert config.compiler.options == {
        **{"xla_dump_max_hlo_modules": 3, "xla_cpu_enable_fast_math": False},
        **{"xla_tpu_a": True, "xla_tpu_b": 3, "xla_tpu_new": True},
    }
    assert "rule v5*: compiler.options.xla_tpu_a - -> true" in lines
    config, _ = command.resolve("h200x8")
    assert config.compiler.options == {"xla_gpu_c": True, "xla_tpu_new": True, "xla_tpu_b": 3}
    assert command.resolve("cpu-8")[0].compiler.options["xla_dump_max_hlo_modules"] == 3
    with pytest.raises(ConfigError, match=r"compiler\.options\.xla_x: expected"):
        named.set_path("compiler.options.xla_x", [1])


@pytest.mark.parametrize("name", ["v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8"])
def test_default_accelerator_options_are_valid(tpu, name):
    devices = mesh(name)
    usual = Compiler().options_for(devices)
    assert bool(usual) == (name == "v6e-8")
    assert list(usual) == list(dict(spec_for(list(devices.devices.flat)).compiler_options)), "caches go by the order"
    Compiler(options=usual).check(devices)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["v5e-8", "v5p-8", "v6e-8"])
def test_options_that_hide_transfers_are_valid(tpu, name):
    devices = mesh(name)
    added = Compiler().options_for(devices, prefetches_state=True).items() - Compiler().options_for(devices).items()
    assert added
    Compiler(options=dict(added)).check(devices)


def test_default_cpu_options_are_valid_and_follow_xla_flags(monkeypatch: pytest.MonkeyPatch):
    devices = MeshShape().build(jax.devices()[:1])
    (name,) = usual = Compiler().options_for(devices)
    Compiler(options=usual).check(devices)  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=false --{name}=")
    assert Compiler().options_for(devices) == {}
    assert Compiler(options={name: "x"}).options_for(devices) == {name: "x"}


def test_gpu_default_allows_many_copies_and_can_be_overridden(monkeypatch: pytest.MonkeyPatch):
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    devices: Any = SimpleNamespace(devices=np.array([device], object))
    name = "xla_gpu_experimental_parallel_async_compute_limit"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert Compiler().options_for(devices) == {name: "64"}
    assert Compiler(options={name: 2}).options_for(devices) == {name: "2"}
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=4")
    assert Compiler().options_for(devices) == {}


def test_config_options_override_accelerator_defaults(tpu):
    devices, name = mesh("v6e-8"), "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    assert Compiler().options_for(devices)[name] is True
    assert Compiler(options={name: False}).options_for(devices)[name] is False
    assert Compiler(options={name: False}, use_accelerator_options=False).options_for(devices) == {name: False}


def test_environment_options_override_accelerator_defaults(tpu, monkeypatch: pytest.MonkeyPatch):
    devices, name = mesh("v6e-8"), "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    usual = Compiler().options_for(devices)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}=false")
    assert Compiler().options_for(devices) == {other: usual[other] for other in usual.keys() - {name}}


@pytest.mark.pairs
def test_every_program_is_compiled_with_the_options(tmp_path: Path):
    """The files that XLA dumps show this for training, evaluation and generation."""
    experiment = small.experiment(small.gpt2(stack__num_layers=1))
    experiment.compiler.options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": "true"}
    program = Program(experiment.instantiate(), jax.devices()[:1])
    state, _ = small.run(program, 1)
    program.evaluate(state, program.put(small.host_batch(program)))
    Generator(program, state)([[1, 2]], Sampling(2))
    list(Scorer(program, state).score([([1, 2, 3], 1)]))
    dumped = {path.name.split(".")[1] for path in tmp_path.glob("*after_optimizations.txt")}
    assert {"jit_init", "jit_step", "jit_evaluate", "jit__prefill", "jit__decode", "jit__score"} <= dumped


@pytest.mark.pairs
def test_training_and_plan_have_the_same_numbers():
    plain, told = small.experiment(), small.experiment()
    told.compiler.options = {"xla_disable_hlo_passes": "fusion"}  # changes the temporaries, and with them the peak
    peaks = [measure_need(Program(config.instantiate(), jax.devices()[:1])).peak for config in (plain, told)]
    assert peaks[0] != peaks[1]
    assert compile_report("small", told, resolve("cpu:1"), None, phases=False).device_peak_bytes == peaks[1]


def test_plan_cache_key_includes_the_options():
    experiment = small.experiment()
    one = cache.cache_path(experiment, target="cpu:1")
    experiment.override("compiler.options.xla_backend_optimization_level", "1")
    assert cache.cache_path(experiment, target="cpu:1") != one


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_unknown_flags_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    for good in ("", "--xla_cpu_enable_fast_math=true --xla_force_host_platform_device_count=8", "flags.txt"):
        monkeypatch.setenv("XLA_FLAGS", good)
        check_environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true --xla_gpu_enable_latency_hiding_schedular=true")
    message = r"^XLA_FLAGS: unknown flag --xla_gpu.*schedular; did you mean 'xla_gpu_enable_latency_hiding_sch"
    with pytest.raises(ValueError, match=message):
        check_environment()


@pytest.mark.pairs
def test_environment_check_agrees_with_xla():
    """XLA accepts a flag that the check knows; an unknown flag ends the process, and verbs exit with code 2."""
    plan_it = ["-m", "plimsoll", "plan", "--config=gpt2-124m", "--target=cpu:1", "--estimate"]
    for words, flag, code in (
        (["-c", "import jax; jax.devices()"], "--xla_cpu_enable_fast_math=true", 0),
        (["-c", "import jax; jax.devices()"], "--xla_nope=1", 1),
        (plan_it, "--xla_nope=1", 2),
    ):
        run = [sys.executable, *words]
        found = subprocess.run(run, env={**_environment(), "XLA_FLAGS": flag}, capture_output=True, text=True)
        assert found.returncode == code, found.stderr
    assert "\nerror: XLA_FLAGS: unknown flag --xla_nope" in f"\n{found.stderr}"


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
