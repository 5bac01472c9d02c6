"""Models from outside Plimsoll match `jax.grad` and optax: a handwritten transformer, and flax and equinox models."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl
from tests.support.eager import OPTIMIZERS, assert_equal, eager_steps, plain_steps, random

DIM, HEADS, TOKENS, VOCAB = 8, 2, 5, 11
BATCH = np.random.default_rng(0).integers(0, VOCAB, (3, TOKENS))


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def block(weights: Any, x: jax.Array) -> jax.Array:
    """Apply a causal transformer block, [batch, tokens, dim] -> [batch, tokens, dim]."""
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


@pytest.mark.pairs
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_transformer_by_hand_with_a_tied_table(name: str) -> None:
    """The table is both embedding and head, so its gradient is the sum of both."""
    optimizer = OPTIMIZERS[name]()
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


@pytest.mark.once("lion")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flax_linen_transformer(name: str) -> None:
    """The model has two blocks, one of them under flax's remat, between a tied embedding and head."""
    nn = pytest.importorskip("flax.linen")
    dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            # The gradient of a key bias is only rounding error, which AdamW would turn into a full step.
            attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, use_bias=False, **dtypes)
            x = x + attention(nn.LayerNorm(**dtypes)(x), mask=mask)
            return x + nn.Dense(DIM, **dtypes)(nn.gelu(nn.Dense(4 * DIM, **dtypes)(nn.LayerNorm(**dtypes)(x))))

    modules = {"block0": Block(), "block1": nn.remat(Block)()}
    optimizer = OPTIMIZERS[name]()
    x = random(0, *BATCH.shape, DIM)
    weights = {key: module.init(jax.random.key(1), x) for key, module in modules.items()}
    weights["table"] = 0.3 * random(3, VOCAB, DIM)
    layers = {key: pl.eager(module.apply, optimizer, name=key) for key, module in modules.items()}
    table = pl.eager_weights(optimizer, name="table")
    trained = {key: piece.init(weights[key]) for key, piece in {**layers, "table": table}.items()}

    def loss(rows: jax.Array, apply: Any) -> jax.Array:
        x = apply("block1", apply("block0", rows[BATCH]))
        return cross_entropy(x @ rows.T, BATCH)

    actual = eager_steps(lambda t: loss(table(t["table"]), lambda key, x: layers[key](t[key], x)), trained)
    expected = plain_steps(lambda w: loss(w["table"], lambda key, x: modules[key].apply(w[key], x)), optimizer, weights)
    for one, other in zip(actual, expected, strict=True):
        assert_equal(dict(sorted(one.items())), dict(sorted(other.items())))


def test_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.Linear(DIM, DIM, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    graph, module_weights = nnx.split(module)
    optimizer = optax.adamw(0.01)
    x = random(0, 3, DIM)

    def piece(weights: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights)(x)

    layer = pl.eager(piece, optimizer, name="linear")
    weights = {"linear": module_weights}
    actual = eager_steps(lambda t: layer(t["linear"], x).sum(), {"linear": layer.init(module_weights)})
    expected = plain_steps(lambda w: piece(w["linear"], x).sum(), optimizer, weights)
    assert_equal(actual, expected)


@pytest.mark.once("momentum", "adafactor")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equinox_transformer(name: str) -> None:
    """The module has leaves that are not arrays: an activation function and sizes."""
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 2)

    class Block(eqx.Module):
        attention: Any
        mlp: Any
        norm: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            normed = jax.vmap(self.norm)(x)
            x = x + self.attention(normed, normed, normed, mask=jnp.tril(jnp.ones((TOKENS, TOKENS), bool)))
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))

    attention = eqx.nn.MultiheadAttention(HEADS, DIM, key=keys[0], dtype=jnp.float64)
    mlp = eqx.nn.MLP(DIM, DIM, 16, 2, activation=jnp.tanh, key=keys[1], dtype=jnp.float64)
    model = Block(attention, mlp, eqx.nn.LayerNorm(DIM, dtype=jnp.float64))
    optimizer = OPTIMIZERS[name]()
    x = random(0, 3, TOKENS, DIM)
    layer = pl.eager(eqx.filter_checkpoint(lambda model, x: jax.vmap(model)(x)), optimizer, name="block")
    trained = layer.init(model)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step = jax.jit(jax.grad(lambda trained: jnp.sin(layer(trained, x)).sum()))
    compute_gradient = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sin(jax.vmap(model)(x)).sum()))
    for _ in range(3):
        trained = step(trained)
        updates, state = optimizer.update(compute_gradient(model), state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
    assert trained.weights.mlp.activation is model.mlp.activation
    actual = eqx.filter(trained.weights, eqx.is_inexact_array)
    assert_equal(jax.tree.leaves(actual), jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    assert_equal(jax.tree.leaves(trained.state), jax.tree.leaves(state))
