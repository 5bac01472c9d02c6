"""The whole plan for CPU devices, compared with real arrays and real runs."""

import dataclasses
from typing import Any

import jax
import optax
import pytest

from plimsoll import configs
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.plan import suggest
from plimsoll.framework.plan.buffer_names import describe_operation
from plimsoll.framework.plan.build_report import compile_report, estimate_report
from plimsoll.framework.plan.estimate import Estimate
from plimsoll.framework.plan.suggest import suggestions
from plimsoll.framework.plan.targets import resolve
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from tests.support import small

KEYS = (
    "config target devices fits device_limit_bytes device_peak_bytes device_argument_bytes device_output_bytes "
    "device_alias_bytes device_temp_bytes host_argument_bytes host_peak_bytes breakdown flops_per_step compile_seconds"
)
GROUPS = "parameters frozen buffers gradients optimizer_state ema batch activations other"


def config(**fields: Any) -> Config:
    """Return the small Llama's experiment; `fields` overrides config paths, with __ for dots."""
    built = small.experiment(small.llama())
    for path, value in fields.items():
        built.set_path(path.replace("__", "."), value)
    return built


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return compile_report("small", config(mesh__fsdp=4, learner__ema=0.9), resolve("cpu:4"), None).to_json()


@pytest.mark.pairs
def test_the_keys_that_programs_read(report: dict[str, Any]):
    assert set(KEYS.split()) <= report.keys()
    assert list(report["breakdown"]) == GROUPS.split()
    assert set(report["phases"]) == {"init", "restore", "train", "evaluation", "save"}


@pytest.mark.pairs
def test_the_parts_add_up_and_are_named(report: dict[str, Any]):
    assert sum(report["breakdown"].values()) == report["device_peak_bytes"]
    assert 0 <= report["breakdown"]["other"] <= 0.05 * report["device_peak_bytes"]
    total = report["device_argument_bytes"] + report["device_output_bytes"] - report["device_alias_bytes"]
    assert report["device_peak_bytes"] == pytest.approx(total + report["device_temp_bytes"], abs=8192)


def test_state_is_the_layouts_to_the_byte(report: dict[str, Any]):
    layout = Program(config(mesh__fsdp=4, learner__ema=0.9).instantiate(), jax.devices()[:4]).layout
    for group, key in {"parameter": "parameters", "optimizer": "optimizer_state", "ema": "ema"}.items():
        assert report["breakdown"][key] == layout.bytes_per_device(group)
        assert report["breakdown"][key] > 0


