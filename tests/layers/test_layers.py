"""The small layers compared to numpy in float64: linear, norms, MLPs, rotary positions, embeddings."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.attention import Attention
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.embedding import Embedding
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.mlp import MLP
from plimsoll.framework.layers.norm import LayerNorm, RMSNorm
from plimsoll.framework.layers.rotary import Llama3Scaling, Rotary
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import flatten, initialize
from tests.support import small

CTX = Context(batch={})


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights(layer, seed: int = 0):
    """Return random values for all of a layer's parameters, including those that start at 0 or 1."""
    specs = layer.parameter_specs()
    leaves = [random(*spec.shape, seed=seed + i) for i, spec in enumerate(jax.tree.leaves(specs))]
    return jax.tree.unflatten(jax.tree.structure(specs), leaves)


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    layer = config_for(Linear, inputs=3, outputs=5, bias=bias).instantiate()
    w, x = weights(layer), random(2, 4, 3)
    expected = x.astype(np.float64) @ w["weight"] + (w["bias"] if bias else 0.0)
    np.testing.assert_allclose(layer(w, x, CTX), expected, rtol=1e-5, atol=1e-6)
    assert set(w) == ({"weight", "bias"} if bias else {"weight"})
    assert layer.flops_per_token(7) == 2 * 3 * 5


def test_initial_weights_are_scaled_and_biases_zero():
    specs = config_for(Linear, inputs=64, outputs=64, bias=True, init_scale=0.5).instantiate().parameter_specs()
    drawn = initialize(specs, jax.random.key(0))
    np.testing.assert_allclose(np.std(drawn["weight"]), 0.5 * 0.02, rtol=0.05)
    assert not np.any(drawn["bias"])


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(bias):
    layer = config_for(LayerNorm, dim=6, eps=1e-3, bias=bias).instantiate()
    w, x = weights(layer), 3.0 + random(2, 4, 6)
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * w["scale"]
    np.testing.assert_allclose(layer(w, x, CTX), y + (w["bias"] if bias else 0.0), rtol=1e-4, atol=1e-5)


def test_rms_norm():
    layer = config_for(RMSNorm, dim=6, eps=1e-3).instantiate()
    w, x = weights(layer), random(2, 4, 6)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * w["scale"]
    np.testing.assert_allclose(layer(w, x, CTX), expected, rtol=1e-5)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_bf16_norms_compute_in_float32(norm):
    """A mean of squares of 300 in bf16 would be off by percents; only the input and output may be rounded."""
    layer = config_for(norm, dim=64).instantiate()
    w = {name: np.ones(64, np.float32) * (name == "scale") for name in layer.param_specs()}
    x = jnp.asarray(300.0 + 10.0 * random(1, 64), jnp.bfloat16)
    y = layer({name: jnp.asarray(value, jnp.bfloat16) for name, value in w.items()}, x, CTX)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(y, np.float32), layer(w, np.asarray(x, np.float32), CTX), rtol=2**-7, atol=1e-6
    )


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation, gated):
    linear = config_for(Linear, bias=True)
    layer = config_for(MLP, dim=3, hidden=5, activation=activation, gated=gated, linear=linear).instantiate()
    w, x = weights(layer), random(2, 4, 3)
    wide = jax.tree.map(lambda p: p.astype(np.float64), w)

    def affine(name, value):
        return value @ wide[name]["weight"] + wide[name]["bias"]

    up = affine("up", x.astype(np.float64))
    hidden = ACTIVATIONS[activation](affine("gate", x)) * up if gated else ACTIVATIONS[activation](up)
    y, out = layer.apply(w, x, CTX, {})
    np.testing.assert_allclose(y, affine("down", hidden), rtol=2e-5, atol=1e-5)
    assert out.loss is None
    assert not out.metrics
    assert layer.flops_per_token(7) == 2 * 3 * 5 * (3 if gated else 2)


# --- rotary positions ------------------------------------------------------------------------------------------------


