"""LoRA around a handwritten transformer: equal to merged weights, and no array of a frozen matrix's size."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl
from tests.support import small_transformer
from tests.support.adapters import assert_close, assert_equals_merged, dense, random_adapters
from tests.support.small_transformer import MATRICES

# Stored in 4 bits. The embedding is not, because its rows are looked up.
QUANTIZED = "qkv|out|up|down"
FROZEN = f"params/(layers/)?({MATRICES})"


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def params(quantized: bool = False) -> Any:
    arrays = small_transformer.init("float64")
    return pl.lora_quantize(arrays, QUANTIZED) if quantized else arrays


def train_step(params: Any, adapters: Any, tokens: jax.Array) -> Any:
    """Return the loss and the gradients of only the adapters."""
    return jax.value_and_grad(pl.with_lora(small_transformer.loss), argnums=1)(params, adapters, tokens)


@pytest.mark.pairs
@pytest.mark.parametrize("quantized", [False, True], ids=["arrays", "nf4"])
def test_values_and_gradients_match_merged_weights(quantized: bool):
    weights = params(quantized)
    adapters = random_adapters(weights, MATRICES)
    assert len(adapters) == 5
    assert_equals_merged(small_transformer.loss, weights, adapters, small_transformer.tokens())


@pytest.mark.pairs
def test_matrices_in_4_bits_without_an_adapter_are_dequantized_where_they_are_used():
    weights = params(quantized=True)
    adapters = random_adapters(weights, "embed")
    assert_equals_merged(small_transformer.loss, weights, adapters, small_transformer.tokens())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_buffer_is_as_large_as_a_frozen_matrix(dtype: str):
    shapes = jax.eval_shape(lambda: small_transformer.init(dtype))
    adapters = jax.eval_shape(lambda: pl.lora_init(jax.random.key(0), shapes, MATRICES, rank=3))
    pl.check_frozen(jax.jit(train_step), shapes, adapters, small_transformer.tokens(), frozen=FROZEN)


@pytest.mark.pairs
def test_no_stack_in_4_bits_is_dequantized_as_a_whole():
    shapes = jax.eval_shape(lambda: params(quantized=True))
    adapters = jax.eval_shape(lambda: pl.lora_init(jax.random.key(0), shapes, MATRICES, rank=3))
    pl.check_frozen(train_step, shapes, adapters, small_transformer.tokens(), frozen=f"params/layers/({QUANTIZED})")

    def step_with_dense(params: Any, adapters: Any, tokens: jax.Array) -> Any:
        return train_step(dense(params), adapters, tokens)

    with pytest.raises(pl.FrozenBufferError, match=r"f64\[5,64,192\].*params/layers/qkv"):
        pl.check_frozen(
            step_with_dense, shapes, adapters, small_transformer.tokens(), frozen=f"params/layers/({QUANTIZED})"
        )


@pytest.mark.pairs
def test_merged_weights_do_cost_a_buffer():
    """The reason for `with_lora`: if the step merges the adapters, the same check of the same model fails."""
    weights = small_transformer.init("float32")
    adapters = pl.lora_init(jax.random.key(0), weights, MATRICES, rank=3)

    def step_with_merged(params: Any, adapters: Any, tokens: jax.Array) -> Any:
        return jax.value_and_grad(lambda one: small_transformer.loss(pl.lora_merge(params, one), tokens))(adapters)

    with pytest.raises(pl.FrozenBufferError, match="params/embed"):
        pl.check_frozen(step_with_merged, weights, adapters, small_transformer.tokens(), frozen="params/embed")


@pytest.mark.pairs
def test_adapters_change_nothing_at_first_and_learn():
    weights = params()
    tokens = small_transformer.tokens()
    adapters = pl.lora_init(jax.random.key(0), weights, MATRICES, rank=3, dtype="float64")
    step = jax.jit(train_step)
    first_loss, gradient = step(weights, adapters, tokens)
    assert_close(first_loss, small_transformer.loss(weights, tokens))
    optimizer = optax.adam(0.01)
    moments = optimizer.init(adapters)
    for _ in range(3):
        updates, moments = optimizer.update(gradient, moments, adapters)
        adapters = optax.apply_updates(adapters, updates)
        last_loss, gradient = step(weights, adapters, tokens)
    assert last_loss < first_loss


@pytest.mark.pairs
def test_merged_weights_are_unmerged_again():
    weights = params()
    adapters = random_adapters(weights, "embed|up")
    merged = pl.lora_merge(weights, adapters)
    product = adapters["layers/up"].scale * jnp.einsum("lir,lro->lio", adapters["layers/up"].a, adapters["layers/up"].b)
    assert_close(merged["layers"]["up"], weights["layers"]["up"] + product)
    assert merged["layers"]["down"] is weights["layers"]["down"]
    for restored, weight in zip(
        jax.tree.leaves(pl.lora_unmerge(merged, adapters)), jax.tree.leaves(weights), strict=True
    ):
        assert_close(restored, weight)


@pytest.mark.pairs
def test_merging_adds_in_float32_and_keeps_the_dtype():
    weights = {"w": jnp.full((4, 4), 1.0, jnp.bfloat16)}
    factors = (jnp.full((4, 1), 1.0), jnp.full((1, 4), 2.0**-9))
    adapters = {"w": pl.Adapter(factors[0].astype(jnp.bfloat16), factors[1].astype(jnp.bfloat16), 3.0)}
    merged = pl.lora_merge(weights, adapters)["w"]
    assert merged.dtype == jnp.bfloat16
    # 1 + 3 * 2^-9 is rounded up to 1 + 2^-7; each 2^-9 added separately would be rounded away.
    np.testing.assert_array_equal(merged.astype(jnp.float32), np.float32(1 + 2.0**-7))


@pytest.mark.pairs
def test_quantized_matrix_reports_shape_and_dtype():
    weights = small_transformer.init("float64")["layers"]
    stored = pl.lora_quantize(weights, "up")["up"]
    assert stored.shape == weights["up"].shape
    assert stored.codes.nbytes == weights["up"].size // 2
    error = jnp.abs(stored.dense() - weights["up"]).reshape(5, 1, 64, 128)
    # Neighboring NF4 values differ by at most 0.31 of the block's largest magnitude.
    assert jnp.all(jnp.max(error, axis=2) <= 0.16 * stored.scales)
    merged = pl.lora_merge({"up": stored}, random_adapters({"up": stored}, "up"))["up"]
    assert merged.shape == weights["up"].shape


@pytest.mark.pairs
def test_random_factor_is_on_the_input_side():
    shapes = {"w": jax.ShapeDtypeStruct((8, 24), "float32"), "kernel": jax.ShapeDtypeStruct((3, 8, 4, 6), "float32")}
    key = jax.random.key(0)
    first = pl.lora_init(key, shapes, "w", rank=2, alpha=8)["w"]
    last = pl.lora_init(key, shapes, "w", rank=2, inputs_first=False)["w"]
    assert first.scale == 4
    for random, zeros, inputs in ((first.a, first.b, 8), (last.b, last.a, 24)):
        assert not jnp.any(zeros)
        assert 0.7 * inputs**-0.5 < jnp.max(jnp.abs(random)) <= inputs**-0.5
    heads = pl.lora_init(key, shapes, "kernel", rank=2, matrix_axes=(1, 2))["kernel"]
    assert (heads.a.shape, heads.b.shape) == ((3, 8, 2), (3, 2, 4, 6))
    # Adding a target does not change the other adapters.
    both = pl.lora_init(key, shapes, "w|kernel", rank=2)
    np.testing.assert_array_equal(both["w"].a, pl.lora_init(key, shapes, "w", rank=2)["w"].a)
    assert not np.array_equal(both["kernel"].a[0], both["kernel"].a[1])


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("layers/pu", {}, ["matches none of 6 leaves", "nearest: 'layers/up'"]),
        ("up", {"rank": 0}, ["rank = 0"]),
        ("embed", {"matrix_axes": (1, 2)}, ["embed [352, 64] has fewer axes"]),
    ],
)
def test_invalid_adapters_are_refused(target: str, options: dict[str, Any], words: list[str]):
    with pytest.raises(ValueError) as error:
        pl.lora_init(jax.random.key(0), params(), target, **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.pairs
def test_adapters_from_another_model_are_refused():
    weights = params()
    adapters = random_adapters(weights, "up")
    with pytest.raises(ValueError, match="'layers/upp' is none of 6 matrices; nearest: 'layers/up'"):
        pl.lora_merge(weights, {"layers/upp": adapters["layers/up"]})
    with pytest.raises(ValueError, match=r"'layers/down' has factors of \(5, 64, 3\) and \(5, 3, 128\)"):
        pl.with_lora(small_transformer.loss)(weights, {"layers/down": adapters["layers/up"]}, None)
    with pytest.raises(ValueError, match=r"w \[96, 4\]: nf4 has blocks of 64"):
        pl.lora_quantize({"w": jnp.ones((96, 4))}, "w")
