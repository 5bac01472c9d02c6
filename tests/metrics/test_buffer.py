"""The metrics buffer never waits for the newest step, and keeps order and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.metrics.throughput import MetricsBuffer


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
    assert buffer.take(keep=0) == []


@pytest.mark.pairs
def test_take_does_not_wait_for_the_newest():
    @jax.jit
    def slow(x):  # takes about two seconds
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


def test_take_returns_all_steps_in_the_interval():
    buffer = MetricsBuffer()
    for step in range(10):
        buffer.put(step, {"loss": jnp.float32(step)})
    taken = buffer.take()
    assert taken == [(step, {"loss": float(step)}) for step in range(9)]
