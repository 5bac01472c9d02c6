"""Models of other people's: a transformer block by hand, of flax and of equinox, end where `jax.grad` and optax end."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import framework as pl
from tests.support.eager import assert_equal, eager_steps, plain_steps, random

DIM, HEADS, TOKENS, VOCAB = 8, 2, 5, 11
BATCH = np.random.default_rng(0).integers(0, VOCAB, (3, TOKENS))


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def block(weights: Any, x: jax.Array) -> jax.Array:
    """[batch, tokens, dim] -> the same."""
    queries, keys, values = jnp.split(norm(x, weights["norm1"]) @ weights["qkv"], 3, axis=-1)
    heads = [array.reshape(*array.shape[:-1], HEADS, -1) for array in (queries, keys, values)]
    x = x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(norm(x, weights["norm2"]) @ weights["up"]) @ weights["down"]


def block_weights(seed: int) -> dict[str, jax.Array]:
    shapes = {"qkv": (DIM, 3 * DIM), "out": (DIM, DIM), "up": (DIM, 4 * DIM), "down": (4 * DIM, DIM)}
    weights = {name: 0.3 * random(seed + number, *shape) for number, (name, shape) in enumerate(shapes.items())}
    return {**weights, "norm1": jnp.ones(DIM), "norm2": jnp.ones(DIM)}


def cross_entropy(logits: jax.Array, tokens: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def test_a_transformer_by_hand_with_a_tied_table() -> None:
    """The table embeds the tokens and is the head: its gradient is the sum of both."""
    optimizer = optax.adamw(0.01)
    layers = {name: pl.eager(jax.checkpoint(block), optimizer, name=name) for name in ("block0", "block1")}
    table = pl.eager_weights(optimizer, name="table")
    weights = {"table": 0.3 * random(0, VOCAB, DIM), "block0": block_weights(1), "block1": block_weights(9)}
    trained = {name: layer.init(weights[name]) for name, layer in {**layers, "table": table}.items()}

    def loss(rows: jax.Array, apply: Any) -> jax.Array:
        x = rows[BATCH]
        for name in layers:
            x = apply(name, x)
        return cross_entropy(x @ rows.T, BATCH)

    actual = eager_steps(lambda t: loss(table(t["table"]), lambda name, x: layers[name](t[name], x)), trained)
    expected = plain_steps(lambda w: loss(w["table"], lambda name, x: block(w[name], x)), optimizer, weights)
    assert_equal(dict(sorted(actual[0].items())), dict(sorted(expected[0].items())))
    assert_equal(dict(sorted(actual[1].items())), dict(sorted(expected[1].items())))


def test_flax_linen() -> None:
    nn = pytest.importorskip("flax.linen")
    module = nn.Dense(DIM, param_dtype=jnp.float64)
    optimizer = optax.sgd(0.1, momentum=0.9)
    x = random(0, 3, DIM)
    weights = {"dense": module.init(jax.random.key(0), x)}
    layer = pl.eager(module.apply, optimizer, name="dense")
    trained = {"dense": layer.init(weights["dense"])}
    actual = eager_steps(lambda t: jnp.tanh(layer(t["dense"], x)).sum(), trained)
    expected = plain_steps(lambda w: jnp.tanh(module.apply(w["dense"], x)).sum(), optimizer, weights)
    assert_equal(actual, expected)


def test_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.Linear(DIM, DIM, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    graph, weights_of_module = nnx.split(module)
    optimizer = optax.adamw(0.01)
    x = random(0, 3, DIM)

    def piece(weights: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights)(x)

    layer = pl.eager(piece, optimizer, name="linear")
    weights = {"linear": weights_of_module}
    actual = eager_steps(lambda t: layer(t["linear"], x).sum(), {"linear": layer.init(weights_of_module)})
    expected = plain_steps(lambda w: piece(w["linear"], x).sum(), optimizer, weights)
    assert_equal(actual, expected)


def test_equinox() -> None:
    """A module with an activation function and sizes, which are no arrays."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(DIM, DIM, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    optimizer = optax.adamw(0.01)
    x = random(0, 3, DIM)
    layer = pl.eager(lambda model, x: jax.vmap(model)(x), optimizer, name="mlp")
    trained = layer.init(model)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(3):
        trained = jax.jit(jax.grad(lambda trained: jnp.sin(layer(trained, x)).sum()))(trained)
        gradient = eqx.filter_grad(lambda model: jnp.sin(jax.vmap(model)(x)).sum())(model)
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
    assert trained.weights.activation is model.activation
    actual = eqx.filter(trained.weights, eqx.is_inexact_array)
    assert_equal(jax.tree.leaves(actual), jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    assert_equal(jax.tree.leaves(trained.state), jax.tree.leaves(state))
