"""learner.ema with bfloat16 weights: the average is float32 and moves; older checkpoints store it in bfloat16."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.config import config_for
from tests.support import small

DECAY = 0.999
BFLOAT16 = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}
OFFLOADED = {"update": "streamed", "gradients": "pinned_host", "optimizer_state": "pinned_host"}


def experiment(memory=None):
    optimizer = config_for(optax.sgd, learning_rate=4.0)
    return small.experiment(small.llama(**BFLOAT16), memory=memory, optimizer=optimizer, ema=DECAY, clip=None)


@pytest.mark.pairs
@pytest.mark.parametrize(
    "memory",
    [{}, OFFLOADED, {"update": "in_backward"}, {"update": "layer_programs"}],
    ids=lambda m: m.get("update", "whole"),
)
def test_ema_updates_bfloat16_weights(memory):
    program = small.program(experiment(memory))
    state = program.init()
    expected = {path: np.asarray(x, np.float64) for path, x in small.arrays(state["ema"]).items()}
    first = dict(expected)
    for step in range(3):
        state, _ = program.step(state, program.put(small.host_batch(program, step)))
        for path, weight in small.arrays(state["parameter"]).items():
            expected[path] = DECAY * expected[path] + (1 - DECAY) * np.asarray(weight, np.float64)
    averages = small.arrays(state["ema"])
    assert {x.dtype for x in averages.values()} == {np.dtype("float32")}
    for path, average in averages.items():
        moved, wanted = average - first[path], expected[path] - first[path]
        assert np.linalg.norm(wanted) > 0, path
        # The average uses the weights before they are rounded to bfloat16.
        assert np.linalg.norm(moved - wanted) < 5e-2 * np.linalg.norm(wanted), path
    assert np.isfinite(program.evaluate(state, program.put(small.host_batch(program)), averaged=True)["nll"])


@pytest.mark.pairs
@pytest.mark.parametrize("memory", [{}, OFFLOADED], ids=["device", "host"])
def test_bfloat16_averages_in_a_checkpoint_load_as_float32(tmp_path, memory):
    program = small.program(experiment(memory))
    state = program.init()
    narrow = jax.tree.map(lambda x: jax.device_put(np.asarray(x).astype(jnp.bfloat16)), state["ema"])
    with Checkpointer(directory=tmp_path) as checkpointer:
        checkpointer.save(1, replace(state, gradient={}, ema=narrow), {})
        checkpointer.wait()
        checkpointer.compare(1, program.layout.abstract(program.layout.checkpoint_specs))
        restored = checkpointer.restore(1, program.layout.abstract(program.layout.checkpoint_specs)).state
        some = checkpointer.restore(1, program.layout.abstract(program.layout.checkpoint_specs), groups=("ema",)).state
    for tree in (restored["ema"], some["ema"]):
        small.assert_same_bits(tree, jax.tree.map(lambda x: x.astype(jnp.float32), narrow))
        kinds = jax.tree.map(lambda x: x.sharding.memory_kind, tree)
        assert kinds == jax.tree.map(lambda spec: spec.memory_kind, program.layout.specs["ema"])
