"""Eager pieces and their references: a dense layer, and steps by `jax.grad` and optax or by `value_and_update`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import plimsoll as pl
from plimsoll.framework.optimizers.adalomo import adalomo

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(0.01),
    "lion": lambda: optax.lion(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    "muon": lambda: optax.contrib.muon(0.01),
    "adalomo": lambda: adalomo(learning_rate=0.1, weight_decay=0.1),
}
DIM = 6


def random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def dense(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights["kernel"] + weights["bias"])


def dense_weights(seed: int) -> dict[str, jax.Array]:
    return {"kernel": random(seed, DIM, DIM), "bias": random(seed + 1, DIM)}


X = np.random.default_rng(9).normal(size=(4, DIM))


def plain_steps(
    loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation, weights: Any, steps: int = 3
) -> tuple[Any, Any]:
    """Return (weights, state) after a few steps of `jax.grad` and optax.

    `weights` is a dict of pieces; each has its own optimizer state.
    """
    states = {name: optimizer.init(layer) for name, layer in weights.items()}
    for _ in range(steps):
        gradients = jax.jit(jax.grad(loss))(weights)
        for name, gradient in gradients.items():
            updates, states[name] = optimizer.update(gradient, states[name], weights[name])
            weights = {**weights, name: optax.apply_updates(weights[name], updates)}
    return weights, states


def eager_steps(loss: Callable[..., jax.Array], trained: Any, steps: int = 3) -> tuple[Any, Any]:
    """Return (weights, state) after a few steps of `value_and_update` with a donated state."""
    step = jax.jit(pl.value_and_update(loss), donate_argnums=0)
    # The step donates its argument, but the caller still compares with these weights.
    trained = jax.tree.map(jnp.copy, trained)
    for _ in range(steps):
        _, trained = step(trained)
    weights = {name: layer.weights for name, layer in trained.items()}
    return weights, {name: layer.state for name, layer in trained.items()}


def assert_equal(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
