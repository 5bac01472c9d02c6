"""Checkpoints in object stores."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from framework.checkpoint import Checkpointer


def _state(seed: int):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rng = np.random.default_rng(seed)
    dtypes = ["float32", "bfloat16", "float8_e4m3fn", "int4", "int8", "uint32", "bool", "float16", "complex64"]
    sharded = NamedSharding(mesh, PartitionSpec("x"))
    state = {dtype: jax.device_put(jnp.asarray(rng.integers(0, 2, (4, 6)), dtype), sharded) for dtype in dtypes}
    state["scalar"] = jax.device_put(jnp.float32(rng.random()), NamedSharding(mesh, PartitionSpec()))
    state["none"] = jax.device_put(jnp.zeros((0, 3)), NamedSharding(mesh, PartitionSpec()))
    return {"parameter": state}


def _abstract(state, spec=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def test_what_is_saved_is_restored(store):
    state = _state(0)
    with Checkpointer(directory=f"{store}/run/checkpoints", keep=2) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, _state(step), {"step": step})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
    again = Checkpointer(directory=f"{store}/run/checkpoints", read_only=True)
    restored = again.restore_latest(_abstract(state))
    assert restored.extra == {"step": 3}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), restored.state, _state(3))
