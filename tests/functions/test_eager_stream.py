"""Modules with a `stream` optimizer match modules with the plain optimizer, and their state is in host memory."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl
from plimsoll.framework.layout import flatten
from tests.support.eager import OPTIMIZERS, assert_equal, eager_steps, random

# A layer's matrix has 1 MiB in float64 and is updated in slices.
LAYERS, DIM, HIDDEN = 3, 256, 512
CHUNK_BYTES = 1 << 18
STREAMED_OPTIMIZERS = [name for name in OPTIMIZERS if name not in ("adafactor", "adalomo")]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def weights() -> dict[str, jax.Array]:
    kernels = {"up": random(0, LAYERS, DIM, HIDDEN), "down": random(1, LAYERS, HIDDEN, DIM)}
    return {**jax.tree.map(lambda kernel: 0.05 * kernel, kernels), "bias": random(2, LAYERS, DIM)}


def layer(weights: Any, x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"] + weights["bias"], factor * jnp.mean(
        weights["up"] * x[0, 0]
    )


def compute_loss(outputs: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.sum(jnp.sin(outputs[0])) + jnp.sum(outputs[1])


def stack_steps(optimizer: Any, factors: Any = (1.0, 1.0, 1.0), **options: Any) -> tuple[Any, Any]:
    stack = pl.eager_scan(jax.checkpoint(layer), optimizer, name="stack", **options)
    x = random(7, 4, DIM)

    def loss(trained: Any) -> jax.Array:
        return compute_loss(stack(trained["stack"], x, jnp.asarray(factors)))

    return eager_steps(loss, {"stack": stack.init(weights())}, 2)


def get_memory_kinds(state: Any) -> dict[str, str]:
    return {path: leaf.sharding.memory_kind for path, leaf in flatten(state).items()}


@pytest.mark.pairs
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_is_updated_as_without_the_stream(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    if name not in STREAMED_OPTIMIZERS:
        # The state of these optimizers is vectors, which are too small to be offloaded.
        optimizer = optax.chain(optax.trace(0.9), optimizer)
    actual = stack_steps(pl.stream(optimizer, chunk_bytes=CHUNK_BYTES))
    expected = stack_steps(optimizer)
    offloaded = [path for path, kind in get_memory_kinds(actual[1]["stack"]).items() if kind == "pinned_host"]
    assert offloaded
    assert all(path.endswith(("up", "down")) for path in offloaded)
    assert_equal(jax.device_get(actual), jax.device_get(expected))


@pytest.mark.pairs
@pytest.mark.parametrize("name", STREAMED_OPTIMIZERS)
def test_streaming_equals_plain_updates_with_shared_weights(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    x = random(7, 4, DIM)
    one = {key: leaf[0] for key, leaf in weights().items()}

    def steps(optimizer: Any) -> tuple[Any, Any]:
        piece = pl.eager(lambda weights, x: layer(weights, x, jnp.zeros(()))[0], optimizer, name="piece")
        shared = pl.eager_weights(optimizer, name="shared")

        def loss(trained: Any) -> jax.Array:
            both = shared(trained["shared"])
            return jnp.sum(jnp.sin(piece(trained["piece"], x @ both) @ both.T))

        return eager_steps(loss, {"piece": piece.init(one), "shared": shared.init(one["up"][:, :DIM] + 0.1)}, 2)

    actual = steps(pl.stream(optimizer, chunk_bytes=CHUNK_BYTES))
    assert "pinned_host" in get_memory_kinds(actual[1]["piece"]).values()
    assert_equal(jax.device_get(actual), jax.device_get(steps(optimizer)))


@pytest.mark.pairs
def test_nonfinite_gradient_leaves_its_layer_unchanged() -> None:
    new_weights, state = stack_steps(pl.stream(optax.adamw(0.01), chunk_bytes=CHUNK_BYTES), (jnp.inf, 1.0, 1.0))
    np.testing.assert_array_equal(state["stack"][0].count, [0, 2, 2])
    np.testing.assert_array_equal(np.asarray(state["stack"][0].mu["up"])[0], 0)
    np.testing.assert_array_equal(new_weights["stack"]["up"][0], weights()["up"][0])
    assert not jnp.array_equal(new_weights["stack"]["up"][1], weights()["up"][1])


def test_updates_are_limited_by_tensor() -> None:
    optimizer = optax.sgd(1.0, momentum=0.9)
    actual = stack_steps(pl.stream(optimizer, chunk_bytes=CHUNK_BYTES), max_update_rms=1e-3)
    assert_equal(jax.device_get(actual), jax.device_get(stack_steps(optimizer, max_update_rms=1e-3)))


def test_provided_state_is_moved_to_the_host() -> None:
    optimizer = pl.stream(optax.sgd(0.1, momentum=0.9))
    stack = pl.eager_scan(layer, optimizer, name="stack")
    given = jax.tree.map(jnp.ones_like, jax.device_get(stack.init(weights()).state))
    trained = stack.init(weights(), given)
    assert get_memory_kinds(trained.state)["0/trace/up"] == "pinned_host"
    np.testing.assert_array_equal(np.asarray(trained.state[0].trace["up"]), 1)


def test_unsupported_uses_are_refused() -> None:
    stack = pl.eager_scan(layer, pl.stream(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))), name="stack")
    with pytest.raises(ValueError, match="stack: the rule looks at several tensors together"):
        stack.init(weights())

    def zeros(params: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, "int64"), params)

    def count_updates(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return updates, jax.tree.map(lambda leaf: leaf + 1, state)

    integers = optax.GradientTransformation(zeros, count_updates)
    stack = pl.eager_scan(layer, pl.stream(integers), name="stack")
    with pytest.raises(ValueError, match=r"stack: its state (up|down) is int64, which a module stores as floats"):
        stack.init(weights())