def test_rotary_rotates_pairs_from_the_two_halves():
    H, theta = 8, 100.0
    rotary = Rotary(head_dim=H, theta=theta)
    positions, x = np.array([[0, 1, 5, 31]]), random(1, 4, 2, H)
    (y,) = rotary(jnp.asarray(positions), jnp.asarray(x))
    turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(
        1j * positions[..., None, None] * theta ** (-np.arange(H // 2) / (H // 2))
    )
    np.testing.assert_allclose(y, np.concatenate([turned.real, turned.imag], axis=-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[:, 0], x[:, 0])


def test_rotary_scores_depend_only_on_distance():
    rotary = Rotary(head_dim=16)
    q, k = jnp.asarray(random(1, 1, 1, 16)), jnp.asarray(random(1, 1, 1, 16, seed=1))

    def score(at: int, of: int) -> float:
        (left,), (right,) = rotary(jnp.full((1, 1), at), q), rotary(jnp.full((1, 1), of), k)
        return float(jnp.sum(left * right))

    np.testing.assert_allclose(score(9, 4), score(105, 100), rtol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_llama3_scaling_as_its_reference_code_states_it():
    factor, low, high, length = 8.0, 1.0, 4.0, 64
    rotary = Rotary(
        head_dim=32,
        theta=10_000.0,
        scaling=config_for(
            Llama3Scaling, factor=factor, low_freq_factor=low, high_freq_factor=high, original_length=length
        ),
    )
    plain, expected = Rotary(head_dim=32, theta=10_000.0).frequencies, []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            expected.append(frequency)
        elif wavelength > length / low:
            expected.append(frequency / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    np.testing.assert_allclose(rotary.frequencies, expected, rtol=1e-12)
    unchanged, slowed = np.sum(rotary.frequencies == plain), np.sum(np.isclose(rotary.frequencies * factor, plain))
    assert unchanged > 0
    assert slowed > 0
    assert unchanged + slowed < len(plain)


# --- embedding -------------------------------------------------------------------------------------------------------


def test_embedding_adds_row_or_document_positions():
    layer = config_for(Embedding, vocab_size=9, dim=4, max_positions=6).instantiate()
    w = weights(layer)
    tokens = np.array([[1, 8, 0, 3, 3]])
    x, _ = layer.apply(w, None, Context(batch={"tokens": tokens}), {})
    np.testing.assert_allclose(x[0], w["token"][tokens[0]] + w["position"][:5], rtol=1e-6)
    positions = np.array([[0, 1, 0, 1, 2]])
    x, _ = layer.apply(w, None, Context(batch={"tokens": tokens, "positions": positions}), {})
    np.testing.assert_allclose(x[0], w["token"][tokens[0]] + w["position"][positions[0]], rtol=1e-6)


def test_embedding_without_positions():
    layer = config_for(Embedding, vocab_size=9, dim=4).instantiate()
    w = weights(layer)
    assert set(w) == {"token"}
    x, _ = layer.apply(w, None, Context(batch={"tokens": np.array([[2, 2]])}), {})
    np.testing.assert_array_equal(x[0, 0], w["token"][2])
    np.testing.assert_array_equal(x[0, 0], x[0, 1])


# --- dtypes, shapes, errors ------------------------------------------------------------------------------------------


def test_prepare_casts_every_weight_and_keeps_the_structure():
    attention = config_for(Attention, dim=8, num_heads=2, qk_norm=config_for(RMSNorm)).instantiate()
    prepared = attention.prepare(weights(attention), Context(batch={}, compute_dtype=jnp.bfloat16))
    assert flatten(prepared).keys() == flatten(attention.parameter_specs()).keys()
    assert {leaf.dtype for leaf in jax.tree.leaves(prepared)} == {jnp.dtype(jnp.bfloat16)}


def test_block_roles_and_axes():
    specs = flatten(small.llama().stack.pattern[0].instantiate(dim=32).parameter_specs())
    roles = {path: (spec.roles, spec.mesh_axes) for path, spec in specs.items()}
    assert roles["attention/query/weight"] == (("in", "heads"), ("fsdp", "model"))
    assert roles["attention/output/weight"] == (("heads", "out"), ("model", "fsdp"))
    assert roles["mlp/gate/weight"] == (("in", "hidden"), ("fsdp", "model"))
    assert roles["mlp/down/weight"] == (("hidden", "out"), ("model", "fsdp"))
    assert roles["mlp_norm/scale"] == (("channel",), (None,))
    assert specs["attention/key/weight"].shape == (32, 16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_for(Attention, dim=30, num_heads=4), r"num_heads = 4 does not divide dim = 30; nearest: \[3, 5\]"),
        (
            config_for(Attention, dim=32, num_heads=8, num_kv_heads=3),
            r"num_kv_heads = 3 does not divide num_heads = 8; nearest: \[2, 4\]",
        ),
        (
            config_for(Attention, dim=6, num_heads=2, rotary=config_for(Rotary)),
            "rotary positions need an even head_dim, not 3",
        ),
        (config_for(Stack, dim=8, num_layers=2, pattern=[]), "pattern needs at least one layer config"),
        (
            config_for(Stack, dim=8, num_layers=5, pattern=[config_for(MLP, hidden=4), config_for(MLP, hidden=4)]),
            "num_layers = 5 is not a multiple of the pattern's 2 layers; nearest: 4",
        ),
        (
            config_for(Stack, dim=8, num_layers=2, pattern=[config_for(MLP, hidden=4)], unroll=3),
            "unroll = 3 is not between 0 and 2, the number of repeats",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        config.instantiate()


def test_head_dim_may_differ_from_dim_over_heads():
    attention = config_for(Attention, dim=30, num_heads=4, head_dim=16).instantiate()
    assert attention.parameter_specs()["query"]["weight"].shape == (30, 64)
    assert attention.parameter_specs()["output"]["weight"].shape == (64, 30)
    assert attention.flops_per_token(10) == 4 * 2 * 30 * 64 + 4 * 64 * 10


@pytest.mark.pairs
@pytest.mark.parametrize("implementation", ["xla", "auto"])
def test_logit_scale_is_not_rounded_to_the_compute_dtype(implementation):
    """Gemma 2 27B's scale, 1/12, is 0.15% too small in bfloat16: a 3% error in a weight 21 logits below the largest."""
    dim, scale = 128, 144**-0.5
    config = config_for(Attention, dim=dim, num_heads=1, scale=scale, implementation=implementation)
    layer, ctx = config.instantiate(), Context(batch={}, compute_dtype=jnp.bfloat16)
    zero, ones = jnp.zeros((dim, dim), jnp.bfloat16), jnp.ones(dim, jnp.bfloat16)
    weights = {
        "query": {"weight": zero.at[1].set(2 * ones)},  # second position: 2 everywhere
        "key": {"weight": zero.at[0].set(-ones)},  # first position: -1 everywhere; second: 0
        "value": {"weight": zero.at[0].set(ones)},
        "output": {"weight": jnp.eye(dim, dtype=jnp.bfloat16)},
    }
    y_BSD, _ = layer.apply(weights, jnp.eye(dim, dtype=jnp.bfloat16)[None, :2], ctx, {})
    expected = np.exp(-2 * dim * scale) / (1 + np.exp(-2 * dim * scale))
    np.testing.assert_allclose(np.asarray(y_BSD[0, 1], np.float64), expected, rtol=5e-3)


def test_dropout_scale_is_not_rounded():
    """In bfloat16, 0.9 rounds to 0.8984."""
    ctx = Context(batch={}, rng=jax.random.key(0), rows=jnp.arange(1), training=True, compute_dtype=jnp.bfloat16)
    y = np.asarray(ctx.dropout(jnp.full((1, 64), 900.0, jnp.bfloat16), 0.1, "x"), np.float64)
    assert set(np.unique(y)) == {0.0, 1000.0}


@pytest.mark.pairs
def test_attention_may_use_float32_in_a_bfloat16_model():
    """The kernel's result then equals the result for float32 operands, rounded once."""
    config = config_for(Attention, dim=32, num_heads=2, implementation="xla")
    plain = config.instantiate()
    config.kernel_dtype = "float32"
    wide = config.instantiate()
    params = weights(plain)
    ctx = Context(batch={}, compute_dtype=jnp.bfloat16)
    x_BSD = jax.random.normal(jax.random.key(1), (2, 64, 32), jnp.bfloat16)
    prepared = plain.prepare(params, ctx)
    q, k, v = plain._queries_keys_values(prepared, x_BSD, ctx)
    exact = wide.attend(*(x.astype(jnp.float32) for x in (q, k, v)), ctx)
    ours = wide.attend(q, k, v, ctx)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours, exact.astype(jnp.bfloat16))
    assert np.any(np.asarray(plain.attend(q, k, v, ctx)) != np.asarray(ours))
