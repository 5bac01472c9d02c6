"""Latent attention compared to its formulas in float64; values of other widths, meshes, and the FLOP count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.layers import kernels_cudnn, kernels_splash
from plimsoll.framework.layers.attention_kernels import choose_implementation, dot_product_attention
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.kernels_call import describe_call
from plimsoll.framework.layout import initialize
from plimsoll.framework.layout.trees import flatten
from tests.support import small
from tests.support.latent import attention, with_latents


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Return equation 1 of Vaswani et al. 2017 with a causal mask, float64 [B, S, N, V]."""
    logits = np.einsum("bsnh,btnh->bnst", q, k) * scale
    logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnst,btnv->bsnv", weights, v)


def rotate_pairs(x: np.ndarray, theta: float = 10_000.0) -> np.ndarray:
    """Rotate each pair of adjacent channels, as a complex number, by its position; float64 [B, S, N, P]."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    frequencies = theta ** -(np.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = np.arange(x.shape[1])[:, None, None] * frequencies
    product = pairs * np.exp(1j * angles)
    return np.stack([product.real, product.imag], axis=-1).reshape(x.shape)


def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def by_hand(w: dict[str, np.ndarray], x: np.ndarray, heads: int, plain: int, value: int) -> np.ndarray:
    """Compute equations 37 to 47 of DeepSeek-V2 (arXiv 2405.04434) in float64."""
    rank = w["kv_norm/scale"].size
    if "query/weight" in w:
        q = x @ w["query/weight"]
    else:
        q = rms(x @ w["query_down/weight"], w["query_norm/scale"]) @ w["query_up/weight"]
    q = q.reshape(*x.shape[:2], heads, -1)
    down = x @ w["kv_down/weight"]
    up = (rms(down[..., :rank], w["kv_norm/scale"]) @ w["kv_up/weight"]).reshape(*x.shape[:2], heads, plain + value)
    rotary_key = np.repeat(rotate_pairs(down[:, :, None, rank:]), heads, axis=2)
    q = np.concatenate([q[..., :plain], rotate_pairs(q[..., plain:])], axis=-1)
    k = np.concatenate([up[..., :plain], rotary_key], axis=-1)
    y = softmax_attention(q, k, up[..., plain:], q.shape[-1] ** -0.5)
    return y.reshape(*x.shape[:2], -1) @ w["output/weight"]


@pytest.mark.parametrize("query_rank", [None, 10])
def test_the_layer_is_its_formulas(query_rank):
    with jax.enable_x64(True):
        layer = attention(query_rank).instantiate(dim=16)
        specs = jax.tree.map(lambda spec: dataclasses.replace(spec, dtype="float64"), layer.parameter_specs())
        params = initialize(specs, jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (2, 9, 16), "float64")
        ctx = Context({"tokens": jnp.zeros((2, 9), jnp.int32)}, compute_dtype=jnp.float64)
        y, out = layer.apply(layer.prepare(params, ctx), x, ctx, {})
        weights = {path: np.asarray(value) for path, value in flatten(params).items()}
    assert out.layer_state == {}
    expected = by_hand(weights, np.asarray(x), layer.num_heads, layer.plain_dim, layer.value_dim)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-12, atol=1e-13)


def draw(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@pytest.mark.pairs
@pytest.mark.parametrize("value_dim", [8, 24])
def test_values_may_be_narrower_or_wider_than_keys(value_dim):
    q = draw(2, 256, 2, 16, seed=0)
    k = draw(2, 256, 2, 16, seed=1)
    v = draw(2, 256, 2, value_dim, seed=2)
    expected = softmax_attention(*(np.asarray(x, np.float64) for x in (q, k, v)), scale=0.25)
    y = dot_product_attention(q, k, v)
    assert y.shape == (2, 256, 2, value_dim)
    np.testing.assert_allclose(y, expected, atol=2e-6)
    # The TPU kernel runs here interpreted.
    call = dataclasses.replace(describe_call(q, k, v, None, None, None, None), platform="tpu")
    assert choose_implementation(call) == "splash"
    np.testing.assert_allclose(kernels_splash.attend(call, q, k, v, None, interpret=True), expected, atol=2e-5)


def test_kernel_refuses_unequal_key_and_value_widths():
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    for_values = lambda dim: dataclasses.replace(  # noqa: E731
        describe_call(q, q, jax.ShapeDtypeStruct((2, 256, 2, dim), jnp.bfloat16), None, None, None, None),
        platform="tpu",
    )
    assert kernels_splash.why_not(for_values(32)) is None
    assert "channels per head of values, not 33" in kernels_splash.why_not(for_values(33))
    wide = dataclasses.replace(for_values(72), platform="gpu")
    assert choose_implementation(wide) == "xla"
    assert kernels_cudnn.why_not(wide) is not None
    with pytest.raises(ValueError, match=r"value \[B, S, K, V\]"):
        dot_product_attention(draw(1, 8, 2, 4, seed=0), draw(1, 8, 2, 4, seed=0), draw(1, 8, 1, 4, seed=0))


MESHES = [{"expert": 2, "fsdp": 2, "model": 2}, {"data": 2, "expert": 2, "model": 2}, {"fsdp": 2, "seq": 2, "model": 2}]


@pytest.mark.pairs
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh))
def test_eight_devices_equal_one(mesh):
    model = with_latents(small.llama())
    alone = small.program(small.experiment(model))
    state = alone.init()
    loss, grads = small.loss_and_grads(alone, state)
    spread = small.program(small.experiment(model, mesh=mesh))
    spread_loss, spread_grads = small.loss_and_grads(spread, jax.device_get(state))
    np.testing.assert_allclose(spread_loss, loss, rtol=1e-6)
    small.assert_close(spread_grads, grads, 2e-5)


def test_a_mesh_that_cuts_a_head_is_refused():
    config = small.experiment(with_latents(small.llama()), mesh={"model": 8})
    with pytest.raises(ValueError, match=r"mesh\.model = 8 does not divide num_heads = 4"):
        small.program(config)


@pytest.mark.pairs
def test_flops_count_every_product():
    layer = attention().instantiate(dim=16)
    # query_down, query_up, kv_down, kv_up, output; then Q K and A V.
    matrices = 16 * 10 + 10 * 4 * 10 + 16 * 16 + 12 * 4 * 11 + 4 * 5 * 16
    assert layer.flops_per_token(0) == 2 * matrices
    assert layer.flops_per_token(32) == 2 * matrices + 2 * 4 * (10 + 5) * 32
