"""Mixtures of experts in float64, compared to a loop over experts, and their losses, compared to sums over tokens."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.experts import scores
from plimsoll.framework.layers.experts.experts import Experts
from plimsoll.framework.layers.experts.grouped import grouped_dot, with_spare_rows
from plimsoll.framework.layers.experts.moe import MoE
from plimsoll.framework.layers.experts.router import Router
from plimsoll.framework.layers.mlp import MLP

DIM, EXPERTS, HIDDEN, BATCH, LENGTH = 8, 5, 12, 3, 50
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def layer(router: dict[str, Any] | None = None, **experts: Any) -> MoE:
    """Return a toy mixture of experts."""
    shared = config_for(MLP, hidden=6, activation="silu", gated=True)
    return config_for(
        MoE,
        num_experts=EXPERTS,
        router=config_for(Router, **(router or {})),
        experts=config_for(Experts, hidden=HIDDEN, **experts),
        shared=shared,
    ).instantiate(dim=DIM)


def arrays(moe: MoE, case: str) -> tuple[Any, np.ndarray]:
    """Return the weights and tokens of a case."""
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda spec: rng.normal(size=spec.shape), moe.parameter_specs())
    x_BSD = rng.normal(size=(BATCH, LENGTH, DIM))
    router = weights["router"]["weight"]
    if case == "one expert":
        x_BSD[..., 0] = np.abs(x_BSD[..., 0]) + 1.0
        router[0, 2] = 30.0
    if case == "empty experts":
        x_BSD[..., 0] = np.abs(x_BSD[..., 0]) + 1.0
        router[0, [0, 4]] = -1e3
    if case == "ties":
        router[:, 1] = router[:, 3]
        router[:, 2] = router[:, 3]
    if case == "all tied":
        router[:] = 0.0
    return weights, x_BSD


def context(training: bool = False, weights: np.ndarray | None = None) -> Context:
    """Return a context on one device; the first row ends in padding."""
    if weights is None:
        weights = np.ones((BATCH, LENGTH))
        weights[0, 30:] = 0.0
    batch = {"weights": jnp.asarray(weights)}
    return Context(
        batch,
        jax.random.key(0),
        rows=jnp.arange(BATCH),
        num_targets=jnp.sum(batch["weights"]),
        training=training,
        compute_dtype=jnp.float64,
    )


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def apply_gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (silu(x @ gate) * (x @ up)) @ down


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def compute_shares(logits: np.ndarray, top_k: int, score: str, normalize: bool, scale: float) -> np.ndarray:
    """Return the routing weight of each expert for each token, [T, E]: 0 if it is not chosen."""
    known = {"softmax": softmax, "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "softmax_chosen": lambda x: x}
    found = known[score](logits)
    # A stable sort: with equal scores the first expert wins.
    order = np.argsort(-found, axis=-1, kind="stable")[:, :top_k]
    picked = np.take_along_axis(found, order, -1)
    if score == "softmax_chosen":
        picked = softmax(picked)
    if normalize:
        picked = picked / picked.sum(-1, keepdims=True)
    shares = np.zeros_like(found)
    np.put_along_axis(shares, order, scale * picked, -1)
    return shares


def loop(weights: Any, x_BSD: np.ndarray, **options: Any) -> np.ndarray:
    """Apply one expert after the other, each to the tokens that chose it."""
    x_TD = x_BSD.reshape(-1, DIM)
    shares = compute_shares(x_TD @ weights["router"]["weight"], **options)
    shared = {name: leaf["weight"] for name, leaf in weights["shared"].items()}
    y_TD = apply_gated(x_TD, shared["gate"], shared["up"], shared["down"])
    experts = weights["experts"]
    for expert in range(EXPERTS):
        tokens = np.flatnonzero(shares[:, expert])
        own = {name: leaf[expert] for name, leaf in experts.items()}
        y_TD[tokens] += shares[tokens, expert, None] * apply_gated(x_TD[tokens], own["gate"], own["up"], own["down"])
    return y_TD.reshape(x_BSD.shape)


CASES = ["plain", "one expert", "empty experts", "ties", "all tied"]
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"top_k": 2, "score": "softmax", "normalize": True},
    "olmoe": {"top_k": 3, "score": "softmax", "normalize": False},
    "gpt-oss": {"top_k": 2, "score": "softmax_chosen", "normalize": False},
    "deepseek-v3": {"top_k": 2, "score": "sigmoid", "normalize": True, "scale": 2.5},
    "switch": {"top_k": 1, "score": "softmax", "normalize": False},
    "all experts": {"top_k": 5, "score": "softmax", "normalize": True},
}


@pytest.mark.pairs
@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@pytest.mark.parametrize("case", CASES)
def test_no_choice_is_dropped_and_the_sum_equals_a_loop(case: str, implementation: str):
    options = {"scale": 1.0, **ROUTERS["mixtral"]}
    moe = layer(options, implementation=implementation)
    weights, x_BSD = arrays(moe, case)
    y_BSD, _ = jax.jit(lambda w, x: moe.apply(w, x, context(), {}))(weights, x_BSD)
    np.testing.assert_allclose(y_BSD, loop(weights, x_BSD, **options), **TOLERANCE)
    loads = np.count_nonzero(compute_shares(x_BSD.reshape(-1, DIM) @ weights["router"]["weight"], **options), axis=0)
    assert loads.sum() == 2 * BATCH * LENGTH
    assert {"one expert": loads[2] == BATCH * LENGTH, "empty experts": loads[[0, 4]].sum() == 0}.get(case, True)


@pytest.mark.pairs
@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_type(name: str):
    options = {"scale": 1.0, **ROUTERS[name]}
    moe = layer(options)
    weights, x_BSD = arrays(moe, "plain")
    y_BSD, out = moe.apply(weights, x_BSD, context(), {})
    np.testing.assert_allclose(y_BSD, loop(weights, x_BSD, **options), **TOLERANCE)
    assert (out.loss, out.metrics) == (None, {}), "outside of training nothing is judged"


def dense(weights: Any, x_BSD: jax.Array, shares_BSE: jax.Array) -> jax.Array:
    """Apply every expert to every token, scaled by its routing weight, so that JAX can differentiate it."""
    total = jnp.zeros_like(x_BSD)
    for expert in range(EXPERTS):
        own = {name: leaf[expert] for name, leaf in weights.items()}
        hidden = jax.nn.silu(x_BSD @ own["gate"]) * (x_BSD @ own["up"])
        total += shares_BSE[..., expert, None] * (hidden @ own["down"])
    return total


@pytest.mark.once("plain-blocks", "ties-ragged")
@pytest.mark.parametrize("implementation", ["blocks", "ragged"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_match_every_expert_on_every_token(case: str, implementation: str):
    moe = layer({"top_k": 2, "balance": 0.0}, implementation=implementation)
    weights, x_BSD = arrays(moe, case)
    direction = np.random.default_rng(1).normal(size=x_BSD.shape)

    def sparse_sum(weights: Any, x_BSD: jax.Array) -> jax.Array:
        choice = moe.router(weights["router"], x_BSD, context(), {}).choice
        y_BSD, _ = moe.experts(weights["experts"], x_BSD, choice, context())
        return jnp.sum(y_BSD * direction)

    def dense_sum(weights: Any, x_BSD: jax.Array) -> jax.Array:
        choice = moe.router(weights["router"], x_BSD, context(), {}).choice
        # The choice itself is tested above; here its routing weights are scattered over all experts.
        shares_BSE = jnp.einsum("bske,bsk->bse", jax.nn.one_hot(choice.experts_BSK, EXPERTS), choice.shares_BSK)
        return jnp.sum(dense(weights["experts"], x_BSD, shares_BSE) * direction)

    found = jax.jit(jax.grad(sparse_sum, argnums=(0, 1)))(weights, x_BSD)
    expected = jax.jit(jax.grad(dense_sum, argnums=(0, 1)))(weights, x_BSD)
    for path, grad in jax.tree_util.tree_leaves_with_path(found):
        other = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        scale = max(1.0, float(jnp.abs(other).max()))
        np.testing.assert_allclose(grad / scale, other / scale, err_msg=str(path), **TOLERANCE)


@pytest.mark.pairs
def test_capacity_drops_the_last_tokens():
    capacity, top_k = 0.6, 2
    moe = layer({"top_k": top_k}, capacity=capacity)
    weights, x_BSD = arrays(moe, "plain")
    y_BSD, out = moe.apply(weights, x_BSD, context(training=True), {})
    dropped = 0
    counted = np.asarray(context().batch["weights"])
    expected = np.zeros_like(x_BSD)
    shared = {name: leaf["weight"] for name, leaf in weights["shared"].items()}
    for row, x_SD in enumerate(x_BSD):
        found = softmax(x_SD @ weights["router"]["weight"])
        order = np.argsort(-found, axis=-1, kind="stable")[:, :top_k]
        picked = np.take_along_axis(found, order, -1)
        picked /= picked.sum(-1, keepdims=True)
        taken = np.zeros(EXPERTS, int)
        num_tokens = int(counted[row].sum())
        places = int(np.ceil(capacity * top_k * num_tokens / EXPERTS))
        expected[row] = apply_gated(x_SD, shared["gate"], shared["up"], shared["down"])
        for k in range(top_k):
            for token in range(num_tokens):
                expert = order[token, k]
                taken[expert] += 1
                if taken[expert] > places:
                    dropped += counted[row, token] / top_k
                    continue
                own = {name: leaf[expert] for name, leaf in weights["experts"].items()}
                expected[row, token] += picked[token, k] * apply_gated(x_SD[token], own["gate"], own["up"], own["down"])
    np.testing.assert_allclose(y_BSD, expected, **TOLERANCE)
    assert dropped > 0
    np.testing.assert_allclose(out.metrics["dropped"], dropped / counted.sum(), rtol=1e-6)


@pytest.mark.once("segments-20-0")
@pytest.mark.parametrize(
    ("array", "before", "after"),
    # Loss weights are zero in a prompt, too, so only segments can mark padding before it.
    [("segments", 0, 20), ("segments", 20, 0), ("segments", 7, 9), ("weights", 0, 20)],
)
def test_padding_does_not_change_a_sequence(array: str, before: int, after: int):
    """All padded columns choose the same experts, and none of them takes a capacity slot."""
    moe = layer({"top_k": 2}, capacity=0.8)
    weights, x_BSD = arrays(moe, "plain")
    tokens_BSD = x_BSD[:, :12]

    def apply_padded(before: int, after: int) -> tuple[np.ndarray, float]:
        padded_BSD = np.pad(tokens_BSD, ((0, 0), (before, after), (0, 0)), constant_values=1.0)
        marks_BS = np.pad(np.ones((BATCH, 12)), ((0, 0), (before, after)))
        ctx = context(training=True, weights=marks_BS)
        if array == "segments":
            ctx = replace(ctx, batch={**ctx.batch, "segments": jnp.asarray(marks_BS, jnp.int32)})
        y_BSD, out = moe.apply(weights, padded_BSD, ctx, {})
        return np.asarray(y_BSD)[:, before : before + 12], float(out.metrics["dropped"])

    alone, dropped_alone = apply_padded(0, 0)
    padded, dropped = apply_padded(before, after)
    assert dropped == dropped_alone > 0
    np.testing.assert_allclose(padded, alone, **TOLERANCE)


@pytest.mark.pairs
def test_sufficient_capacity_drops_nothing():
    weights, x_BSD = arrays(layer(), "one expert")
    bound, free = layer({"top_k": 2}, capacity=float(EXPERTS)), layer({"top_k": 2})
    y_BSD, out = bound.apply(weights, x_BSD, context(training=True), {})
    assert float(out.metrics["dropped"]) == 0.0
    is_token_BS = np.asarray(context().batch["weights"]) > 0
    expected_BSD = np.asarray(free.apply(weights, x_BSD, context(), {})[0])
    np.testing.assert_allclose(np.asarray(y_BSD)[is_token_BS], expected_BSD[is_token_BS], **TOLERANCE)


@pytest.mark.pairs
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_losses_and_metrics_are_means_over_weighted_targets(over: str, score: str):
    top_k = 2
    options = {"top_k": top_k, "score": score, "balance": 0.5, "balance_over": over, "z": 0.25, "expert_metrics": True}
    moe = layer(options)
    weights, x_BSD = arrays(moe, "plain")
    ctx = context(training=True)
    _, out = moe.apply(weights, x_BSD, ctx, {})
    counted = np.asarray(ctx.batch["weights"])
    logits = x_BSD @ weights["router"]["weight"]
    found = softmax(logits)
    if score == "sigmoid":
        found = 1.0 / (1.0 + np.exp(-logits))
        found /= found.sum(-1, keepdims=True)
    is_chosen = np.zeros_like(found)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :top_k]
    np.put_along_axis(is_chosen, order, 1.0, -1)
    parts = [(row,) for row in range(BATCH)] if over == "sequence" else [tuple(range(BATCH))]
    balance = 0.0
    for rows in parts:
        mask = counted[list(rows)].astype(bool)
        f = is_chosen[list(rows)][mask].mean(0) / top_k
        p = found[list(rows)][mask].mean(0)
        balance += mask.sum() * EXPERTS * (f * p).sum()
    z = (np.log(np.exp(logits).sum(-1)) ** 2 * counted).sum()
    total = counted.sum()
    np.testing.assert_allclose(out.loss, (0.5 * balance + 0.25 * z) / total, rtol=1e-12)
    entropy = (-(found * np.log(found)).sum(-1) * counted).sum() / total
    loads = (is_chosen * counted[..., None]).sum((0, 1)) * EXPERTS / top_k / total
    expected = {"balance": balance / total, "z": z / total, "entropy": entropy}
    expected |= {"load_max": loads.max(), "load_min": loads.min()}
    expected |= {f"load/{expert}": load for expert, load in enumerate(loads)}
    assert out.metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(out.metrics[name], value, rtol=1e-6, err_msg=name)


def test_even_load_has_balance_loss_1_and_padding_has_none():
    probabilities = jnp.full((1, 4, 4), 0.25)
    loads = jnp.full((1, 4), 2.0)
    assert float(scores.balance_loss(loads, probabilities, jnp.ones((1, 4)), 2, "sequence")) == pytest.approx(4.0)
    nothing = scores.balance_loss(jnp.zeros((1, 4)), probabilities, jnp.zeros((1, 4)), 2, "sequence")
    assert float(nothing) == 0.0


def test_sigmoids_that_all_underflow_divide_nothing_by_zero():
    logits = jnp.full((1, 1, 3), -1e4)
    choice = scores.choose(logits, None, top_k=2, score="sigmoid", normalize=True, scale=1.0)
    assert np.isfinite(choice.shares_BSK).all()
    assert np.isfinite(scores.probabilities(logits, "sigmoid")).all()


def test_a_bias_moves_the_choice_and_not_the_shares():
    logits = jnp.asarray([[[2.0, 1.0, 0.0, -1.0]]])
    plain = scores.choose(logits, None, top_k=2, score="sigmoid", normalize=False, scale=1.0)
    bias = jnp.asarray([0.0, -1.0, 0.0, 1.0])
    moved = scores.choose(logits, bias, top_k=2, score="sigmoid", normalize=False, scale=1.0)
    assert plain.experts_BSK.ravel().tolist() == [0, 1]
    assert moved.experts_BSK.ravel().tolist() == [3, 0]
    np.testing.assert_allclose(moved.shares_BSK.ravel(), jax.nn.sigmoid(jnp.asarray([-1.0, 2.0])))


@pytest.mark.pairs
def test_the_bias_moves_once_a_step_towards_the_experts_that_were_chosen_less():
    """Steps of one and of three microbatches give the same biases; evaluation includes the last step's update."""
    rate, steps = 0.05, 3
    moe = layer({"score": "sigmoid", "bias_rate": rate, "balance": 0.0})
    weights, x_BSD = arrays(moe, "plain")
    logits = x_BSD @ weights["router"]["weight"]
    found = 1.0 / (1.0 + np.exp(-logits))
    ctx = context(training=True)
    counted = np.asarray(ctx.batch["weights"])
    expected = np.zeros(EXPERTS)
    first = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in moe.router.layer_buffer_specs().items()}
    whole = parts = {"router": first}
    for _ in range(steps):
        order = np.argsort(-(found + expected), axis=-1, kind="stable")[..., :2]
        loads = np.array([(counted * (order == expert).sum(-1)).sum() for expert in range(EXPERTS)])
        whole = moe.apply(weights, x_BSD, ctx, whole)[1].layer_state
        np.testing.assert_allclose(whole["router"]["loads"], loads)
        for row in range(BATCH):
            rows = slice(row, row + 1)
            batch = {name: x[rows] for name, x in ctx.batch.items()}
            rows_ctx = replace(ctx, batch=batch, rows=ctx.rows[rows])
            parts = moe.apply(weights, x_BSD[rows], rows_ctx, parts)[1].layer_state
        np.testing.assert_array_equal(parts["router"]["loads"], whole["router"]["loads"])
        np.testing.assert_allclose(whole["router"]["bias"], expected, atol=1e-7)
        np.testing.assert_array_equal(parts["router"]["bias"], whole["router"]["bias"])
        expected = expected + rate * np.sign(loads.mean() - loads)
    assert np.ptp(expected) > rate, "biases that moved apart"
    routing = moe.router(weights["router"], x_BSD, context(), whole["router"])
    order = np.argsort(-(found + expected), axis=-1, kind="stable")[..., :2]
    np.testing.assert_array_equal(routing.choice.experts_BSK, order)
    assert routing.buffers is whole["router"], "evaluation changes nothing"


