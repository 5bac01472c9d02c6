"""What each schedule moves between chips, and between host and device, in the program that the TPU's compiler makes."""

from collections import Counter

import pytest

from framework.plan import hlo, targets
from framework.plan.hlo.collectives import collectives
from framework.plan.hlo.host import transfer
from framework.plan.hlo.walk import executed
from framework.program.program import Program
from tests.schedules.test_compiled import resolved

LAYERS, DIM, HIDDEN, CHIPS = 4, 256, 1024, 8
# Matrices of the stack in bfloat16, as one chip receives them when they are gathered, or scattered, once.
STACK_BYTES = LAYERS * (4 * DIM * DIM + 2 * DIM * HIDDEN) * 2 * (CHIPS - 1) // CHIPS
TOY = {
    "model.dim": DIM, "model.stack.pattern.0.attention.num_heads": 2, "model.stack.pattern.0.mlp.hidden": HIDDEN,
    "model.vocab_size": 1024, "data.tokenizer.vocab_size": 1024, "model.stack.num_layers": LAYERS,
    "model.compute_dtype": "bfloat16", "model.param_dtype": "bfloat16", "learner.master_dtype": "float32",
    "data.seq_len": 256, "model.embed.max_positions": 256, "data.global_batch_size": CHIPS,
    "mesh.data": 1, "mesh.fsdp": CHIPS, "memory.remat": "full",
}  # fmt: skip
HOSTED = {"memory.optimizer_state": "pinned_host"}
IN_BACKWARD = {"memory.update": "in_backward", "learner.clip_mode": "previous_norm"}
SCHEDULES = {
    "after_backward": {},
    "streamed": {"memory.update": "streamed", "memory.gradients": "pinned_host"} | HOSTED,
    "in_backward": IN_BACKWARD | HOSTED,
}


@pytest.fixture(autouse=True)
def tpu():
    """The compiler of TPUs, on a machine without one."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    targets.environment("v5e-8")


def module(**fields) -> hlo.Module:
    """The step of a toy on eight chips."""
    devices = targets.resolve("v5e-8").devices()
    program = Program(resolved("gpt2-124m", TOY | fields).instantiate(), devices)
    return hlo.Module(program.compiled_step.as_text())


@pytest.mark.pairs
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_are_gathered_twice_and_their_gradients_scattered_once(schedule):
    """Twice: in the forward pass, and when the backward pass runs it again. An all-reduce would bring each chip twice
    the bytes of a reduce-scatter, and leave it a whole gradient of which it needs an eighth."""
    received: Counter[str] = Counter()
    for one in collectives(module(**SCHEDULES[schedule])):
        received[one.kind] += one.bytes_received * one.runs
    assert received["all-reduce"] < 0.1 * STACK_BYTES
    # Besides the stack there are the head's table and that of positions.
    assert STACK_BYTES <= received["reduce-scatter"] < 1.2 * STACK_BYTES
    assert 2 * STACK_BYTES <= received["all-gather"] < 2.2 * STACK_BYTES


@pytest.mark.pairs
@pytest.mark.parametrize(("prefetch", "fetched_layers"), [("piece", LAYERS), ("unit", LAYERS + 1)])
def test_state_in_host_memory_comes_and_goes_once(prefetch, fetched_layers):
    """Master weights and two moments in float32, of the stack and of the tokens' table; those of positions are small.
    With prefetch = unit the loop begins with a unit whose state goes back as it came."""
    step = module(**IN_BACKWARD, **HOSTED, **{"memory.prefetch": prefetch})
    moved: Counter[str] = Counter()
    for instruction, runs in executed(step):
        if (found := transfer(step, instruction)) is not None:
            moved[found.direction] += found.num_bytes * runs
    layer, table = 4 * DIM * DIM + 2 * DIM * HIDDEN, 1024 * DIM
    expected = (fetched_layers * layer + table) * 3 * 4 // CHIPS
    assert moved == {"from host": expected, "to host": expected}
