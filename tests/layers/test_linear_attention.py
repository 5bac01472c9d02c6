"""Layers of linear attention: their formulas in float64, documents, the cache, meshes, schedules and generation."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.gated_delta_net import GatedDeltaNet
from plimsoll.framework.layers.linear_attention import LinearAttention
from plimsoll.framework.layers.lora import LoRA
from plimsoll.framework.layers.mamba2 import Mamba2
from plimsoll.framework.layout import flatten, initialize
from tests.support import exact, small

D, K, N, H, V, W = 16, 2, 4, 6, 5, 4


DELTA_NET = config_for(GatedDeltaNet, num_heads=N, num_key_heads=K, key_dim=H, value_dim=V, conv_width=W, chunk=16)
# Step sizes are between their bounds, and at each of them.
MAMBA2 = config_for(
    Mamba2, num_heads=N, num_groups=K, state_dim=H, head_dim=V, conv_width=W, chunk=16, min_step=0.02, max_step=0.3
)
SHARED_KEYS = MAMBA2.copy()
SHARED_KEYS.num_groups = 1
LAYERS = {"gated_delta_net": DELTA_NET, "mamba2": MAMBA2, "mamba2_one_group": SHARED_KEYS}
for layer_config in LAYERS.values():
    # Weights are large, so that gates, decays and step sizes vary.
    layer_config.linear.init.stddev *= 10
both_layers = pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])


def hybrid(kind: str, dtype: str = "float32") -> Config:
    """Return a model of four layers, in which linear attention and attention alternate."""
    model = small.llama(stack__num_layers=4, param_dtype=dtype, compute_dtype=dtype)
    block = small.block(model)
    linear = block.copy()
    linear.attention = LAYERS[kind].copy()
    model.stack.pattern = [linear, block]
    return model


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def compute_delta_net(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Compute the layer for one row x [S, D], token by token, as in transformers' Qwen3NextGatedDeltaNet."""
    convolved = {}
    for name in ("query", "key", "value"):
        inputs = np.pad(x @ w[f"{name}/weight"], ((W - 1, 0), (0, 0)))
        sums = sum(inputs[tap : tap + len(x)] * w[f"{name}_conv"][tap] for tap in range(W))
        convolved[name] = sums * sigmoid(sums)
    query, key = (np.repeat(convolved[name].reshape(-1, K, H), N // K, axis=1) for name in ("query", "key"))
    query, key = (array / np.sqrt(np.sum(array**2, axis=-1, keepdims=True) + 1e-6) for array in (query, key))
    value = convolved["value"].reshape(-1, N, V)
    beta = sigmoid(x @ w["beta/weight"])
    decay = np.exp(-np.exp(w["log_rate"]) * np.log1p(np.exp(x @ w["decay/weight"] + w["decay_bias"])))
    gate = (x @ w["gate/weight"]).reshape(-1, N, V)
    state = np.zeros((N, H, V))
    rows = []
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        found = np.einsum("nh,nhv->nv", key[t], state)
        state = state + key[t][..., None] * (beta[t][:, None] * (value[t] - found))[:, None]
        y = np.einsum("nh,nhv->nv", query[t] * H**-0.5, state)
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-6) * w["norm/scale"]
        rows.append((y * gate[t] * sigmoid(gate[t])).reshape(-1))
    return np.stack(rows) @ w["output/weight"]


def compute_mamba2(w: dict[str, np.ndarray], x: np.ndarray, groups: int) -> np.ndarray:
    """Compute the layer for one row x [S, D], token by token, as in transformers' GraniteMoeHybridMambaLayer."""
    convolved = {}
    for name in ("query", "key", "value"):
        inputs = np.pad(x @ w[f"{name}/weight"], ((W - 1, 0), (0, 0)))
        sums = sum(inputs[tap : tap + len(x)] * w[f"{name}_conv"][tap] for tap in range(W)) + w[f"{name}_conv_bias"]
        convolved[name] = sums * sigmoid(sums)
    query, key = (np.repeat(convolved[name].reshape(-1, groups, H), N // groups, axis=1) for name in ("query", "key"))
    value = convolved["value"].reshape(-1, N, V)
    step = np.clip(np.log1p(np.exp(x @ w["step/weight"] + w["step_bias"])), 0.02, 0.3)
    assert (step == 0.02).any()
    assert (step == 0.3).any()
    decay = np.exp(-np.exp(w["log_rate"]) * step)
    gate = x @ w["gate/weight"]
    state = np.zeros((N, H, V))
    rows = []
    for t in range(len(x)):
        state = state * decay[t][:, None, None] + step[t][:, None, None] * key[t][..., None] * value[t][:, None]
        y = np.einsum("nh,nhv->nv", query[t], state) + w["skip"][:, None] * value[t]
        y = y.reshape(groups, -1) * (gate[t] * sigmoid(gate[t])).reshape(groups, -1)
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-5)
        rows.append(y.reshape(-1) * w["norm/scale"])
    return np.stack(rows) @ w["output/weight"]


def build(kind: str, dtype: str) -> tuple[LinearAttention, Any]:
    layer = LAYERS[kind].instantiate(dim=D)
    specs = jax.tree.map(lambda spec: dataclasses.replace(spec, dtype=dtype), layer.parameter_specs())
    return layer, initialize(specs, jax.random.key(0))


def apply(layer: LinearAttention, params: Any, x: jax.Array, cache: Any = None, **batch: Any) -> tuple[jax.Array, Any]:
    ctx = Context(batch, compute_dtype=x.dtype, cache=cache is not None)
    y, out = layer.apply(layer.prepare(params, ctx), x, ctx, cache or {})
    return y, out.layer_state


@pytest.mark.parametrize("kind", LAYERS)
def test_the_layer_is_its_formulas(kind: str) -> None:
    with jax.enable_x64(True):
        layer, params = build(kind, "float64")
        x = jax.random.normal(jax.random.key(1), (2, 37, D), "float64")
        y, cache = apply(layer, params, x)
        weights = {path: np.asarray(value) for path, value in flatten(params).items()}
        assert cache == {}
        for row, found in zip(np.asarray(x), y, strict=True):
            if kind == "gated_delta_net":
                expected = compute_delta_net(weights, row)
            else:
                expected = compute_mamba2(weights, row, LAYERS[kind].num_groups)
            np.testing.assert_allclose(found, expected, atol=1e-10)


@both_layers
def test_documents_of_a_row_do_not_see_each_other(kind: str) -> None:
    layer, params = build(kind, "float32")
    x = jax.random.normal(jax.random.key(1), (1, 50, D))
    ends = [0, 2, 20, 33, 50]
    segments = np.repeat(np.arange(4), np.diff(ends))[None]
    packed, _ = apply(layer, params, x, segments=jnp.asarray(segments))
    for start, end in itertools.pairwise(ends):
        alone, _ = apply(layer, params, x[:, start:end])
        np.testing.assert_allclose(packed[:, start:end], alone, atol=2e-5)


@both_layers
def test_cached_tokens_continue_the_row(kind: str) -> None:
    """A prompt, more tokens with padding on the right, and single tokens: fewer than the taps, too."""
    layer, params = build(kind, "float32")
    x = jax.random.normal(jax.random.key(1), (2, 40, D))
    expected, _ = apply(layer, params, x)
    ctx = Context({}, cache=True)
    first, out = layer.apply(layer.prepare(params, ctx), x[:, :21], ctx, {})
    cache = out.layer_state
    padded = jnp.concatenate([x[:, 21:31], x[:, :6]], axis=1)
    is_token = jnp.broadcast_to(jnp.arange(16) < 10, (2, 16)).astype(jnp.int32)
    more, cache = apply(layer, params, padded, cache, segments=is_token)
    rows = [first, more[:, :10]]
    for start, end in ((31, 32), (32, 34), (34, 40)):
        y, cache = apply(layer, params, x[:, start:end], cache)
        rows.append(y)
    np.testing.assert_allclose(jnp.concatenate(rows, axis=1), expected, atol=2e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2_one_group"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "fsdp": 2, "model": 2},
        {"fsdp": 4, "seq": 2},
        {"fsdp": 8},
        # More devices than the two key heads.
        {"seq": 8},
        {"seq": 4, "model": 2},
        {"fsdp": 2, "seq": 2, "model": 2},
    ],
    ids=["model", "seq", "fsdp", "seq 8", "seq 4, model 2", "fsdp 2, seq 2, model 2"],
)
def test_eight_devices_equal_one(mesh: dict[str, int], kind: str) -> None:
    # Norms of small outputs amplify rounding errors, so float32 would hide others.
    with exact.enable_exact_numerics():
        model = hybrid(kind, "float64")
        alone = small.program(small.experiment(model, documents=True))
        state = alone.init()
        loss, grads = small.loss_and_grads(alone, state)
        spread = small.program(small.experiment(model, documents=True, mesh=mesh))
        spread_loss, spread_grads = small.loss_and_grads(spread, jax.device_get(state))
    # The sum of the losses is in float32.
    np.testing.assert_allclose(spread_loss, loss, rtol=1e-6)
    small.assert_close(spread_grads, grads, 1e-9)


@pytest.mark.parametrize(
    ("kind", "mesh", "message"),
    [
        ("gated_delta_net", {"model": 4, "seq": 2}, "mesh.model = 4 does not divide num_key_heads = 2"),
        ("mamba2", {"model": 4, "seq": 2}, "mesh.model = 4 does not divide num_groups = 2"),
        ("mamba2_one_group", {"model": 8}, "mesh.model = 8 does not divide num_heads = 4"),
        # The positions of a row.
        ("gated_delta_net", {"seq": 8}, "mesh.seq = 8 does not divide data.seq_len = 12; nearest that do: [6, 12]"),
    ],
)
def test_axes_that_split_a_head_or_a_position_are_refused(kind: str, mesh: dict[str, int], message: str) -> None:
    model = hybrid(kind)
    # Only linear attention, whose heads are the only ones that the axes could split.
    model.stack.pattern = [small.block(model)]
    config = small.experiment(model, mesh=mesh, seq_len=12)
    with pytest.raises(ValueError, match=re.escape(message)):
        small.program(config)


OFFLOADED = dict.fromkeys(("parameters", "activations", "optimizer_state"), "pinned_host")
HOSTED = {"update": "streamed", "optimizer_state": "pinned_host", "gradients": "pinned_host"}


@pytest.mark.pairs
@both_layers
@pytest.mark.parametrize(
    "memory",
    [
        {"update": "streamed", "remat": "full", "gradients": "pinned_host", **OFFLOADED},
        {"update": "in_backward", "remat": "sqrt"},
        {"update": "layer_programs", "remat": "save:attention,query", **OFFLOADED},
        {"update": "after_backward", "remat": "dots"},
        {**HOSTED, "prefetch": "speculative"},
    ],
    ids=["streamed", "in_backward", "layer_programs", "after_backward", "speculative"],
)
def test_schedules_equal_the_plain_one(memory: dict[str, str], kind: str) -> None:
    states = []
    with exact.enable_exact_numerics():
        for settings in ({}, memory):
            config = small.experiment(hybrid(kind, "float64"), memory=settings, clip=None, documents=True, seq_len=24)
            program = small.program(config)
            state, _ = small.run(program, 3)
            states.append(small.arrays(program.backend.to_checkpoint(program.complete_update(state))))
    small.assert_close(states[1], states[0], 1e-7)


@pytest.mark.pairs
@pytest.mark.parametrize(("kind", "rates"), [("gated_delta_net", {"beta", "decay"}), ("mamba2", {"step"})])
def test_adapters_on_all_projections_train(kind: str, rates: set[str]) -> None:
    """Every projection has an adapter, and the first loss is that of the model without them."""
    model = hybrid(kind)
    plain = small.program(small.experiment(model.copy()))
    _, expected = small.run(plain, 1)
    model.lora = config_for(LoRA, rank=2, alpha=4.0)
    program = small.program(small.experiment(model))
    state, metrics = small.run(program, 3)
    adapted = {path.split("/")[3] for path in flatten(state.parameter) if path.startswith("stack/block0/attention")}
    assert adapted == {"query", "key", "value", "gate", "output", *rates}
    assert metrics[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5)
    assert metrics[2]["loss"] != metrics[0]["loss"]


@pytest.mark.pairs
@both_layers
def test_generation_equals_reading_everything_again(kind: str) -> None:
    """Prompts of different lengths, whose padding leaves no trace in the state."""
    program = small.program(small.experiment(hybrid(kind), seq_len=32))
    state = program.init()
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [5, 5]]
    generator = Generator(program, state)
    answers = generator(prompts, Sampling(max_new_tokens=6, temperature=0.0))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        for token in answer:
            (expected,) = Generator(program, state)([tokens], Sampling(max_new_tokens=1, temperature=0.0))[0]
            assert token == expected
            tokens.append(token)


@pytest.mark.pairs
@both_layers
def test_a_kept_state_is_continued_only_by_what_follows_it(kind: str) -> None:
    program = small.program(small.experiment(hybrid(kind), seq_len=32))
    state = program.init()
    sampling = Sampling(max_new_tokens=4, temperature=0.0)

    def answer(generator: Generator, prompt: list[int]) -> list[int | None]:
        return [tokens[0] for tokens in generator.stream([prompt], sampling, keep_cache=True)]

    kept = Generator(program, state)
    first = answer(kept, [1, 2, 3])
    longer = [1, 2, 3, *(token for token in first if token is not None), 8, 9]
    for prompt in (longer, [*longer[:5], 11, 12], [7]):
        assert answer(kept, prompt) == answer(Generator(program, state), prompt)
