"""Bytes that each schedule moves between chips, and between host and device, in the program compiled for TPU."""

import re
from collections import Counter

import pytest

from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.plan import hlo, targets
from plimsoll.framework.plan.hlo.module import iter_executed
from plimsoll.framework.plan.hlo.transfers import collectives, find_transfer
from plimsoll.framework.program.program import Program
from tests.schedules.test_compiled import load_config

LAYERS, DIM, HIDDEN, CHIPS = 4, 256, 1024, 8
# Bytes that one chip receives when the stack's bfloat16 matrices are gathered, or scattered, once.
STACK_BYTES = LAYERS * (4 * DIM * DIM + 2 * DIM * HIDDEN) * 2 * (CHIPS - 1) // CHIPS
TOY = {
    "model.dim": DIM, "model.stack.pattern.0.attention.num_heads": 2, "model.stack.pattern.0.mlp.hidden": HIDDEN,
    "model.vocab_size": 1024, "data.tokenizer.vocab_size": 1024, "model.stack.num_layers": LAYERS,
    "model.compute_dtype": "bfloat16", "model.param_dtype": "bfloat16", "learner.master_dtype": "float32",
    "data.seq_len": 256, "model.embed.max_positions": 256, "data.global_batch_size": CHIPS,
    "mesh.data": 1, "mesh.fsdp": CHIPS, "memory.remat": "full",
}  # fmt: skip
OFFLOADED = {"memory.optimizer_state": "pinned_host"}
IN_BACKWARD = {"memory.update": "in_backward", "learner.clip_mode": "previous_norm"}
SCHEDULES = {
    "after_backward": {},
    "streamed": {"memory.update": "streamed", "memory.gradients": "pinned_host"} | OFFLOADED,
    "in_backward": IN_BACKWARD | OFFLOADED,
}


