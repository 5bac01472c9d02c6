"""Optimizer state with shapes unlike its weights: sharded like them, saved, restored on another mesh, and counted."""

import jax
import numpy as np
import pytest

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.config import config_for
from plimsoll.framework.layout import flatten
from plimsoll.framework.optimizers.named import OPTIMIZERS
from tests.support import small

EIGHT, OTHER = {"data": 2, "fsdp": 2, "model": 2}, {"fsdp": 4, "model": 2}
# name: (options, {state leaf of the queries of two layers, [32, 32] over (fsdp, model): (its shape, its shape on one of
# eight devices)}). The projected side keeps its mesh axis if the rank can be divided by it.
CASES = {
    "apollo": (
        {"rank": 4, "update_interval": 2},
        {"adam/mu": ((2, 4, 32), (2, 2, 16)), "adam/nu": ((2, 4, 32), (2, 2, 16)), "norm": ((2,), (2,))},
    ),
    "apollo_mini": (
        {"update_interval": 2},
        {"adam/mu": ((2, 1, 32), (2, 1, 16)), "adam/nu": ((2, 1, 32), (2, 1, 16)), "norm": ((2,), (2,))},
    ),
    "galore": (
        {"rank": 4, "update_proj_gap": 4},
        {
            "projector": ((2, 32, 4), (2, 16, 2)),
            "base_optimizer_state/mu": ((2, 4, 32), (2, 2, 16)),
            "base_optimizer_state/nu": ((2, 4, 32), (2, 2, 16)),
        },
    ),
    "adam_mini": ({}, {"mu": ((2, 32, 32), (2, 16, 16)), "nu": ((2, 4), (2, 2))}),
    "adamw8bit": ({"min_size": 256, "block": 16}, {}),
}
QUICK = ("apollo", "galore", "adamw8bit")


def program(name, mesh):
    options, _ = CASES[name]
    optimizer = config_for(OPTIMIZERS[name], learning_rate=3e-3, **options)
    return small.program(small.experiment(small.llama(), mesh=mesh, optimizer=optimizer))


def go_on(program, state, steps):
    losses = []
    for step in steps:
        state, metrics = program.step(state, program.put(small.host_batch(program, step)))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.pairs
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_state_restores_on_other_meshes_with_the_planned_bytes(name, tmp_path):
    first = program(name, EIGHT)
    state, _ = go_on(first, first.init(), range(3))
    first.layout.check(state)
    found = flatten(state.optimizer)
    for kept, (shape, local) in CASES[name][1].items():
        [leaf] = [x for path, x in found.items() if path.endswith(f"{kept}/block0/attention/query/weight")]
        assert (leaf.shape, leaf.addressable_shards[0].data.shape) == (shape, local), kept
    for device in jax.devices():
        shards = [s.data for x in found.values() for s in x.addressable_shards if s.device == device]
        assert sum(shard.nbytes for shard in shards) == first.layout.bytes_per_device("optimizer")
    weights = sum(leaf.spec.size for leaf in first.layout if leaf.group == "parameter")
    # Vectors and tables are a large part of this small model. The bound is AdamW's state, over four devices, less what
    # matrices save.
    assert first.layout.bytes_per_device("optimizer") < 0.8 * 8 * weights / 4

    before = jax.tree.map(np.array, state.optimizer)
    with Checkpointer(directory=tmp_path / "checkpoints") as checkpointer:
        assert checkpointer.save(3, state, {})
    _, losses = go_on(first, state, range(3, 6))
    for mesh in (OTHER,) if name in QUICK else (OTHER, None):
        second = program(name, mesh)
        restored = Checkpointer(directory=tmp_path / "checkpoints").restore_latest(second.layout.abstract())
        second.layout.check(restored.state)
        small.assert_same_bits(restored.state.optimizer, before)
        _, again = go_on(second, restored.state, range(3, 6))
        np.testing.assert_allclose(again, losses, rtol=2e-5)
