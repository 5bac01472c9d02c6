"""A mixture-of-experts run saved on one mesh resumes on another, which shards the experts differently."""

from typing import Any

import jax
import numpy as np
import pytest

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.config import config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layout import flatten
from plimsoll.framework.program.program import Program
from tests.support import small

FIRST_MESH = {"expert": 2, "fsdp": 2, "data": 2}
GATES = "stack/block0/mlp/experts/gate"  # [layers, experts, width, hidden]


def program(mesh: dict[str, int] | None) -> Program:
    """Return the program of a Llama with 4 experts, a shared one, all router losses, and a bias that steps update."""
    moe = mixture(experts=4, top_k=2, hidden=24, balance=0.1)
    moe.router.z = 0.01
    moe.router.bias_rate = 0.01
    moe.shared = config_for(MLP, hidden=16, activation="silu", gated=True)
    model = small.llama()
    small.block(model).mlp = moe
    return small.program(small.experiment(model, mesh=mesh, ema=0.9))


def train_steps(program: Program, state: Any, steps: range) -> tuple[Any, list[float]]:
    """Return the state after these steps, and the loss of each."""
    losses = []
    for step in steps:
        state, metrics = program.step(state, program.put(small.host_batch(program, step)))
        losses.append(float(metrics["loss"]))
    return state, losses


def device_shape(state: Any) -> tuple[int, ...]:
    """Return the shape of one device's shard of the expert gates."""
    return flatten(state["parameter"])[GATES].addressable_shards[0].data.shape


@pytest.fixture(scope="module")
def run_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpointer, Any, list[float]]:
    """After three steps on the first mesh: checkpoint, state on the host, and the losses of three more steps."""
    first = program(FIRST_MESH)
    state, _ = train_steps(first, first.init(), range(3))
    assert device_shape(state) == (2, 2, 16, 24)
    host_state = jax.tree.map(np.array, state)
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpointer(directory=folder) as checkpointer:
        assert checkpointer.save(3, state, {})
    _, losses = train_steps(first, state, range(3, 6))
    return Checkpointer(directory=folder), host_state, losses


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        ({"expert": 4, "model": 2, "fsdp": 1}, (2, 1, 32, 12)),
        pytest.param({"model": 2, "fsdp": 4}, (2, 4, 8, 12), marks=pytest.mark.pairs),
        pytest.param(None, (2, 4, 32, 24), marks=pytest.mark.pairs),
    ],
    ids=["expert4-model2", "fsdp4-model2", "one device"],
)
def test_moe_run_resumes_on_another_mesh(run_checkpoint: Any, mesh: dict[str, int] | None, shape: tuple[int, ...]):
    checkpointer, host_state, losses = run_checkpoint
    second = program(mesh)
    restored = checkpointer.restore(3, second.layout.abstract())
    second.layout.check(restored.state)
    assert device_shape(restored.state) == shape
    buffers = flatten(restored.state["buffer"])
    assert np.asarray(buffers["stack/block0/mlp/router/bias"]).any(), "the bias of the choice has not moved"
    small.assert_same_bits(restored.state, host_state)
    _, others = train_steps(second, restored.state, range(3, 6))
    np.testing.assert_allclose(others, losses, rtol=2e-5)
