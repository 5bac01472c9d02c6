"""Each schedule as compiled for TPU: the bytes on the device at one time, and no copies of a stack."""

from typing import Any

import jax
import pytest

from plimsoll.configs import load
from plimsoll.framework.config import config_for
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.plan import hlo, targets
from plimsoll.framework.plan.build_report import compile_report
from plimsoll.framework.program.program import Program
from plimsoll.launch.cli import apply_overrides
from tools.bench.memory_table import EVERYTHING, GRADIENTS, LORA, PRECISE, ROUNDED, STREAMED

TOY = {"data.global_batch_size": 1, "model.dim": 256, "model.stack.pattern.0.attention.num_heads": 2,
       "model.vocab_size": 1024, "data.tokenizer.vocab_size": 1024, "memory.remat": "full"}  # fmt: skip


@pytest.fixture(autouse=True)
def tpu():
    """Use the TPU compiler on a machine without a TPU."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    targets.set_environment("v5e-1")


def load_config(name: str, fields: dict):
    config = load(name)
    apply_overrides(config, [(path, str(value)) for path, value in fields.items()])
    return config


def report(**fields) -> dict[str, Any]:
    """Return the plan of a toy model's step on one chip."""
    config = load_config("gpt2-124m", TOY | fields)
    return compile_report("toy", config, targets.resolve("v5e-1"), None, phases=False).to_json()


def test_streamed_state_holds_one_layer():
    """12 layers with 12 MiB of f32 state each: a whole update fetches all 144 MiB, a streamed one two layers' worth."""
    fields = {
        "data.seq_len": 256, "model.embed.max_positions": 256, "model.stack.num_layers": 12,
        "model.stack.pattern.0.mlp.hidden": 1024, "memory.optimizer_state": "pinned_host",
    }  # fmt: skip
    whole, streamed = (report(**fields, **{"memory.update": update}) for update in ("after_backward", "streamed"))
    assert streamed["host_argument_bytes"] == whole["host_argument_bytes"] > 100 << 20
    # For the whole update, jax 0.11's compiler does not fetch all of the state at the same time.
    whole_state, streamed_state = (one["breakdown"]["optimizer_state"] for one in (whole, streamed))
    assert streamed_state < 0.15 * whole["host_argument_bytes"]
    assert streamed["device_peak_bytes"] < whole["device_peak_bytes"] - 0.8 * whole_state


@pytest.mark.pairs
def test_offloaded_inputs_are_on_the_host():
    """16 inputs of 16 MiB exceed the 128 MiB on the chip, where the compiler would keep those of a smaller model."""
    fields = {
        "data.global_batch_size": 64, "data.seq_len": 512, "model.embed.max_positions": 512,
        "model.stack.num_layers": 16, "model.stack.pattern.0.mlp.hidden": 256,
    }  # fmt: skip
    full, offload = (report(**fields, **{"memory.remat": policy}) for policy in ("full", "offload"))
    assert full["host_breakdown"]["activations"] == 0
    assert offload["host_breakdown"]["activations"] >= 256 << 20
    assert offload["device_peak_bytes"] < full["device_peak_bytes"] - 0.8 * (256 << 20)


@pytest.mark.pairs
@pytest.mark.parametrize("fields", [{}, {"memory.update": "in_backward", "memory.gradients": "device"}], ids=str)
def test_offloaded_stacks_are_never_whole_on_the_device(fields):
    """12 layers: weights, gradients (or none), state and inputs are in host memory exactly once, as is the table."""
    fields = {
        "data.seq_len": 256, "data.global_batch_size": 8, "model.embed.max_positions": 256, "learner.clip": "None",
        "model.stack.num_layers": 12, "model.stack.pattern.0.mlp.hidden": 1024, **EVERYTHING, **fields,
        "model.vocab_size": 16384, "data.tokenizer.vocab_size": 16384,
    }  # fmt: skip
    program = Program(load_config("gpt2-124m", TOY | fields).instantiate(), targets.resolve("v5e-1").devices())
    layout, stats = program.layout, program.jit_step.compiled_step.memory_analysis()
    offloaded, inputs = layout.bytes_per_device(memory_kind="pinned_host"), 12 * 8 * 256 * 256 * 2
    away = {leaf.path for leaf in layout if leaf.spec.is_offloaded}
    assert {"parameter/embed/token", "parameter/stack/block0/mlp/up/weight"} <= away
    assert stats.host_argument_size_in_bytes == stats.host_alias_size_in_bytes == offloaded
    assert inputs <= stats.host_temp_size_in_bytes <= 1.01 * inputs
    module = hlo.Module(program.jit_step.compiled_step.as_text())
    fused = {i.get_called_computation("calls") for i in module.instructions.values() if i.opcode == "fusion"}
    here = [
        f"{instruction.opcode} {array}"
        for instruction in module.instructions.values()
        if instruction.computation not in fused
        for array in hlo.arrays(instruction.type)
        if array.dims[:1] in [(12,), (12 * 8,)] and array.num_bytes >= 1 << 20 and not array.on_host
    ]
    assert not here
    assert stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes < 0.8 * offloaded