@pytest.fixture(autouse=True)
def tpu():
    """Use the TPU compiler on a machine without a TPU."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    targets.set_environment("v5e-8")


def module(**fields) -> hlo.Module:
    """Return the compiled step of a toy model on eight chips."""
    devices = targets.resolve("v5e-8").devices()
    program = Program(load_config("gpt2-124m", TOY | fields).instantiate(), devices)
    return hlo.Module(program.jit_step.compiled_step.as_text())


@pytest.mark.pairs
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_are_gathered_twice_and_their_gradients_scattered_once(schedule):
    """Weights are gathered in the forward pass, and again when the backward pass recomputes it.

    An all-reduce would send each chip twice the bytes of a reduce-scatter, and a whole gradient although the chip needs
    an eighth of it.
    """
    received: Counter[str] = Counter()
    for one in collectives(module(**SCHEDULES[schedule])):
        received[one.kind] += one.bytes_received * one.runs
    assert received["all-reduce"] < 0.1 * STACK_BYTES
    # Besides the stack, there are the head's table and the position table.
    assert STACK_BYTES <= received["reduce-scatter"] < 1.2 * STACK_BYTES
    assert 2 * STACK_BYTES <= received["all-gather"] < 2.2 * STACK_BYTES


@pytest.mark.pairs
def test_devices_that_share_rows_gather_and_scatter_weights_at_once():
    """Weights travel between all eight chips, in one collective for both axes, as without shared rows."""
    shared = module(**SCHEDULES["streamed"], **{"mesh.fsdp": 2, "mesh.seq": 4, "data.global_batch_size": 2})
    received: Counter[str] = Counter()
    for one in collectives(shared):
        # The heads of queries, keys and values have four axes, and travel between the chips of a row.
        if not re.search(r"\[\d+,\d+,\d+,\d+\]", one.instruction.type):
            received[one.kind] += one.bytes_received * one.runs
    assert received["all-reduce"] < 0.1 * STACK_BYTES
    assert STACK_BYTES <= received["reduce-scatter"] < 1.2 * STACK_BYTES
    assert 2 * STACK_BYTES <= received["all-gather"] < 2.2 * STACK_BYTES


@pytest.mark.pairs
def test_a_pipeline_gathers_weights_three_times_a_tick_and_scatters_their_gradients_once():
    """A tick runs a stage forward, and for its backward pass forward again, where each layer is recomputed.

    Of M + P - 1 ticks with a forward pass, as many have a backward pass.
    """
    stages, fsdp, microbatches = 2, 4, 4
    fields = {"mesh.pipe": stages, "mesh.fsdp": fsdp, "learner.accumulate": microbatches, "data.global_batch_size": 32}
    received: Counter[str] = Counter()
    for one in collectives(module(**fields)):
        received[one.kind] += one.bytes_received * one.runs
    stage_bytes = LAYERS // stages * (4 * DIM * DIM + 2 * DIM * HIDDEN) * 2 * (fsdp - 1) // fsdp
    ticks = microbatches + stages - 1
    # What is left are outputs of stages, and of the embedding, that all devices along pipe need.
    assert received["all-reduce"] < 0.5 * ticks * stage_bytes
    assert ticks * stage_bytes <= received["reduce-scatter"] < 1.2 * ticks * stage_bytes
    assert 3 * ticks * stage_bytes <= received["all-gather"] < 1.1 * 3 * ticks * stage_bytes


@pytest.mark.pairs
@pytest.mark.parametrize(("prefetch", "fetched_layers"), [("chunk", LAYERS), ("layer", LAYERS + 1)])
def test_offloaded_state_is_transferred_once_each_way(prefetch, fetched_layers):
    """The offloaded state is master weights and two float32 moments of the stack and the token table.

    The state of the position table is too small to be offloaded. With prefetch = layer, the loop starts with a layer
    whose state is written back unchanged.
    """
    moved = count_moved(module(**IN_BACKWARD, **OFFLOADED, **{"memory.prefetch": prefetch}))
    layer, table = 4 * DIM * DIM + 2 * DIM * HIDDEN, 1024 * DIM
    expected = (fetched_layers * layer + table) * 3 * 4 // CHIPS
    assert moved == {"from host": expected, "to host": expected}


@pytest.mark.pairs
def test_a_speculative_update_moves_the_state_once_each_way():
    """The loop starts with a layer whose state is written back unchanged.

    The correction of clipped layers, whose number of iterations is not known, counts once.
    """
    moved = count_moved(module(**SCHEDULES["streamed"], **{"memory.prefetch": "speculative"}))
    layer_state = (4 * DIM * DIM + 2 * DIM * HIDDEN) * 3 * 4 // CHIPS
    table_state = 1024 * DIM * 3 * 4 // CHIPS
    # The other gradients are too small to be offloaded.
    layer_gradients = 2 * DIM * HIDDEN * 2 // CHIPS
    assert moved["from host"] == (LAYERS + 1) * layer_state + table_state + layer_gradients
    assert moved["to host"] == (LAYERS + 2) * layer_state + table_state + LAYERS * layer_gradients


@pytest.mark.pairs
@pytest.mark.parametrize("schedule", ["streamed", "in_backward"])
def test_microbatches_by_layer_move_a_layer_once(schedule):
    """Weights, gradients and state cross the link once per step, however many microbatches there are."""
    fields = {**SCHEDULES[schedule], "memory.parameters": "pinned_host", "data.global_batch_size": 4 * CHIPS}
    moved = {}
    # With one microbatch, gradients have the weights' dtype.
    for count in (2, 4):
        moved[count] = count_moved(module(**fields, **{"learner.accumulate": count, "memory.accumulate_by": "layer"}))
    assert moved[2] == moved[4]
    if schedule == "streamed":
        in_turn = count_moved(module(**fields, **{"learner.accumulate": 4}))
        assert in_turn.total() > 1.5 * moved[4].total()


@pytest.mark.pairs
def test_only_experts_cross_the_link():
    """Experts' weights for the forward and for the backward pass; then their gradients and state for the update.

    Both passes fetch weights one layer ahead, which is one layer too many. The update computes the new weights from the
    master copy.
    """
    mlp = mixture(experts=CHIPS, top_k=2, hidden=HIDDEN).to_json()
    step = module(**{"model.stack.pattern.0.mlp": mlp, "memory.update": "streamed", "memory.experts": "pinned_host"})
    layer = CHIPS * 3 * DIM * HIDDEN // CHIPS
    weights, gradients, state = 2 * layer, 2 * layer, 12 * layer
    assert count_moved(step) == {
        "from host": 2 * (LAYERS + 1) * weights + LAYERS * (gradients + state),
        "to host": LAYERS * (gradients + weights + state),
    }


def count_moved(step: hlo.Module) -> Counter[str]:
    """Return the bytes that a step moves between device and host, by direction."""
    moved: Counter[str] = Counter()
    for instruction, runs in iter_executed(step):
        if (found := find_transfer(step, instruction)) is not None:
            moved[found.direction] += found.num_bytes * runs
    return moved
