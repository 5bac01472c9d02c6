"""LoRA around unchanged flax and equinox models, written as their users write them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import plimsoll as pl
from tests.support.adapters import assert_equals_merged, random_adapters

WIDTH = 24


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def flax_model() -> tuple[Any, Any, jax.Array]:
    """Return (loss, variables, tokens) of a model with a scan over blocks, remat and a tied embedding."""
    nn = pytest.importorskip("flax.linen")
    dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, **dtypes)(nn.LayerNorm(**dtypes)(x))
            return x + nn.Dense(WIDTH, **dtypes)(nn.gelu(nn.Dense(44, **dtypes)(x))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(70, WIDTH, **dtypes)
            blocks = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = blocks(name="blocks")(embed(tokens))
            return embed.attend(x)

    model = Model()
    tokens = jax.random.randint(jax.random.key(0), (2, 5), 0, 70)
    variables = model.init(jax.random.key(1), tokens)

    def loss(variables: Any, tokens: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.apply(variables, tokens)))

    return loss, variables, tokens


def test_flax() -> None:
    loss, variables, tokens = flax_model()
    adapters = random_adapters(variables, "embedding|Dense_.*/kernel")
    adapters |= random_adapters(variables, "(query|key|value)/kernel", matrix_axes=(1, 2))
    adapters |= random_adapters(variables, "out/kernel", matrix_axes=(2, 1))
    assert len(adapters) == 7
    assert adapters["params/blocks/MultiHeadDotProductAttention_0/out/kernel"].a.shape == (3, 4, 6, 3)
    assert_equals_merged(loss, variables, adapters, tokens)
    step = jax.jit(jax.value_and_grad(pl.with_lora(loss), argnums=1))
    pl.check_frozen(step, variables, adapters, tokens, frozen="^variables/.*(kernel|embedding)")


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)

    class Model(eqx.Module):
        attention: Any
        mlp: Any
        norm: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            normed = jax.vmap(self.norm)(x)
            return jax.vmap(self.mlp)(x + self.attention(normed, normed, normed))

    attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0], dtype=jnp.float64)
    mlp = eqx.nn.MLP(WIDTH, WIDTH, 40, 2, key=keys[1], dtype=jnp.float64)
    model = Model(attention, mlp, eqx.nn.LayerNorm(WIDTH, dtype=jnp.float64))
    x = jax.random.normal(keys[2], (2, 7, WIDTH), jnp.float64)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jax.vmap(model)(x)))

    target = r"attention/.*weight|mlp/layers/\d/weight"
    adapters = random_adapters(model, target, inputs_first=False)
    assert len(adapters) == 7
    assert_equals_merged(loss, model, adapters, x)
    step = eqx.filter_jit(jax.value_and_grad(pl.with_lora(loss), argnums=1))
    pl.check_frozen(step, model, adapters, x, frozen="^model/.*weight")
    # Without adapters, one layer is trained.
    last_layer = eqx.filter_jit(pl.differentiate(loss, trainable="mlp/layers/2/bias"))
    _, gradient = last_layer(model, x)
    assert [leaf.shape for leaf in jax.tree.leaves(gradient)] == [(WIDTH,)]
    pl.check_frozen(last_layer, model, x, frozen="^model/.*weight")