@pytest.mark.pairs
def test_jitter_is_training_only_and_keyed_by_global_row():
    moe = layer({"jitter": 0.3})
    weights, x_BSD = arrays(moe, "plain")
    still = moe.apply(weights, x_BSD, context(), {})[0]
    np.testing.assert_array_equal(still, layer().apply(weights, x_BSD, context(), {})[0])
    ctx = context(training=True)
    whole, out = moe.apply(weights, x_BSD, ctx, {})
    assert not np.allclose(whole, still)
    rows = slice(1, 3)

    def apply_rows(rows: slice) -> Any:
        batch = {name: x[rows] for name, x in ctx.batch.items()}
        return moe.apply(weights, x_BSD[rows], replace(ctx, batch=batch, rows=ctx.rows[rows]), {})

    part, rows_out = apply_rows(rows)
    np.testing.assert_allclose(part, whole[rows], **TOLERANCE)
    _, first_out = apply_rows(slice(1))
    # The losses of the microbatches add up to the loss of the batch.
    np.testing.assert_allclose(first_out.loss + rows_out.loss, out.loss, rtol=1e-12)


@pytest.mark.pairs
def test_the_router_is_in_float32_whatever_the_compute_dtype():
    moe = layer()
    weights, x_BSD = arrays(moe, "plain")
    small = jnp.asarray(x_BSD, jnp.bfloat16)
    shares = moe.router(jax.tree.map(jnp.float32, weights["router"]), small, context(), {}).choice.shares_BSK
    assert shares.dtype == jnp.float32
    half = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), weights)
    assert moe.apply(half, small, context(), {})[0].dtype == jnp.bfloat16


