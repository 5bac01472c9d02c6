"""An MLP that runs for a part of each row at a time equals one that runs for all tokens, and takes less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plimsoll as pl
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layout import Nested, initialize
from tests.support import small

DIM, HIDDEN, LENGTH = 32, 256, 96
CTX = Context(batch={})


def build(chunk_tokens: int, **options) -> MLP:
    return pl.config_for(MLP, dim=DIM, hidden=HIDDEN, chunk_tokens=chunk_tokens, **options).instantiate()


def gradients(mlp: MLP):
    def loss(params: Nested, x: jax.Array) -> jax.Array:
        y, _ = mlp.apply(mlp.prepare(params, CTX), x, CTX, {})
        return jnp.sum(jnp.sin(10 * y.astype(x.dtype)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def make_arguments(mlp: MLP, dtype: jnp.dtype = jnp.float32) -> tuple[Nested, jax.Array]:
    params = initialize(mlp.parameter_specs(), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, DIM), dtype)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params), x


@pytest.mark.parametrize("options", [{}, {"gated": True, "activation": "silu"}], ids=["plain", "gated"])
@pytest.mark.parametrize("chunk_tokens", [1, 30, 64, 1000])
def test_values_and_gradients_are_those_of_all_tokens_at_once(options, chunk_tokens):
    params, x = make_arguments(build(0, **options))
    expected = gradients(build(0, **options))(params, x)
    actual = gradients(build(chunk_tokens, **options))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), actual, expected)


def test_bfloat16_gradients_are_summed_over_chunks_in_float32():
    """96 chunks of two tokens: sums in bfloat16 would be off by percents."""
    params, x = make_arguments(build(0))
    _, (expected, _) = gradients(build(0))(params, x)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def loss(params: Nested, x: jax.Array, mlp: MLP) -> jax.Array:
        ctx = Context(batch={}, compute_dtype=jnp.bfloat16)
        y, _ = mlp.apply(mlp.prepare(params, ctx), x.astype(jnp.bfloat16), ctx, {})
        return jnp.sum(jnp.sin(10 * y.astype(jnp.float32)))

    errors = []
    for chunk_tokens in (0, 2):
        actual = jax.grad(loss)(narrow, x, build(chunk_tokens))
        difference = actual["up"]["weight"].astype(jnp.float32) - expected["up"]["weight"]
        errors.append(float(jnp.linalg.norm(difference) / jnp.linalg.norm(expected["up"]["weight"])))
    assert errors[1] < 1.2 * errors[0]


def test_hidden_units_of_one_chunk_exist_at_a_time():
    plain, chunked = build(0, gated=True), build(16, gated=True)
    params, x = make_arguments(plain)
    temporary = [
        gradients(mlp).lower(params, x).compile().memory_analysis().temp_size_in_bytes for mlp in (plain, chunked)
    ]
    hidden_bytes = 2 * LENGTH * HIDDEN * 4
    # Without chunks, at least gate, up and their gradients exist at once.
    assert temporary[0] > 4 * hidden_bytes
    assert temporary[1] < 2 * hidden_bytes


@pytest.mark.pairs
def test_adapters_on_quantized_weights_are_trained_alike():
    states = []
    for chunk_tokens in (0, 8):
        config = small.llama()
        small.block(config).mlp.chunk_tokens = chunk_tokens
        config.lora = pl.config_for(pl.LoRA, rank=4, base="int8")
        states.append(small.run(small.program(small.experiment(config)), 3)[0])
    small.assert_close(small.arrays(states[1].parameter), small.arrays(states[0].parameter), 2e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "seq": 4}, {"data": 2, "fsdp": 2, "model": 2}], ids=str)
def test_eight_devices_equal_one(mesh):
    states = []
    for chunk_tokens, sizes in ((0, {}), (8, mesh)):
        config = small.llama()
        small.block(config).mlp.chunk_tokens = chunk_tokens
        program = small.program(small.experiment(config, mesh=sizes))
        states.append(small.run(program, 3)[0])
    small.assert_close(small.arrays(states[1].parameter), small.arrays(states[0].parameter), 2e-5)


def test_one_scale_for_all_tokens_is_refused():
    config = small.llama()
    small.block(config).mlp.chunk_tokens = 8
    config.precision = {"mlp": "fp8_delayed"}
    with pytest.raises(ValueError, match=r"chunk_tokens = 8 of an MLP: expected 0 with model\.precision = fp8_delayed"):
        small.program(small.experiment(config))
