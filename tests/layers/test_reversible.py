"""Stacks of two streams: run in reverse, they return their input and the gradients of the plain backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.reversible import TwoStream, round_to_fixed
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import initialize
from tests.support import small
from tests.support.layers import Twins
from tools.drift import there_and_back

TOKENS = np.random.default_rng(0).integers(0, small.VOCAB, (3, 16))


def deep(num_layers: int, streams: str = "fixed", **fields: Any) -> Config:
    """Return a Llama with dropout, whose layer outputs do not shrink with depth."""
    config = small.llama(
        stack__num_layers=num_layers, stack__streams=streams, stack__depth_scaled_init=False, stack__unroll=1, **fields
    )
    small.block(config).dropout = 0.1
    return config


def context(model: Any, remat: str = "none") -> Context:
    tokens = jnp.asarray(TOKENS, jnp.int32)
    return Context(
        batch={"tokens": tokens, "targets": tokens, "weights": jnp.ones(tokens.shape, jnp.float32)},
        rng=jax.random.key(5),
        rows=jnp.arange(len(TOKENS)),
        num_targets=jnp.float32(TOKENS.size),
        training=True,
        compute_dtype=model.compute_dtype,
        remat=remat,
    )


def build_model(config: Config, scale: float = 1.0) -> tuple[Any, Any]:
    """Return the model and parameters without zeros; `scale` multiplies the layers' matrices."""
    model = config.instantiate()

    @jax.jit
    def parameters(key: jax.Array) -> Any:
        params = initialize(model.parameter_specs(), key)
        params = jax.tree.map(lambda p: p + jnp.asarray(0.1, p.dtype), params)
        return {**params, "stack": jax.tree.map(lambda p: p * scale if p.ndim > 2 else p, params["stack"])}

    return model, parameters(jax.random.key(0))


def worst(actual: Any, expected: Any) -> tuple[float, str]:
    """Return the largest max|a - b| / max|b| of a leaf, and its path. Gradients of key biases are only rounding."""
    found, known = small.arrays(actual), small.arrays(expected)
    errors = {path: float(np.abs(known[path] - x).max() / np.abs(known[path]).max()) for path, x in found.items()}
    return max((error, path) for path, error in errors.items() if "key/bias" not in path)


def gradients(model: Any, params: Any, remat: str) -> Any:
    """Return ((loss, metrics), gradients) from a compiled program."""

    def loss(params: Any) -> Any:
        loss, out = model.loss(params, context(model, remat), {})
        return loss, out.metrics

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.pairs
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_fixed_point_streams_come_back_bit_for_bit_after_256_layers(compute: str):
    model, params = build_model(deep(256, compute_dtype=compute), 0.3)
    first, y, last = there_and_back(model, params, context(model))
    small.assert_same_bits(last, first)
    assert all(100 < np.abs(stream).max() < 2**12 for stream in y)
    metrics = jax.jit(lambda params: model.loss(params, context(model, "invert"), {})[1].metrics)(params)
    assert metrics["stack/block0/out_of_range"] == 0


@pytest.mark.pairs
def test_overflowing_streams_are_counted():
    """Out-of-range values are rounded like float32."""
    model, params = build_model(deep(64), 2.0)
    first, _, last = there_and_back(model, params, context(model))
    assert not np.array_equal(first[0], last[0])
    ((_, metrics), _) = gradients(model, params, "invert")
    assert metrics["stack/block0/out_of_range"] > 0


@pytest.mark.pairs
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_float32_streams_drift(compute: str):
    """docs/benchmarks/depth.md states by how much."""
    model, params = build_model(deep(64, "float32", compute_dtype=compute), 0.3)
    first, _, last = there_and_back(model, params, context(model))
    assert 0 < np.abs(last[0] - first[0]).max() / np.abs(first[0]).max() < 1e-3