@pytest.mark.pairs
def test_predicted_arguments_are_the_live_bytes(report: dict[str, Any]):
    program = Program(config(mesh__fsdp=4, learner__ema=0.9).instantiate(), jax.devices()[:4])
    state, batch = program.init(), program.put(small.host_batch(program))
    live = sum(
        shard.data.nbytes
        for array in jax.tree.leaves((state, batch))
        for shard in array.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert report["device_argument_bytes"] == live


def test_every_gradient_is_counted_once():
    # With several microbatches, all gradients are accumulated in addition to the state, in the master's dtype.
    trial = config(mesh__data=1, learner__accumulate=4)
    found = compile_report("small", trial, resolve("cpu:1"), None, phases=False).to_json()
    assert found["breakdown"]["gradients"] >= 0.9 * found["breakdown"]["parameters"]


@pytest.mark.pairs
def test_each_layer_adds_its_saved_bytes():
    peaks = {}
    for layers in (4, 8):
        trial = config(mesh__data=1, data__seq_len=32, data__global_batch_size=64)
        trial.model.stack.num_layers = layers
        peaks[layers] = compile_report("small", trial, resolve("cpu:1"), None, phases=False).to_json()
    deeper, shallower = peaks[8], peaks[4]
    assert deeper["flops_per_step"] > shallower["flops_per_step"]
    assert deeper["breakdown"]["activations"] > 1.5 * shallower["breakdown"]["activations"]
    assert any("saved per layer" in one["name"] for one in deeper["largest"])


@pytest.mark.pairs
def test_offloaded_state_counts_on_the_host():
    trial = config(mesh__data=1, memory__optimizer_state="pinned_host")
    trial.model.vocab_size = 8192  # two tables with state leaves of 1 MiB; smaller leaves stay on the device
    found = compile_report("small", trial, resolve("cpu:1"), None, phases=False).to_json()
    layout = Program(trial.instantiate(), jax.devices()[:1]).layout
    assert found["host_argument_bytes"] == layout.bytes_per_device(memory_kind="pinned_host") == 4 << 20
    # The peak is in the update, where offloaded leaves are on the device twice: as fetched, and as written back.
    resident = layout.bytes_per_device("optimizer", "device")
    assert resident < found["breakdown"]["optimizer_state"] <= resident + 2 * found["host_argument_bytes"]
    assert found["host_breakdown"]["optimizer_state"] == found["host_argument_bytes"]
    assert found["host_transfer_bytes"] == 2 * found["host_argument_bytes"]
    assert found["phases"]["save"]["host_peak_bytes"] > found["host_argument_bytes"]


class Forgetful(MLP):
    """A user's layer whose gate weights get no gradient."""

    def apply(self, weights, carry, ctx, layer_state):
        """Return MLP's result with a `stop_gradient` on the gate's weights."""
        return super().apply({**weights, "gate": jax.tree.map(jax.lax.stop_gradient, weights["gate"])}, carry, ctx, {})


@pytest.mark.once("1")
@pytest.mark.parametrize("unroll", [0, 1])
def test_parameters_without_a_gradient_are_named(unroll: int):
    trial = config(mesh__data=1)
    trial.model.stack.unroll = unroll
    small.block(trial.model).mlp = config_for(Forgetful, hidden=48, gated=True, activation="silu")
    found = compile_report("small", trial, resolve("cpu:1"), None, phases=False).to_json()
    assert found["zero_gradients"] == [{"path": "stack/block0/mlp/gate/weight", "bytes": 2 * 32 * 48 * 4}]


def test_in_a_usual_config_every_gradient_arrives(report: dict[str, Any]):
    assert report["zero_gradients"] == []


@pytest.mark.pairs
def test_too_big_is_a_report_and_what_fits_is_compiled():
    trial = config(mesh__data=1, data__seq_len=32, data__global_batch_size=64, memory__remat="full")
    trial.learner.optimizer = config_for(optax.sgd, learning_rate=0.1)  # compiles fast; the test compiles five times
    limit = estimate_report("small", trial, resolve("cpu:1"), None).device_peak_bytes // 2
    found = compile_report("small", trial, resolve("cpu:1"), limit, phases=False).to_json()
    assert not found["fits"]
    assert found["device_peak_bytes"] > limit
    assert found["suggestions"]
    assert all(one["compiled"] and one["device_peak_bytes"] <= limit for one in found["suggestions"])
    for setting in found["suggestions"][0]["setting"].split():
        trial.override(*setting.removeprefix("--config.").split("="))
    again = compile_report("small", trial, resolve("cpu:1"), limit, phases=False).to_json()
    assert again["fits"]
    assert again["device_allocated_bytes"] == found["suggestions"][0]["device_peak_bytes"]


def test_nothing_fits_into_less_than_the_state():
    trial = config(mesh__data=1, data__global_batch_size=2)  # few rows, so few microbatch counts to try
    peak = estimate_report("small", trial, resolve("cpu:1"), None).device_peak_bytes
    assert suggestions(trial, resolve("cpu:1"), limit=1000, peak=peak) == []


def test_only_the_most_microbatches_are_tried_if_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = config(mesh__data=1, data__global_batch_size=64)
    need = suggest.estimate_for_target(trial.instantiate(), resolve("cpu:1"))
    # More than the state without an optimizer, so that choices are not refused by their state.
    limit = suggest.state_bytes(need) + 1000
    counts = []

    def record(experiment: Experiment, *args: Any) -> Estimate:
        counts.append(experiment.learner.accumulate)
        return estimate(experiment, *args)

    estimate = suggest.estimate_for_target
    monkeypatch.setattr(suggest, "estimate_for_target", record)
    assert suggestions(trial, resolve("cpu:1"), limit, need.peak_bytes, present=need, seconds=0.0) == []
    assert set(counts) == {1, 8, 64}


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["after_backward", "in_backward"])
def test_lower_bound_skips_only_configs_that_do_not_fit(monkeypatch, update):
    """The lower bound on a placement's bytes skips only choices that the analytical estimate would have refused."""
    target, trial = resolve("cpu:1"), config(mesh__data=1, memory__update=update, learner__clip=None)
    peak = estimate_report("small", trial, target, None).device_peak_bytes
    limits = [int(share * peak) for share in (0.9, 0.7, 0.5)]
    found = [suggestions(trial, target, limit, peak, seconds=0.0) for limit in limits]
    monkeypatch.setattr(suggest, "least_bytes", lambda *_: 0)
    assert found == [suggestions(trial, target, limit, peak, seconds=0.0) for limit in limits]
    assert any(found)


