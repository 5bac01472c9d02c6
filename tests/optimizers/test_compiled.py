"""Temporary memory of the TPU compiler for the update of a large bf16 weight matrix, in addition to the state."""

import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.layout import ParameterSpec
from plimsoll.framework.optimizers.named import OPTIMIZERS
from plimsoll.framework.optimizers.partition import add_partition
from plimsoll.framework.plan import targets

# Bytes per element. In 8 bits, the whole gradient and update exist in f32, split into blocks. If the blocks were along
# the last axis of a matrix, reordered copies would bring this to 20.
TEMPORARIES = {"adamw": 0.1, "adalomo": 0.1, "adam_mini": 0.1, "adamw8bit": 8.1}
STATE = {"adamw": 8, "adalomo": 0.00122, "adam_mini": 4.00024, "adamw8bit": 2.03125}
SHAPE = (16384, 4096)  # more than the 128 MiB of on-chip memory


@pytest.mark.parametrize("name", [*list(TEMPORARIES)[:-1], pytest.param("adamw8bit", marks=pytest.mark.slow)])
def test_temporaries(name):
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    targets.set_environment("v5e-1")
    sharding = NamedSharding(Mesh(np.array(targets.resolve("v5e-1").devices()).reshape(1), ("x",)), PartitionSpec())
    specs = {"weight": ParameterSpec(SHAPE, "float32", roles=("in", "out"))}
    optimizer = add_partition(OPTIMIZERS[name](learning_rate=1e-3, weight_decay=0.1))
    optimizer = optimizer if optimizer.fit_to_specs is None else optimizer.fit_to_specs(specs)

    def step(weights, grads, state):
        wide, grads = jax.tree.map(lambda x: x.astype("float32"), (weights, grads))
        updates, state = optimizer.update(grads, state, wide)
        return jax.tree.map(lambda x: x.astype("bfloat16"), optax.apply_updates(wide, updates)), state

    weights = {"weight": jax.ShapeDtypeStruct(SHAPE, "bfloat16", sharding=sharding)}
    state = jax.eval_shape(optimizer.init, {"weight": jax.ShapeDtypeStruct(SHAPE, "float32")})
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
    memory = jax.jit(step, donate_argnums=(0, 2)).lower(weights, weights, state).compile().memory_analysis()
    size = math.prod(SHAPE)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / size == pytest.approx(STATE[name], rel=1e-2)
    assert memory.alias_size_in_bytes / size == pytest.approx(2 + STATE[name], rel=0.01), "updated in place"
    assert memory.temp_size_in_bytes / size <= TEMPORARIES[name]