@pytest.mark.pairs
@pytest.mark.parametrize("family", [small.gpt2, small.llama])
@pytest.mark.parametrize("streams", ["float32", "fixed"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("float64", 1e-11)])
def test_gradients_match_the_plain_backward_pass(streams: str, dtype: str, tolerance: float, family: Any):
    with jax.enable_x64(dtype == "float64"):
        fields = {"param_dtype": dtype, "compute_dtype": dtype, "stack__num_layers": 6, "stack__streams": streams}
        model, params = build_model(family(**fields))
        (plain, metrics), expected = gradients(model, params, "none")
        (loss, found), grads = gradients(model, params, "invert")
        assert (loss, found) == (plain, metrics)
        assert worst(grads, expected) <= (1e-2 * tolerance if streams == "fixed" else tolerance, "")


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_single_layer_returns_its_input_and_gradient(dtype: str):
    with jax.enable_x64(dtype == "float64"):
        model, params = build_model(deep(1, "float32", param_dtype=dtype, compute_dtype=dtype))
        layer, ctx = model.stack.pattern.layers["block0"], context(model).fold("stack")
        own = jax.tree.map(lambda p: p[0], params["stack"])["block0"]
        rng = np.random.default_rng(1)
        x, ct = (tuple(jnp.asarray(rng.normal(size=(3, 16, 32)), dtype) for _ in range(2)) for _ in range(2))
        y, pull = jax.vjp(lambda w, x: layer.apply(w, x, ctx, {})[0], own, x)
        result = layer.reverse(own, y, (ct, None), ctx, {})
        assert worst((result.carry, result.grads, result.ct), (x, *pull(ct))) <= (
            {"float32": 1e-4, "float64": 1e-13}[dtype],
            "",
        )


@pytest.mark.pairs
def test_a_wrong_inverse_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    """Check that the comparison above can detect an error."""
    model, params = build_model(deep(6, "float32"))
    _, expected = gradients(model, params, "none")
    layer = model.stack.pattern.layers["block0"]
    original = layer._branch
    calls: list[str] = []

    def off(name: str, *args: Any) -> Any:
        calls.append(name)
        h, out = original(name, *args)
        return (h * 1.01 if len(calls) > 2 else h), out  # only in the backward pass

    monkeypatch.setattr(layer, "_branch", off)
    _, grads = gradients(model, params, "invert")
    assert worst(grads, expected)[0] > 1e-2


def test_rounded_sums_are_exact():
    rng = np.random.default_rng(0)
    x, h = (round_to_fixed(jnp.asarray(rng.normal(0, 300, 100_000), jnp.float32)) for _ in range(2))
    assert np.array_equal((x + h) - h, x)
    raw = jnp.asarray(rng.normal(0, 300, 100_000), jnp.float32)
    assert not np.array_equal((raw + h / 3) - h / 3, raw)
    np.testing.assert_array_equal(jax.grad(lambda v: round_to_fixed(v).sum())(raw), np.ones(100_000))


def test_values_that_round_to_zero_still_have_gradients():
    x = jnp.asarray([0.0, -0.0, 1e-5, -1e-5, 1.0])
    streams = TwoStream(Twins(dim=5), "fixed")
    values, pull = jax.vjp(lambda x: streams.enter(x)[0], x)
    assert values.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert not np.signbit(values).any()
    assert pull(jnp.ones_like(x))[0].tolist() == [1.0] * 5


@pytest.mark.pairs
def test_token_by_token_logits_match_the_full_sequence():
    """Two streams use the same cache as one: compare greedy generation to the plain forward pass."""
    from plimsoll.framework.inference.generation import Generator
    from plimsoll.framework.inference.sampling import Sampling

    config = small.experiment(deep(2))
    small.block(config.model).dropout = 0.0
    program = small.program(config)
    state = program.init()
    prompt = [3, 1, 4, 1, 5]
    (tokens,) = Generator(program, state)([prompt], Sampling(temperature=0.0, max_new_tokens=4))
    text = np.zeros((1, len(prompt) + len(tokens)), np.int32)  # no position attends to the zeros after it
    text[0, : len(prompt)] = prompt

    @jax.jit
    def logits(weights: Any, tokens: jax.Array) -> jax.Array:
        ctx = program.evaluation_context({"tokens": tokens})
        return program.experiment.language_model.logits(weights, ctx, state.buffer)

    for at, token in enumerate(tokens, len(prompt)):
        assert token == int(np.argmax(logits(program.weights(state), text)[0, at - 1]))
        text[0, at] = token


def test_irreversible_layers_are_refused():
    config = small.experiment(memory={"remat": "invert"})
    with pytest.raises(ValueError, match=r"memory.remat = invert: pattern.0, Block, is not reversible; set streams"):
        small.program(config)
    with pytest.raises(ValueError, match=r"streams = fixed: pattern.0 is Twins; expected Block"):
        config_for(Stack, num_layers=1, pattern=[config_for(Twins)], streams="fixed").instantiate(dim=8)
    config.memory.update, config.memory.activations = "streamed", "pinned_host"
    with pytest.raises(ValueError, match=r"memory.activations = pinned_host with memory.remat = invert"):
        config.instantiate()


@pytest.mark.pairs
def test_published_weights_have_one_stream():
    from plimsoll.framework.families.llama import Llama

    with pytest.raises(ValueError, match="one residual stream"):
        Llama().places(deep(2).instantiate())
