"""The buffer never waits for the newest step, keeps order and values, and stays bounded."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from framework.metrics.buffer import MetricsBuffer


def test_every_step_in_order_one_late():
    buffer = MetricsBuffer()
    step_fn = jax.jit(lambda i: {"loss": i / 3, "count": (i * 2).astype(jnp.int32)})
    logged, on_device = [], {}
    for step in range(1, 6):
        on_device[step] = step_fn(jnp.float32(step))
        buffer.put(step, on_device[step])
        logged += buffer.take()
        assert [row[0] for row in logged] == list(range(1, step))
    logged += buffer.take(keep=0)
    assert [row[0] for row in logged] == [1, 2, 3, 4, 5]
    for step, values in logged:
        assert np.float32(values["loss"]).tobytes() == np.asarray(on_device[step]["loss"]).tobytes()
        assert type(values["loss"]) is float
        assert values["count"] == 2 * step
        assert type(values["count"]) is int
    assert len(buffer) == 0
    assert buffer.take(keep=0) == []


def test_take_does_not_wait_for_the_newest():
    @jax.jit
    def slow(x):  # about two seconds
        return jax.lax.fori_loop(0, 3000, lambda _, y: jnp.tanh(y @ y), x).sum()

    matrix = jnp.full((256, 256), 1e-3)
    buffer = MetricsBuffer()
    buffer.put(1, {"loss": jnp.float32(1.0)})
    newest = slow(matrix)
    buffer.put(2, {"loss": newest})
    assert buffer.take() == [(1, {"loss": 1.0})]
    assert not newest.is_ready()
    assert [step for step, _ in buffer.take(keep=0)] == [2]
    assert newest.is_ready()


def test_interval_gives_all_steps_of_it():
    buffer = MetricsBuffer()
    for step in range(10):
        buffer.put(step, {"loss": jnp.float32(step), "lr": 0.1})
    taken = buffer.take()
    assert taken == [(step, {"loss": float(step), "lr": 0.1}) for step in range(9)]
    assert len(buffer) == 1


def test_memory_is_bounded_without_losing_a_step():
    buffer = MetricsBuffer(capacity=4)
    held = []
    for step in range(50):
        buffer.put(step, {"loss": jnp.float32(step)})
        held.append(len(buffer._held))
    assert max(held) <= 4
    assert [step for step, _ in buffer.take(keep=0)] == list(range(50))


def test_values_of_all_sorts():
    buffer = MetricsBuffer()
    buffer.put(
        1, {"a": jnp.bfloat16(1.5), "b": jnp.float32(jnp.nan), "c": jnp.array(True), "d": 3, "e": np.float32(0.5)}
    )
    ((_, values),) = buffer.take(keep=0)
    assert (values["a"], values["c"], values["d"], values["e"]) == (1.5, True, 3, 0.5)
    assert math.isnan(values["b"])
    assert type(values["a"]) is float


def test_sharded_metrics():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    buffer = MetricsBuffer()
    buffer.put(1, {"loss": jax.device_put(np.float32(0.25), everywhere)})
    assert buffer.take(keep=0) == [(1, {"loss": 0.25})]


def test_misuse():
    buffer = MetricsBuffer()
    with pytest.raises(ValueError, match=r"'logits'.*\(2, 3\)"):
        buffer.put(1, {"logits": jnp.zeros((2, 3))})
    buffer.put(5, {})
    with pytest.raises(ValueError, match="step 5 were put after"):
        buffer.put(5, {})
    with pytest.raises(ValueError, match="capacity"):
        MetricsBuffer(0)
