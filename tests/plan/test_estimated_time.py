"""The estimated time of a step: its parts add up, from measured or published rates."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from plimsoll.extras.calibration import measure
from plimsoll.extras.calibration.workloads import workloads
from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.compilation import compile_for
from plimsoll.framework.plan.hlo import Module
from plimsoll.framework.plan.step_time import TpuRates, count, device_rates
from plimsoll.framework.plan.step_time.compiled_time import estimate_compiled_time
from plimsoll.framework.plan.step_time.cpu_time import cpu_time
from plimsoll.framework.plan.step_time.device_rates import DeviceRates, TimeCurve, assume_cpu_rates, assume_gpu_rates
from plimsoll.framework.plan.step_time.gpu_time import gpu_time
from plimsoll.framework.plan.step_time.time_breakdown import PARTS, StepTime
from plimsoll.framework.plan.step_time.tpu_time import StepProgram, tpu_time
from plimsoll.launch import calibrate, plan
from tests.plan.test_step_time import RECORDED as TPU_STEP
from tests.tools.test_gpu_program import RECORDED as GPU_STEP

SIDE = 512
FLOPS = 2 * SIDE**3


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def compile_product():
    weights = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    return compile_for(jax.jit(jnp.matmul).lower(weights, weights), "cpu")


# --- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_keeps_the_last_rate():
    curve = TimeCurve(((10.0, 1.0), (1000.0, 4.0)))
    assert curve.seconds(0) == 0
    assert curve.seconds(1) == 1.0
    assert curve.seconds(10) == pytest.approx(1.0)
    assert curve.seconds(100) == pytest.approx(2.0)
    assert curve.seconds(1000) == pytest.approx(4.0)
    assert curve.seconds(10_000) == pytest.approx(40.0)


def test_constant_rate_curve_has_a_startup_time():
    curve = TimeCurve.from_rate(1e12, start=1e-6)
    assert curve.seconds(1e12) == pytest.approx(1.0, rel=0.01)
    assert curve.seconds(1.0) == pytest.approx(1e-6, rel=0.01)


# --- programs --------------------------------------------------------------------------------------------------------


def test_cpu_matmul_time_follows_the_curve():
    module = compile_product().buffers.module
    rates = assume_cpu_rates(cores=2)
    seconds = cpu_time(module, rates, peak_bytes=1 << 30).products
    assert seconds == pytest.approx(rates.curve("product f32").seconds(FLOPS), rel=0.01)


def test_exponentials_on_cpu_cost_more_than_additions():
    def seconds(function):
        rows = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
        module = compile_for(jax.jit(function).lower(rows), "cpu").buffers.module
        return cpu_time(module, assume_cpu_rates(cores=2), peak_bytes=1 << 30).others

    assert seconds(lambda rows: jnp.exp(jnp.tanh(jnp.exp(rows)))) > 1.5 * seconds(lambda rows: rows + 1.0)


def test_cpu_devices_share_the_cores():
    product = compile_product()
    one = estimate_compiled_time([product], targets.resolve("cpu:1"), product.peak)
    eight = estimate_compiled_time([product], targets.resolve("cpu:8"), product.peak)
    assert eight.matrix_units == pytest.approx(8 * one.matrix_units)


def test_tpu_time_parts_match_the_count():
    module = Module(TPU_STEP.read_text())
    rates = TpuRates.look_up(spec_for("v5e"))
    parts = tpu_time(module, rates)
    counted = count([StepProgram(module, 1)], rates)
    not_hidden = (counted.not_hidden_at_all_links + counted.not_hidden_at_two_links) / 2
    whole = parts.products + parts.others + parts.links + parts.host_waits
    assert whole == pytest.approx(counted.middle + not_hidden)
    assert parts.products > 0
    assert parts.host_waits >= 0


def test_gpu_time_exceeds_the_sum_over_ideal_kernels():
    h100 = spec_for("h100")
    rates = assume_gpu_rates(h100)
    module = Module(GPU_STEP.read_text())
    time = gpu_time(module, h100, rates)
    flops_at_peak = sum(
        kernel.flops * kernel.runs / h100.peak_bf16_flops for kernel in gpu_kernels(module) if kernel.dtype == "bf16"
    )
    assert time.products > flops_at_peak
    assert min(time.products, time.others, time.links, time.host_waits) >= 0


def gpu_kernels(module):
    from plimsoll.framework.plan.step_time.gpu_time import GpuRates, iter_kernels

    return list(iter_kernels(module, GpuRates.look_up(spec_for("h100"))))


@pytest.mark.parametrize(("name", "share"), [("4090", 0.85), ("5090", 0.85), ("a6000", 0.7), ("h100", 0.7)])
def test_geforce_cards_come_closer_to_their_peak(name, share):
    spec = spec_for(name)
    rate = assume_gpu_rates(spec).curve("product bf16").rate(1e15)
    assert rate == pytest.approx(share * spec.peak_bf16_flops, rel=0.01)


def test_a_gpu_without_published_peaks_has_no_time():
    assert assume_gpu_rates(spec_for("cpu")) is None


# --- reports ---------------------------------------------------------------------------------------------------------


def test_utilization_and_rate_follow_from_the_seconds():
    time = StepTime(0.5, 0.25, 0.125, 0.1, 0.025, "by hand")
    report = time.report(tokens=1000, model_flops=3e12, peak_flops=1e13)
    assert report.seconds == pytest.approx(1.0)
    assert report.tokens_per_second == pytest.approx(1000)
    assert report.model_flops_utilization == pytest.approx(0.3)
    assert report.bound_by == "matrix units"
    assert list(report.parts) == list(PARTS)


@pytest.mark.pairs
@pytest.mark.parametrize("flags", [["--estimate"], ["--step_only"]])
def test_plan_ends_with_the_step_time(flags, tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert plan.main(["--config=nanogpt-cpu", "--target=cpu:1", f"--json={file}", *flags]) == 0
    time = json.loads(file.read_text())["time"]
    assert sum(time["parts"].values()) == pytest.approx(time["seconds"])
    assert 0.001 < time["seconds"] < 1.0
    shown = capsys.readouterr().out
    assert "time, estimated" in shown
    assert "tokens a second" in shown


@pytest.mark.pairs
def test_settings_are_compared_by_time_too(capsys):
    words = ["--config=llama2-7b", "--target=v5e-16", "--estimate", "--config.data.global_batch_size=16"]
    assert plan.main([*words, "--compare=memory.remat=dots,full"]) in (0, 4)
    header = next(line for line in capsys.readouterr().out.splitlines() if "bound by" in line)
    assert "step" in header


@pytest.mark.pairs
def test_estimate_grows_with_recomputation(tmp_path):
    seconds = {}
    for remat in ("none", "full"):
        file = tmp_path / f"{remat}.json"
        words = ["--config=llama2-7b", "--target=v5e-256", "--estimate"]
        plan.main([*words, f"--config.memory.remat={remat}", f"--json={file}"])
        seconds[remat] = json.loads(file.read_text())["time"]["seconds"]
    assert 1.1 < seconds["full"] / seconds["none"] < 1.5


_IN_BACKWARD = [
    "--config=llama2-7b",
    "--target=v5e-16",
    "--config.data.global_batch_size=16",
    "--config.memory.update=in_backward",
    "--config.memory.optimizer_state=pinned_host",
    "--config.learner.clip_mode=previous_norm",
    "--config.memory.remat=full",
]
_EXPERTS = [
    "--target=v5p-256",
    "--config.data.seq_len=4096",
    "--config.data.global_batch_size=1024",
    "--config.memory.remat=full",
]


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("words", "part", "waited", "seconds"),
    [
        (_IN_BACKWARD, "host link", 0.671, 2.33),
        ([*_IN_BACKWARD, "--config.memory.prefetch=layer"], "host link", 0.162, 1.82),
        (["--config=mixtral-8x7b", *_EXPERTS], "links", 1.36, 10.5),
        (["--config=mixtral-8x7b", *_EXPERTS, "--config.mesh.expert=8"], "links", 0.468, 9.37),
        (["--config=hf:Qwen/Qwen3-235B-A22B", *_EXPERTS], "links", 6.9, 30.5),
    ],
    ids=["in pieces", "by the unit", "Mixtral", "Mixtral, exchange", "Qwen3"],
)
def test_estimated_waits_match_the_compiled_step(tmp_path, words, part, waited, seconds):
    """`waited` and `seconds` are seconds of the compiled programs, from the same commands without --estimate.

    They were recorded on 2026-11-26 with jax 0.10.2 and libtpu 0.0.42.1 (Qwen3's on 2026-11-25, and the exchange of
    tokens on 2026-11-30).
    """
    file = tmp_path / "plan.json"
    plan.main([*words, "--step_only", "--estimate", f"--json={file}"])
    time = json.loads(file.read_text())["time"]
    assert time["parts"][part] == pytest.approx(waited, rel=0.2)
    assert time["seconds"] == pytest.approx(seconds, rel=0.15)


# --- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_measured_rates_are_stored_and_used(monkeypatch, capsys):
    few = {workload.kind: workload for workload in workloads("cpu")}
    smallest = [workload for workload in workloads("cpu") if workload.size < 1e5]
    kinds = {workload.kind for workload in smallest}
    assert kinds == set(few)
    monkeypatch.setattr(measure, "workloads", lambda platform: smallest)
    monkeypatch.setattr(measure, "keep_freed_memory", lambda: False)
    assert calibrate.main([]) == 0
    assert "GB/s" in capsys.readouterr().out
    rates = device_rates.load_measured_rates("cpu")
    assert rates.measured
    for kind in kinds:
        assert 1e7 < rates.curve(kind).rate(1e4) < 1e13, kind
    product = compile_product()
    time = estimate_compiled_time([product], targets.resolve("cpu:1"), product.peak)
    assert "measured on" in time.basis
    assert calibrate.main(["--show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "cpu"


def test_unmeasured_machine_gets_instructions(capsys):
    assert calibrate.main(["--show"]) == 2
    assert "plimsoll calibrate" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"device": "cpu"}', '{"curves": {"memory": 3}}'])
def test_damaged_rates_file_is_ignored(text):
    path = device_rates.rates_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert device_rates.load_measured_rates("cpu") is None


def test_rates_survive_the_file():
    rates = DeviceRates("cpu", {"memory": TimeCurve(((1.0, 2.0),))}, measured="2026-11-24", versions={"jax": "0.10.2"})
    device_rates.save_rates(rates)
    assert device_rates.load_measured_rates("cpu") == rates
    assert math.isclose(device_rates.load_measured_rates("cpu").curve("memory").seconds(1), 2.0)