def test_flops_count_the_active_experts():
    top_k = 2
    expected = 2 * DIM * EXPERTS + 2 * top_k * 3 * DIM * HIDDEN + 2 * 3 * DIM * 6
    assert layer({"top_k": top_k}).flops_per_token(LENGTH) == expected


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValueError, match="top_k = 6 is more than num_experts = 5; expected 1 to 5"):
        layer({"top_k": 6})
    with pytest.raises(ValueError, match=r"score.*softmax_chosen"):
        layer({"score": "softmaxx"})


@pytest.mark.parametrize(("argnum", "kept"), [(0, [(5, 4, 3), (5,)]), (1, [(46, 4), (5,)])])
def test_frozen_arguments_save_no_residuals(argnum: int, kept: list[tuple[int, ...]]):
    """Frozen experts need no saved rows, and rows without a gradient need no saved weights."""
    sizes = jnp.asarray([0, 7, 16, 5, 2], jnp.int32)
    rows = with_spare_rows(30, "blocks")
    arguments = [jnp.ones((rows, 4)), jnp.ones((5, 4, 3))]

    def product(varied: jax.Array) -> jax.Array:
        given = [varied if index == argnum else x for index, x in enumerate(arguments)]
        return grouped_dot(given[0], given[1], sizes, "blocks")

    _, pull = jax.vjp(product, arguments[argnum])
    assert [leaf.shape for leaf in jax.tree.leaves(pull)] == kept


@pytest.mark.pairs
def test_expert_shards_add_up_without_foreign_rows():
    """As on a mesh, each shard gets all tokens and computes rows only for the choices of its own experts."""
    moe = layer({"top_k": 2})
    weights, x_BSD = arrays(moe, "plain")
    choice = moe.router(weights["router"], x_BSD, context(), {}).choice
    whole, _ = moe.experts(weights["experts"], x_BSD, choice, context())
    total = jnp.zeros_like(whole)
    for first, last in ((0, 1), (1, EXPERTS)):
        own = {name: leaf[first:last] for name, leaf in weights["experts"].items()}
        total += moe.experts._run_local_experts(own, jnp.asarray(x_BSD), choice, context(), first, shards=2)
    np.testing.assert_allclose(total, whole, **TOLERANCE)
