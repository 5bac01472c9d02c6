"""The language model: the effect of each option, shown by what it must not change; documents, ties, evaluation."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.norm import RMSNorm
from plimsoll.framework.layout import flatten, initialize
from tests.support import small

S = 12
TOKENS = np.random.default_rng(0).integers(0, small.VOCAB, (2, S)).astype(np.int32)


def build(config, params=None):
    """Return a model, its initial or the given parameters, and its jitted logits."""
    model = config.instantiate()
    if params is None:
        params = jax.jit(lambda: initialize(model.parameter_specs(), jax.random.key(0)))()
    compiled = jax.jit(lambda params, batch: model.logits(params, Context(batch=batch), {}))

    def logits(batch, params=params) -> np.ndarray:
        return np.asarray(compiled(params, batch))

    return model, params, logits


@cache
def family(name):
    """Return `build` of a family's model; cached, for tests that only read it."""
    return build(getattr(small, name)())


@pytest.fixture(params=["gpt2", "llama"])
def built(request):
    """One model of each family."""
    return family(request.param)


def difference(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the largest difference at each position, [B, S]."""
    return np.abs(left - right).max(axis=-1)


@pytest.mark.pairs
def test_no_position_sees_a_later_one(built):
    _, _, logits = built
    changed = TOKENS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % small.VOCAB
    moved = difference(logits({"tokens": changed}), logits({"tokens": TOKENS}))
    assert np.all(moved[:, :7] == 0.0)
    assert np.all(moved[:, 7:] > 1e-4)


def test_packed_documents_equal_separate_documents(built):
    _, _, logits = built
    segments = np.array([[1] * 5 + [2] * 7, [1] * 8 + [2] * 2 + [0] * 2], np.int32)
    positions = np.array([[*range(5), *range(7)], [*range(8), *range(2), 0, 0]], np.int32)
    packed = logits({"tokens": TOKENS, "segments": segments, "positions": positions})
    for row, start, end in ((0, 0, 5), (0, 5, 12), (1, 0, 8), (1, 8, 10)):
        alone = np.zeros_like(TOKENS)
        alone[0, : end - start] = TOKENS[row, start:end]
        expected = logits({"tokens": alone})[0, : end - start]
        np.testing.assert_allclose(packed[row, start:end], expected, rtol=1e-4, atol=1e-4)
    # Positions come from the batch (only the distance of rotary positions matters).
    stretched = logits({"tokens": TOKENS, "segments": segments, "positions": 2 * positions})
    assert difference(stretched, packed)[0, 1:5].min() > 1e-3
    # Without the mask, the documents do see each other.
    assert difference(packed, logits({"tokens": TOKENS}))[0, 5:].min() > 1e-3


@pytest.mark.pairs
def test_grouped_queries_equal_full_heads_with_equal_weights():
    model, params, logits = family("llama")
    grouped = logits({"tokens": TOKENS})

    def repeat(weight):  # [L, D, K * H] -> [L, D, N * H], each key head once for both of its query heads
        heads = weight.reshape(*weight.shape[:2], 2, 8)
        return jnp.repeat(heads, 2, axis=2).reshape(*weight.shape[:2], 32)

    full = jax.tree.map(lambda p: p, params)
    for name in ("key", "value"):
        attention = full["stack"]["block0"]["attention"]
        attention[name] = {"weight": repeat(attention[name]["weight"])}
    config = small.llama()
    small.block(config).attention.num_kv_heads = None
    _, _, logits = build(config, full)
    np.testing.assert_allclose(logits({"tokens": TOKENS}), grouped, rtol=1e-4, atol=1e-4)
    assert model.stack.pattern.layers["block0"].attention.num_kv_heads == 2


@pytest.mark.pairs
def test_a_window_hides_what_lies_before_it():
    config = small.llama(stack__num_layers=1)
    small.block(config).attention.window = 4
    _, _, logits = build(config)
    changed = TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % small.VOCAB
    moved = difference(logits({"tokens": changed}), logits({"tokens": TOKENS}))
    assert np.all(moved[:, 2:6] > 1e-5)
    assert np.all(moved[:, :2] == 0.0)
    assert np.all(moved[:, 6:] == 0.0)


@pytest.mark.pairs
def test_qk_norm_removes_query_and_key_scale():
    config = small.llama()
    small.block(config).attention.qk_norm = config_for(RMSNorm, eps=1e-12)
    _, params, logits = build(config)
    attention = params["stack"]["block0"]["attention"]
    assert attention["query_norm"]["scale"].shape == (2, 8)
    expected = logits({"tokens": TOKENS})
    larger = with_query(params, 7.0 * attention["query"]["weight"])
    np.testing.assert_allclose(logits({"tokens": TOKENS}, larger), expected, rtol=1e-3, atol=1e-4)
    sharper = jax.tree.map(lambda p: p, params)
    sharper["stack"]["block0"]["attention"]["key_norm"] = {"scale": 7.0 * attention["key_norm"]["scale"]}
    assert difference(logits({"tokens": TOKENS}, sharper), expected).max() > 1e-2


@pytest.mark.pairs
def test_soft_caps_bound_the_output_and_reach_attention():
    config = small.llama(head__softcap=3.0)
    _, params, plain = build(config)
    small.block(config).attention.softcap = 0.5
    _, _, capped = build(config, params)
    assert 0.1 < np.abs(plain({"tokens": TOKENS})).max() < 3.0
    assert difference(plain({"tokens": TOKENS}), capped({"tokens": TOKENS})).max() > 0.02
    # Scores far below the cap do not change.
    tiny = with_query(params, 1e-3 * params["stack"]["block0"]["attention"]["query"]["weight"])
    np.testing.assert_allclose(capped({"tokens": TOKENS}, tiny), plain({"tokens": TOKENS}, tiny), rtol=1e-4, atol=1e-5)


def with_query(params, weight):
    """Return the parameters with a different query projection weight."""
    copy = jax.tree.map(lambda p: p, params)
    copy["stack"]["block0"]["attention"]["query"] = {"weight": weight}
    return copy


# --- ties ------------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_tied_table_gradient_sums_both_uses():
    tied = small.program(small.experiment(small.gpt2(), documents=True))
    apart = small.program(small.experiment(small.gpt2(head__tied=False), documents=True))
    state = jax.device_get(tied.init())
    loss, grads = small.loss_and_grads(tied, state)

    def untie(tree):
        return {**tree, "head": {**tree["head"], "table": tree["embed"]["token"]}}

    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), apart.layout.abstract())
    other = replace(zeros, counter=state.counter)  # the only other group that is read
    untied_loss, parts = small.loss_and_grads(apart, replace(other, parameter=untie(state.parameter)))
    np.testing.assert_allclose(loss, untied_loss, rtol=1e-6)
    summed = {path: value for path, value in parts.items() if path != "head/table"}
    for path in ("embed/token", "head/table"):
        assert np.abs(parts[path]).max() > 1e-3, "both uses should matter"
    summed["embed/token"] = parts["embed/token"] + parts["head/table"]
    small.assert_close(grads, summed, 2e-6)


def test_a_tie_is_one_parameter():
    model = small.gpt2().instantiate()
    assert model.ties == {"head/table": "embed/token"}
    assert "head/table" not in flatten(model.parameter_specs())
    assert small.llama().instantiate().ties == {}
    params = {"embed": {"token": 1, "position": 2}, "head": {"norm": {"scale": 3}}}
    assert model.stage_params(params, "head") == {"norm": {"scale": 3}, "table": 1}
    assert model.stage_params(params, "embed") == params["embed"]


# --- shapes, dtypes, counts ------------------------------------------------------------------------------------------


def test_bf16_parameters_and_compute_stay_close_to_f32():
    _, params, logits = family("llama")
    expected = logits({"tokens": TOKENS})
    config = small.llama(param_dtype="bfloat16", compute_dtype="bfloat16")
    model = config.instantiate()
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    actual = jax.jit(lambda p, b: model.logits(p, Context(batch=b, compute_dtype=model.compute_dtype), {}))(
        half, {"tokens": TOKENS}
    )
    assert actual.dtype == jnp.float32
    assert {spec.dtype for spec in jax.tree.leaves(model.parameter_specs())} == {jnp.dtype(jnp.bfloat16)}
    assert np.abs(np.asarray(actual) - expected).max() < 0.05 * np.abs(expected).max()


def test_parameters_and_flops_match_manual_counts():
    D, V, L, F, K = 32, small.VOCAB, 2, 48, 16
    model = small.llama().instantiate()
    matrices = L * (2 * D * D + 2 * D * K + 3 * D * F)
    count = sum(spec.size for spec in jax.tree.leaves(model.parameter_specs()))
    assert count == 2 * V * D + matrices + L * 2 * D + D
    # Forward: 2 FLOPs per matmul weight and 4 D per attended position; backward: twice as many.
    assert model.flops_per_token(16) == 3 * (2 * (matrices + V * D) + L * 4 * D * 16)
    config = small.llama()
    small.block(config).attention.window = 4
    assert config.instantiate().flops_per_token(16) == 3 * (2 * (matrices + V * D) + L * 4 * D * 4)


@pytest.mark.pairs
def test_layer_params_are_partitioned_and_merged():
    model = small.gpt2(stack__unroll=0).instantiate()
    params = initialize(model.parameter_specs(), jax.random.key(0))
    split = model.unstack_layers(params, "none")
    assert [unit["block0"]["attention_norm"]["scale"].shape for unit in split["stack"]] == [(32,), (32,)]
    small.assert_same_bits(model.stack_layers(split), params)
    looped = small.gpt2().instantiate()
    for same in (looped.unstack_layers(params, "none"), looped.stack_layers(params)):
        assert jax.tree.all(jax.tree.map(lambda a, b: a is b, same, params))
    assert model.unstack_layers({"embed": params["embed"]}, "none") == {"embed": params["embed"]}


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_evaluation_sums_what_training_averages():
    """Evaluation has no dropout, sums over counted targets, and uses the averages on request."""
    program = small.program(small.experiment(documents=True, ema=0.5))
    state, _ = small.run(program, 1)
    batch = small.host_batch(program, 5)
    sums = {name: float(value) for name, value in program.evaluate(state, program.put(batch)).items()}
    model = program.experiment.model
    logits = jax.jit(lambda p, b: model.logits(p, Context(batch=b), {}))(program.weights(state), batch)
    nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(sums["nll"], np.sum(nll * batch["weights"]), rtol=1e-5)
    assert sums["tokens"] == batch["weights"].sum()
    averaged = {
        name: float(value) for name, value in program.evaluate(state, program.put(batch), averaged=True).items()
    }
    assert abs(averaged["nll"] - sums["nll"]) > 1e-3 * sums["nll"]
    swapped = replace(state, parameter=state["ema"])
    assert averaged["nll"] == float(program.evaluate(swapped, program.put(batch))["nll"])
    program.layout.check(state)
