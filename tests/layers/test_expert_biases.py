"""Experts with biases and the clamped SwiGLU of gpt-oss, compared in float64 to a loop over tokens and experts."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.experts.experts import ClampedSwiGLU, Experts
from plimsoll.framework.layers.experts.groups import add_biases, find_row_experts
from plimsoll.framework.layers.experts.moe import MoE
from plimsoll.framework.layers.experts.router import Router

DIM, EXPERTS, TOP_K, HIDDEN, BATCH, LENGTH = 8, 5, 2, 12, 3, 50
ALPHA, LIMIT = 1.3, 0.9
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def layer(gating: bool = True, **experts: Any) -> MoE:
    """Return a toy mixture of experts whose router has a bias as well."""
    if gating:
        experts["gating"] = config_for(ClampedSwiGLU, alpha=ALPHA, limit=LIMIT)
    return config_for(
        MoE,
        num_experts=EXPERTS,
        router=config_for(Router, top_k=TOP_K, score="softmax_chosen", normalize=False, logit_bias=True, balance=0.0),
        experts=config_for(Experts, hidden=HIDDEN, bias=True, **experts),
    ).instantiate(dim=DIM)


def arrays(moe: MoE, case: str = "plain") -> tuple[Any, np.ndarray]:
    """Return weights and tokens; the biases are as large as everything else."""
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda spec: rng.normal(size=spec.shape), moe.parameter_specs())
    if case == "one expert":
        weights["router"]["bias"][2] = 1e3
    if case == "empty experts":
        weights["router"]["bias"][[0, 4]] = -1e3
    return weights, rng.normal(size=(BATCH, LENGTH, DIM))


def context() -> Context:
    """Return an evaluation context."""
    return Context({"weights": jnp.ones((BATCH, LENGTH))}, compute_dtype=jnp.float64)


def apply_clamped_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
    return (up + 1.0) * gate / (1.0 + np.exp(-ALPHA * gate))


def loop(weights: Any, x_BSD: np.ndarray, is_gated: bool = True) -> np.ndarray:
    """Compute the layer one token at a time, and for each token one expert at a time."""
    y_BSD = np.zeros_like(x_BSD)
    for place in np.ndindex(x_BSD.shape[:2]):
        x = x_BSD[place]
        logits = x @ weights["router"]["weight"] + weights["router"]["bias"]
        chosen = np.argsort(-logits)[:TOP_K]
        powers = np.exp(logits[chosen] - logits[chosen].max())
        for expert, share in zip(chosen, powers / powers.sum(), strict=True):
            own = {name: leaf[expert] for name, leaf in weights["experts"].items()}
            up = x @ own["up"] + own["up_bias"]
            if is_gated:
                hidden = apply_clamped_swiglu(x @ own["gate"] + own["gate_bias"], up)
            else:
                hidden = np.maximum(up, 0.0)
            y_BSD[place] += share * (hidden @ own["down"] + own["down_bias"])
    return y_BSD


@pytest.mark.pairs
@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@pytest.mark.parametrize("case", ["plain", "one expert", "empty experts"])
def test_no_choice_is_dropped_and_the_sum_equals_a_loop(case: str, implementation: str):
    moe = layer(implementation=implementation)
    weights, x_BSD = arrays(moe, case)
    y_BSD, _ = jax.jit(lambda w, x: moe.apply(w, x, context(), {}))(weights, x_BSD)
    np.testing.assert_allclose(y_BSD, loop(weights, x_BSD), **TOLERANCE)


@pytest.mark.pairs
def test_biases_without_a_gate():
    moe = layer(gating=False, gated=False, activation="relu")
    weights, x_BSD = arrays(moe)
    assert set(weights["experts"]) == {"up", "up_bias", "down", "down_bias"}
    y_BSD, _ = moe.apply(weights, x_BSD, context(), {})
    np.testing.assert_allclose(y_BSD, loop(weights, x_BSD, is_gated=False), **TOLERANCE)


@pytest.mark.pairs
@pytest.mark.parametrize("options", [{"implementation": "blocks"}, {"implementation": "ragged"}, {"capacity": 2.5}])
def test_gradients_match_every_expert_on_every_token(options: dict[str, Any]):
    """With a capacity factor of 2.5, every choice has a slot."""
    moe = layer(**options)
    weights, x_BSD = arrays(moe)
    direction = np.random.default_rng(1).normal(size=x_BSD.shape)

    def sparse_sum(weights: Any, x_BSD: jax.Array) -> jax.Array:
        y_BSD, _ = moe.apply(weights, x_BSD, context(), {})
        return jnp.sum(y_BSD * direction)

    def dense_sum(weights: Any, x_BSD: jax.Array) -> jax.Array:
        choice = moe.router(weights["router"], x_BSD, context(), {}).choice
        shares_BSE = jnp.einsum("bske,bsk->bse", jax.nn.one_hot(choice.experts_BSK, EXPERTS), choice.shares_BSK)
        total = jnp.zeros_like(x_BSD)
        for expert in range(EXPERTS):
            own = {name: leaf[expert] for name, leaf in weights["experts"].items()}
            gate = jnp.minimum(x_BSD @ own["gate"] + own["gate_bias"], LIMIT)
            up = jnp.clip(x_BSD @ own["up"] + own["up_bias"], -LIMIT, LIMIT)
            hidden = (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
            total += shares_BSE[..., expert, None] * (hidden @ own["down"] + own["down_bias"])
        return jnp.sum(total * direction)

    expected = jax.jit(jax.value_and_grad(dense_sum, argnums=(0, 1)))(weights, x_BSD)
    actual = jax.jit(jax.value_and_grad(sparse_sum, argnums=(0, 1)))(weights, x_BSD)
    expected_leaves = dict(jax.tree_util.tree_leaves_with_path(expected))
    for path, grad in jax.tree_util.tree_leaves_with_path(actual):
        scale = max(1.0, float(jnp.abs(expected_leaves[path]).max()))
        np.testing.assert_allclose(grad / scale, expected_leaves[path] / scale, err_msg=str(path), **TOLERANCE)
        assert float(jnp.abs(grad).max()) > 1e-3, path


@pytest.mark.pairs
def test_expert_shards_add_up():
    """As on a mesh, each shard applies its experts and their biases to all tokens and adds zero for other choices."""
    moe = layer()
    weights, x_BSD = arrays(moe)
    choice = moe.router(weights["router"], x_BSD, context(), {}).choice
    whole, _ = moe.experts(weights["experts"], x_BSD, choice, context())
    total = jnp.zeros_like(whole)
    for first, last in ((0, 1), (1, EXPERTS)):
        own = {name: leaf[first:last] for name, leaf in weights["experts"].items()}
        total += moe.experts._run_local_experts(own, jnp.asarray(x_BSD), choice, context(), first, shards=2)
    np.testing.assert_allclose(total, whole, **TOLERANCE)


def test_rows_behind_the_last_expert_have_no_part_in_the_gradient():
    """Rows after the last expert are ignored even if they are NaN: an implementation may leave them uninitialized."""
    sizes = jnp.asarray([0, 3, 1], jnp.int32)
    experts_N = find_row_experts(sizes, 6)
    np.testing.assert_array_equal(experts_N, [1, 1, 1, 2, 3, 3])
    rows = np.random.default_rng(0).normal(size=(6, 4))
    bias = np.random.default_rng(1).normal(size=(3, 4))
    y_NO, pull = jax.vjp(lambda bias: add_biases(jnp.asarray(rows), bias, experts_N), jnp.asarray(bias))
    np.testing.assert_array_equal(y_NO[:4], rows[:4] + bias[[1, 1, 1, 2]])
    grad = np.random.default_rng(2).normal(size=(6, 4))
    grad[4:] = np.nan
    np.testing.assert_allclose(pull(jnp.asarray(grad))[0], [np.zeros(4), grad[:3].sum(0), grad[3]], **TOLERANCE)
    assert [leaf.dtype for leaf in jax.tree.leaves(pull)] == [jnp.int32], "it keeps no row"


def test_bfloat16_rows_are_summed_without_rounding():
    experts_N = jnp.zeros(5000, jnp.int32)
    rows = jnp.zeros((5000, 2), jnp.bfloat16)
    _, pull = jax.vjp(lambda bias: add_biases(rows, bias, experts_N), jnp.zeros((1, 2), jnp.bfloat16))
    np.testing.assert_array_equal(pull(jnp.ones_like(rows))[0], jnp.full((1, 2), 5000, jnp.bfloat16))


@pytest.mark.pairs
def test_at_the_limit_the_gradient_is_whole_and_beyond_it_zero():
    join = ClampedSwiGLU(alpha=ALPHA, limit=LIMIT)
    gates = jnp.asarray([LIMIT, LIMIT + 1e-9, -50.0 * LIMIT])
    ups = jnp.asarray([-LIMIT, LIMIT, LIMIT + 1e-9, -LIMIT - 1e-9])
    gate_grads = jax.vmap(jax.grad(join), in_axes=(0, None))(gates, 0.5)
    up_grads = jax.vmap(jax.grad(join, argnums=1), in_axes=(None, 0))(0.5, ups)
    sigmoid = 1 / (1 + np.exp(-ALPHA * LIMIT))
    assert float(gate_grads[0]) == pytest.approx(1.5 * sigmoid * (1 + ALPHA * LIMIT * (1 - sigmoid)), rel=1e-12)
    assert float(gate_grads[1]) == 0.0
    assert float(gate_grads[2]) != 0.0, "a gate has no lower limit"
    np.testing.assert_allclose(up_grads, np.asarray([1, 1, 0, 0]) * 0.5 / (1 + np.exp(-ALPHA * 0.5)), **TOLERANCE)


def test_a_gating_that_would_be_ignored_or_an_activation_is_refused():
    for options in ({"activation": "gelu"}, {"gated": False}):
        with pytest.raises(ValueError, match=r"experts\.gating has its own gate and activation; expected gated"):
            layer(**options)