@pytest.mark.pairs
@pytest.mark.parametrize("schedule", ["streamed", pytest.param("in_backward", marks=pytest.mark.slow)])
def test_half_the_layers_move_half_the_bytes(schedule):
    """All or half of 16 layers have weights, state, inputs (and gradients) in host memory.

    With half of the layers, the final program's arguments, inputs and transfers there are half as large.
    """
    places = {path: place for path, place in EVERYTHING.items() if place == "pinned_host"}
    if schedule == "in_backward":
        del places["memory.gradients"]
    fields = {
        "data.seq_len": 256, "data.global_batch_size": 8, "model.embed.max_positions": 256, "learner.clip": "None",
        "model.stack.num_layers": 16, "model.stack.pattern.0.mlp.hidden": 1024, "memory.update": schedule,
    }  # fmt: skip
    found = {}
    for share in ("1.0", "0.5"):
        offloaded = dict.fromkeys(places, f"pinned_host:{share}")
        found[share] = report(**fields, **offloaded)
    whole, half = found["1.0"], found["0.5"]
    assert half["host_argument_bytes"] == pytest.approx(0.5 * whole["host_argument_bytes"], rel=1e-3)
    inputs = {share: one["host_breakdown"]["activations"] for share, one in found.items()}
    assert inputs["0.5"] == pytest.approx(0.5 * inputs["1.0"], rel=0.01)
    moved = {share: one["host_transfer_bytes"] for share, one in found.items()}
    assert moved["0.5"] == pytest.approx(0.5 * moved["1.0"], rel=0.02)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("v5e-1", GRADIENTS),  # the compiler would otherwise transpose the stacks of query, key and value
        pytest.param("v5e-8", STREAMED, marks=pytest.mark.slow),
        ("v5e-4", GRADIENTS | PRECISE),  # the compiler would otherwise cast all stacks before the loop
        pytest.param("v5e-8", STREAMED | {"memory.optimizer_state": "pinned_host:0.5"}, marks=pytest.mark.slow),
        pytest.param("v5e-1", LORA, marks=pytest.mark.slow),
    ],
    ids=["one chip", "streamed", "float32", "half offloaded", "lora"],
)
def test_no_stack_is_copied(target, fields):
    """This uses the sizes of llama2-7b, because the compiler treats small stacks differently."""
    fields = {"data.seq_len": 512, "memory.remat": "full"} | fields
    target = targets.resolve(target)
    config = load_config("llama2-7b", {"data.global_batch_size": target.num_devices, **fields})
    program = Program(config.instantiate(), target.devices())
    module = hlo.Module(program.jit_step.compiled_step.as_text())
    fused = {i.get_called_computation("calls") for i in module.instructions.values() if i.opcode == "fusion"}
    moved = [
        f"{instruction.opcode} {array}"
        for instruction in module.instructions.values()
        if instruction.opcode in ("copy", "copy-start", "convert", "transpose") and instruction.computation not in fused
        for array in hlo.arrays(instruction.type)
        if array.dims[:1] in [(32,), (16,)] and array.num_bytes >= 16 << 20  # at least 1 MiB for each of 16 layers
        if "S(1)" not in instruction.type  # S(1): on-chip memory, which has room for half of a stack; no copy in HBM
    ]
    assert module.loops
    assert not moved


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["streamed", pytest.param("in_backward", marks=pytest.mark.slow)])
def test_8bit_moments_are_streamed(update):
    """Each byte of the state is fetched once per step and written back once: no layer moves a whole stack."""
    fields = {"data.seq_len": 256, "model.embed.max_positions": 256, "model.stack.num_layers": 8,
              "model.stack.pattern.0.mlp.hidden": 1024, "memory.optimizer_state": "pinned_host",
              "learner.optimizer": "adamw8bit", "learner.rules": [], **ROUNDED} | {"memory.update": update}  # fmt: skip
    found = report(**fields)
    matrices = 8 * 2 * 256 * 1024  # those of the MLPs; attention's are under 1 MiB
    assert found["host_argument_bytes"] >= 2 * matrices
    assert found["host_transfer_bytes"] == pytest.approx(2 * found["host_argument_bytes"], rel=0.02)


@pytest.mark.pairs
@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_quantized_weights_are_fetched_once_per_pass(base):
    """Each byte of the offloaded weights is fetched twice per step and never written back, because they are frozen."""
    fields = {"data.seq_len": 256, "model.embed.max_positions": 256, "model.stack.num_layers": 8,
              "model.stack.pattern.0.mlp.hidden": 1024, "memory.parameters": "pinned_host",
              "memory.update": "streamed", "learner.rules": "[]"}  # fmt: skip
    config = load_config("gpt2-124m", TOY | fields)
    config.model.lora = config_for(LoRA, base=base)
    found = compile_report("toy", config, targets.resolve("v5e-1"), None, phases=False).to_json()
    matrices = 8 * 2 * 256 * 1024  # those of the MLPs; in nf4, attention's are under 1 MiB
    assert found["host_argument_bytes"] >= (matrices // 2 if base == "nf4" else matrices)
    # Weights are fetched one layer ahead, so the last iteration of both loops fetches a layer that is not used.
    layers_moved = 2 * (8 + 1)
    assert found["host_transfer_bytes"] == pytest.approx(layers_moved / 8 * found["host_argument_bytes"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adalomo", "apollo_mini"])
def test_model_trains_in_the_memory_for_its_weights(optimizer):
    """Llama 2 7B on one chip: all weights train in bf16 with stochastic rounding, updated in the backward pass."""
    fields = {"learner.optimizer": optimizer, **ROUNDED, "memory.remat": "full"}
    fields |= {"data.seq_len": 128, "data.global_batch_size": 1}
    config = load_config("llama2-7b", fields)
    found = compile_report("7b", config, targets.resolve("v5e-1"), None, phases=False).to_json()
    weights = 2 * sum(spec.size for spec in jax.tree.leaves(load("llama2-7b").instantiate().model.parameter_specs()))
    assert found["device_peak_bytes"] <= 1.05 * weights
    assert found["host_argument_bytes"] == 0