def test_weights_go_to_the_host_when_nothing_else_is_enough():
    """Llama 2 13B on one chip, using only the analytical estimate."""
    target, trial = resolve("v5e-1"), configs.load("llama2-13b")
    for path, value in (("data.global_batch_size", 1), ("data.seq_len", 2048), ("memory.remat", "full")):
        trial.set_path(path, value)
    assert suggestions(trial, target, limit=15 << 30, peak=200 << 30, seconds=0.0) == [], "this host has 48 GiB"
    target = dataclasses.replace(target, host_bytes=256 << 30)
    (found,) = suggestions(trial, target, limit=15 << 30, peak=200 << 30, seconds=0.0)
    # At least the AdamW moments and master weights of 13B parameters, in float32.
    assert 13e9 * 12 < found.host_process_bytes < 256 << 30
    assert "--config.memory.parameters=pinned_host --config.memory.activations=pinned_host" in found.setting
    assert "--config.memory.update=streamed" in found.setting
    assert not found.compiled
    assert found.device_peak_bytes < 8 << 30


@pytest.mark.pairs
def test_on_gpus_layer_programs_move_what_is_on_the_host():
    """XLA's GPU compiler cannot slice host memory, so the other schedules are refused there."""
    trial = configs.load("llama2-13b")
    for path, value in (("data.global_batch_size", 1), ("data.seq_len", 2048), ("memory.remat", "full")):
        trial.set_path(path, value)
    fitting = suggestions(trial, resolve("4090"), limit=21 << 30, peak=200 << 30, seconds=0.0)
    assert fitting
    for one in fitting:
        assert "--config.memory.update=layer_programs" in one.setting


def test_estimate_also_refuses_an_indivisible_batch():
    with pytest.raises(ValueError, match="nearest global_batch_size"):
        estimate_report("small", config(mesh__data=8, data__global_batch_size=4), resolve("cpu:8"), None)


def test_operation_descriptions():
    where = "jit(step)/transpose(jvp(stack))/while/body/closed_call/checkpoint/rematted_computation/mlp/up/dot_general"
    assert describe_operation(where) == "stack/mlp/up/dot_general, backward, recomputed"
    assert describe_operation("jit(step)/jvp(jit(_take))/gather") == "gather, forward"
    assert describe_operation("jit(step)/update/vmap()/mul") == "mul, update"
    assert describe_operation("state.optimizer['embed']['default']['state'][0].nu['token']") == (
        "copy of optimizer/embed/default/state/0/nu/token"
    )
