"""Attention sinks compared to their definition in float64: values, gradients, cache, the TPU kernel, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from plimsoll.framework.layers import kernels_splash
from plimsoll.framework.layers.attention_cache import attend_with_cache
from plimsoll.framework.layers.attention_kernels import choose_implementation, dot_product_attention
from plimsoll.framework.layers.kernels_call import SplashBlocks, describe_call, softmax_with_sinks

AXES = ("data", "fsdp", "expert", "seq", "model")
BATCH, LENGTH, HEADS, KV_HEADS, CHANNELS = 2, 150, 6, 2, 8


def arrays(length=LENGTH, dtype=np.float64):
    """Return queries, keys, values, sinks of very different sizes, and a direction for gradients."""
    rng = np.random.default_rng(0)
    shapes = [(BATCH, length, count, CHANNELS) for count in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, direction = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    sinks = np.asarray([-40.0, -1.0, 0.0, 2.0, 5.0, 40.0], dtype)
    return q, k, v, sinks, direction


def reference(q, k, v, sinks, window=None):
    """Compute attention by the definition: the sink is one more key, whose value is zero."""
    length = q.shape[1]
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    allowed = (j <= i) & (j > i - (window or length))
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            group = n // (q.shape[2] // k.shape[2])
            logits = q[b, :, n] @ k[b, :, group].T * q.shape[-1] ** -0.5
            logits = np.where(allowed, logits, -np.inf)
            with_sink = np.concatenate([logits, np.full((length, 1), sinks[n])], axis=1)
            powers = np.exp(with_sink - with_sink.max(axis=1, keepdims=True))
            out[b, :, n] = (powers / powers.sum(axis=1, keepdims=True))[:, :-1] @ v[b, :, group]
    return out


@pytest.mark.parametrize("window", [None, 17])
def test_values_match_the_definition(window):
    q, k, v, sinks, _ = arrays()
    with jax.enable_x64(True):
        ours = jax.jit(lambda *x: dot_product_attention(*x[:3], sinks_N=x[3], window=window))(q, k, v, sinks)
        np.testing.assert_allclose(ours, reference(q, k, v, sinks, window), rtol=1e-12, atol=1e-14)
    assert np.abs(np.asarray(ours)[:, :, -1]).max() < 1e-10, "a head whose sink is large attends to nothing"


def test_gradients_match_an_extra_key_without_a_value():
    q, k, v, sinks, direction = arrays(20)

    def ours(q, k, v, sinks):
        return jnp.vdot(dot_product_attention(q, k, v, sinks_N=sinks), direction)

    def plain(q, k, v, sinks):
        keys, values = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
        logits = jnp.einsum("bsnh,btnh->bnst", q, keys) * CHANNELS**-0.5
        logits = jnp.where(jnp.tri(20, dtype=bool), logits, -jnp.inf)
        column = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, column], axis=-1), axis=-1)[..., :-1]
        return jnp.vdot(jnp.einsum("bnst,btnh->bsnh", weights, values), direction)

    with jax.enable_x64(True):
        for ours_grad, plain_grad in zip(
            *(jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(q, k, v, sinks) for f in (ours, plain)), strict=True
        ):
            np.testing.assert_allclose(ours_grad, plain_grad, rtol=1e-11, atol=1e-13)


def test_a_row_with_nothing_but_its_sink_is_zero():
    weights = softmax_with_sinks(jnp.full((2, 3), -jnp.inf), jnp.asarray([[1.0], [-200.0]]))
    np.testing.assert_array_equal(weights, np.zeros((2, 3)))


@pytest.mark.pairs
@pytest.mark.parametrize("window", [None, 5])
def test_one_token_after_a_cache_is_the_last_row(window):
    q, k, v, sinks, _ = arrays(20)
    with jax.enable_x64(True):
        whole = dot_product_attention(q, k, v, sinks_N=sinks, window=window)
        empty = np.full((BATCH, 3, KV_HEADS, CHANNELS), 7.0)
        cache = {"key": np.concatenate([k[:, :-1], empty], 1), "value": np.concatenate([v[:, :-1], empty], 1)}
        last = attend_with_cache(
            q[:, -1:],
            k[:, -1:],
            v[:, -1:],
            cache,
            first_B=jnp.zeros(BATCH, jnp.int32),
            slot=jnp.int32(19),
            scale=CHANNELS**-0.5,
            window=window,
            sinks_N=sinks,
        )
        np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-12, atol=1e-14)


SPLASH = {
    "window": ((1, 256, 2, 1, 64), {"window": 100}, None),
    "one backward kernel": ((1, 256, 2, 1, 64), {"splash": SplashBlocks(128, 128, fused_backward=True)}, None),
    "eight devices": ((2, 512, 4, 2, 64), {"window": 200}, (1, 2, 1, 2, 2)),
}


@pytest.mark.pairs
@pytest.mark.parametrize("case", SPLASH)
def test_the_interpreted_kernel_for_tpu_equals_xla(case):
    (B, S, N, K, H), options, sizes = SPLASH[case]
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (jnp.asarray(rng.normal(size=(B, S, n, H)), jnp.float32) for n in (N, K, K, N))
    sinks = jnp.asarray(rng.normal(size=N), jnp.float32)
    segments = np.sort(rng.integers(1, 4, size=(B, S)), axis=1).astype(np.int32)
    mesh = None if sizes is None else Mesh(np.asarray(jax.devices()[: np.prod(sizes)]).reshape(sizes), AXES)

    def splash(q, k, v, sinks):
        told = (options.get("window"), None, mesh, None, options.get("splash", SplashBlocks()), sinks)
        call = describe_call(q, k, v, segments, *told)
        out = kernels_splash.attend(call, q, k, v, segments, sinks, interpret=True)
        return jnp.vdot(out, cotangent), out

    def xla(q, k, v, sinks):
        out = dot_product_attention(
            q, k, v, segments_BS=segments, sinks_N=sinks, implementation="xla", window=options.get("window")
        )
        return jnp.vdot(out, cotangent), out

    results = [
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, sinks) for f in (splash, xla)
    ]
    ((_, ours), our_gradients), ((_, theirs), their_gradients) = results
    for a, b in zip((ours, *our_gradients), (theirs, *their_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=5e-5)


def test_where_a_kernel_has_no_sinks_auto_takes_another_and_its_name_is_refused(monkeypatch):
    monkeypatch.setattr("plimsoll.framework.layers.kernels_cudnn._PLUGINS", ("jax",))
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    sinks = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    for platform, chosen, without in (("gpu", "triton", "cudnn"), ("tpu", "splash", "splash"), ("cpu", "xla", "xla")):
        call = describe_call(q, k, k, None, None, None, None, sinks=sinks)
        call = type(call)(**{**vars(call), "platform": platform})
        assert choose_implementation(call) == chosen
        assert choose_implementation(type(call)(**{**vars(call), "has_sinks": False})) == without
        if platform == "gpu":
            with pytest.raises(ValueError, match=r"cudnn' does not support this call: .* it has no sinks; use triton"):
                choose_implementation(call, "cudnn")


@pytest.mark.pairs
def test_sinks_with_another_head_count_are_refused():
    q, k, v, sinks, _ = arrays(20, np.float32)
    with pytest.raises(ValueError, match=r"sinks: expected floats \(6,\), given float32 \(5,\)"):
        dot_product_attention(q, k, v, sinks_N=sinks[:5])
