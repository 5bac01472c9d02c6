"""The output head with 8-bit products, compared with the formulas in NumPy's float64, over chunks, and in models."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layers.low_precision import RECIPES
from plimsoll.framework.layers.precision_rules import HEAD_RECIPES, apply_precision_rules
from plimsoll.framework.layers.score_head import ScoreHead
from plimsoll.framework.layout import flatten
from tests.layers.test_low_precision import draw, round_by_formula
from tests.support import small

BATCH, LENGTH, DIM, VOCAB = 2, 24, 40, 56
TARGETS = np.random.default_rng(7).integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)


def make_head(recipe: str | None, **fields: Any) -> LMHead:
    head = config_for(LMHead, dim=DIM, vocab_size=VOCAB, **fields).instantiate()
    if recipe is not None:
        apply_precision_rules({"^head$": recipe}, {"head": head})
    return head


def make_weights(table: np.ndarray) -> dict[str, Any]:
    return {"table": jnp.asarray(table), "norm": {"scale": jnp.ones(DIM)}}


def make_context(weights: np.ndarray | None = None, key: jax.Array | None = None) -> Context:
    weights = np.ones((BATCH, LENGTH), np.float32) if weights is None else weights
    batch = {"targets": jnp.asarray(TARGETS), "weights": jnp.asarray(weights)}
    return Context(batch=batch, rng=key, num_targets=jnp.float32(weights.sum()), training=True)


def normalize(x: np.ndarray) -> np.ndarray:
    return (x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-6)).astype(np.float32)


def measure_error(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# --- formulas ---------------------------------------------------------------------------------------------------------


def multiply_by_formula(
    name: str, h: np.ndarray, table: np.ndarray, grad: np.ndarray, count: int, groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits and the gradients of hidden states and table, rounded to the nearest numbers."""
    recipe = RECIPES[name]
    h8, h_scale = round_by_formula(h, recipe.forward, (2,) if recipe.by_row else None)
    w8, w_scale = round_by_formula(table, recipe.forward, (1,) if recipe.by_row else None)
    logits = np.einsum("bsd,vd->bsv", h8 * h_scale, w8 * w_scale)
    h_grad, table_grad = np.zeros(h.shape), np.zeros(table.shape)
    if not recipe.by_row:
        for chunk in range(count):
            g8, g_scale = round_by_formula(grad[:, chunk::count], recipe.backward, None)
            h_grad[:, chunk::count] = (g8 * g_scale) @ (w8 * w_scale)
            table_grad += np.einsum("bsv,bsd->vd", g8 * g_scale, h8[:, chunk::count] * h_scale)
        return logits, h_grad, table_grad
    g8, g_scale = round_by_formula(grad * w_scale[:, 0], recipe.backward, (2,))
    h_grad = (g8 @ w8) * g_scale
    per_group = count // groups
    for group in range(groups):
        positions = [s for s in range(h.shape[1]) if s % count // per_group == group]
        g8, g_scale = round_by_formula((grad * h_scale)[:, positions], recipe.backward, (0, 1))
        table_grad += np.einsum("bsv,bsd->vd", g8, h8[:, positions]) * g_scale.reshape(-1, 1)
    return logits, h_grad, table_grad


def apply_linear_loss(
    head: LMHead, table: np.ndarray, grad: np.ndarray, h: np.ndarray, key: jax.Array | None = None
) -> tuple[Any, Any]:
    """Return the gradients of hidden states and table for a loss whose gradient by the logits is `grad`."""

    def loss(table: jax.Array, h: jax.Array) -> jax.Array:
        # The hidden states themselves, without the norm.
        head.apply_norm = lambda weights, x_BSD, ctx: x_BSD
        weights = {"table": table}
        inputs = jnp.asarray(grad)
        return head.sum_loss(lambda y, g: (jnp.sum(y * g), {}), weights, h, make_context(key=key), inputs)[0]

    table_grad, h_grad = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(table), jnp.asarray(h))
    return h_grad, table_grad


@pytest.mark.parametrize("name", HEAD_RECIPES)
@pytest.mark.parametrize(("chunk_tokens", "gradient_tokens", "count", "groups"), [(0, 0, 1, 1), (12, 24, 4, 2)])
def test_gradients_equal_the_formulas(
    name: str, chunk_tokens: int, gradient_tokens: int, count: int, groups: int
) -> None:
    h, table, grad = draw(BATCH, LENGTH, DIM), draw(VOCAB, DIM, seed=1), draw(BATCH, LENGTH, VOCAB, seed=2)
    expected = multiply_by_formula(name, h, table, grad, count, groups)
    head = make_head(name, chunk_tokens=chunk_tokens, gradient_tokens=gradient_tokens)
    found = apply_linear_loss(head, table, grad, h)
    logits = head.logits({"table": jnp.asarray(table)}, jnp.asarray(h), make_context())
    assert logits.dtype == jnp.float32
    for one, formula in zip((logits, *found), expected, strict=True):
        difference = np.abs(np.asarray(one, np.float64) - formula)
        # A scale that is off by a rounding error of float32 may move a number across a boundary.
        assert np.median(difference) <= 2e-6 * np.abs(formula).max()
        assert measure_error(one, formula) <= 2e-3


@pytest.mark.parametrize("name", HEAD_RECIPES)
def test_logits_are_differentiable(name: str) -> None:
    h, table, grad = draw(BATCH, LENGTH, DIM), draw(VOCAB, DIM, seed=1), draw(BATCH, LENGTH, VOCAB, seed=2)
    head = make_head(name, chunk_tokens=0, softcap=None)
    head.apply_norm = lambda weights, x_BSD, ctx: x_BSD
    ctx = make_context()
    _, pull = jax.vjp(lambda table, h: head.logits({"table": table}, h, ctx), jnp.asarray(table), jnp.asarray(h))
    table_grad, h_grad = pull(jnp.asarray(grad))
    expected_h, expected_table = apply_linear_loss(make_head(name, chunk_tokens=0), table, grad, h)
    np.testing.assert_array_equal(table_grad, expected_table)
    np.testing.assert_array_equal(h_grad, expected_h)


# --- the loss ---------------------------------------------------------------------------------------------------------


def compute_loss(
    recipe: str | None, weights: np.ndarray | None = None, key: jax.Array | None = None, **fields: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (loss, gradient of the input, gradient of the table) of the next tokens' cross-entropy."""
    head = make_head(recipe, softcap=30.0, z_loss=1e-3, **fields)
    ctx = make_context(weights, key)

    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        return head.apply({"table": table, "norm": {"scale": jnp.ones(DIM)}}, x, ctx, {})[1].loss

    table, x = jnp.asarray(0.1 * draw(VOCAB, DIM, seed=1)), jnp.asarray(draw(BATCH, LENGTH, DIM))
    value, (table_grad, x_grad) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(table, x)
    return np.asarray(value), np.asarray(x_grad), np.asarray(table_grad)


@pytest.mark.parametrize(("name", "most"), [("fp8_tensor", 0.1), ("fp8_row", 0.1), ("int8_row", 0.1)])
def test_loss_is_near_the_exact_one(name: str, most: float) -> None:
    exact = compute_loss(None)
    found = compute_loss(name, key=jax.random.key(0), chunk_tokens=12, gradient_tokens=24)
    assert 1e-6 < abs(found[0] / exact[0] - 1) < 1e-2
    for one, other in zip(found[1:], exact[1:], strict=True):
        assert 1e-3 < measure_error(one, other) < most


@pytest.mark.parametrize("name", HEAD_RECIPES)
@pytest.mark.parametrize("chunk_tokens", [24, 12, 2])
def test_results_do_not_depend_on_the_chunks(name: str, chunk_tokens: int) -> None:
    """The scale of the hidden states is of all positions, and all chunks are one group."""
    one = compute_loss(name, chunk_tokens=0, gradient_tokens=0)
    several = compute_loss(name, chunk_tokens=chunk_tokens, gradient_tokens=0)
    np.testing.assert_allclose(several[0], one[0], rtol=1e-6)
    for found, expected in zip(several[1:], one[1:], strict=True):
        assert measure_error(found, expected) < 2e-6


@pytest.mark.parametrize("groups", [1, 2])
def test_chunks_with_small_or_no_gradients(groups: int) -> None:
    """A chunk without counted targets has the scale of zeros, which must not decide that of the group."""
    weights = np.ones((BATCH, LENGTH), np.float32)
    weights[:, 1::4] = 0.0
    weights[:, 2::4] = 1e-3
    one = compute_loss("fp8_tensor", weights, chunk_tokens=0)
    gradient_tokens = BATCH * LENGTH // groups
    several = compute_loss("fp8_tensor", weights, chunk_tokens=12, gradient_tokens=gradient_tokens)
    for found, expected in zip(several, one, strict=True):
        assert measure_error(found, expected) < 1e-4
    nothing = compute_loss("fp8_tensor", 1e-30 * weights, chunk_tokens=12)
    assert all(np.isfinite(array).all() for array in nothing)


@pytest.mark.parametrize("name", HEAD_RECIPES)
@pytest.mark.parametrize("chunk_tokens", [0, 12])
def test_log_probs_are_those_of_the_loss(name: str, chunk_tokens: int) -> None:
    """The loss, its log-probabilities, values by position and the logits come from the same rounded numbers."""
    head = make_head(name, chunk_tokens=chunk_tokens)
    weights, x = make_weights(0.1 * draw(VOCAB, DIM, seed=1)), jnp.asarray(draw(BATCH, LENGTH, DIM))
    ctx = make_context()
    logits = head.logits(weights, x, ctx)
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), TARGETS[..., None], -1)[..., 0]
    log_probs = head.log_probs(weights, x, ctx)
    np.testing.assert_allclose(log_probs, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(head.map_logits(lambda y: y, weights, x, ctx), logits, rtol=2e-6, atol=2e-6)
    _, out = head.apply(weights, x, ctx, {})
    np.testing.assert_allclose(out.loss, -expected.mean(), rtol=2e-6)

    def sum_log_probs(table: jax.Array, x: jax.Array) -> jax.Array:
        return -jnp.mean(head.log_probs({**weights, "table": table}, x, ctx))

    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        return head.apply({**weights, "table": table}, x, ctx, {})[1].loss

    gradients = [jax.grad(function, argnums=(0, 1))(weights["table"], x) for function in (sum_log_probs, loss)]
    for found, other in zip(*gradients, strict=True):
        assert measure_error(found, other) < 2e-6


@pytest.mark.parametrize("name", ["fp8_row", "int8_row"])
def test_one_position_has_the_same_logits(name: str) -> None:
    """Generation computes the logits of the last position only."""
    head = make_head(name)
    weights, x = make_weights(draw(VOCAB, DIM, seed=1)), jnp.asarray(draw(BATCH, LENGTH, DIM))
    whole, last = (head.logits(weights, x[:, start:], make_context()) for start in (0, LENGTH - 1))
    np.testing.assert_allclose(last, whole[:, -1:], rtol=2e-6, atol=2e-6 * float(jnp.max(jnp.abs(whole))))


def test_one_position_has_almost_the_same_logits() -> None:
    """The scale of another array moves only the subnormal numbers: those below 2^-15 of the largest."""
    head = make_head("fp8_tensor")
    weights, x = make_weights(draw(VOCAB, DIM, seed=1)), jnp.asarray(draw(BATCH, LENGTH, DIM))
    whole, last = (head.logits(weights, x[:, start:], make_context()) for start in (0, LENGTH - 1))
    assert measure_error(last, whole[:, -1:]) < 1e-3


# --- noise ------------------------------------------------------------------------------------------------------------


def dequantize(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return the 8-bit numbers of int8_row times their scale."""
    values, scale = round_by_formula(x, "int8", axes)
    return values * scale


def test_chunks_and_groups_have_different_noise() -> None:
    """Equal hidden states and gradients are rounded differently, so that the noise of their sum averages out."""
    count = 4
    repeats = LENGTH // count
    h, table = draw(BATCH, count, DIM), draw(VOCAB, DIM, seed=1)
    grad = draw(BATCH, count, VOCAB, seed=2)
    exact_h = grad @ dequantize(table, (1,))
    exact_table = np.einsum("bsv,bsd->vd", grad, dequantize(h, (2,)))
    # Each position is a chunk; a group has each of the repeated positions once.
    head = make_head("int8_row", chunk_tokens=BATCH, gradient_tokens=count * BATCH)
    key = jax.random.key(0)
    once = apply_linear_loss(head, table, grad, h, key)
    several = apply_linear_loss(head, table, np.tile(grad, (1, repeats, 1)), np.tile(h, (1, repeats, 1)), key)
    mean_h = np.asarray(several[0]).reshape(BATCH, repeats, count, DIM).mean(axis=1)
    for mean, one, exact in ((mean_h, once[0], exact_h), (several[1] / repeats, once[1], exact_table)):
        assert measure_error(mean, exact) < 1.5 / np.sqrt(repeats) * measure_error(one, exact)
    again = apply_linear_loss(head, table, grad, h, key)
    other = apply_linear_loss(head, table, grad, h, jax.random.key(1))
    for one, same, different in zip(once, again, other, strict=True):
        np.testing.assert_array_equal(one, same)
        assert (np.asarray(one) != np.asarray(different)).mean() > 0.5


def test_noise_of_gradients_is_unbiased() -> None:
    h, table, grad = draw(BATCH, LENGTH, DIM), draw(VOCAB, DIM, seed=1), draw(BATCH, LENGTH, VOCAB, seed=2)
    exact = grad @ dequantize(table, (1,)), np.einsum("bsv,bsd->vd", grad, dequantize(h, (2,)))
    head = make_head("int8_row", chunk_tokens=12, gradient_tokens=24)
    count = 40
    once = apply_linear_loss(head, table, grad, h, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), count)
    sums = [np.zeros(one.shape) for one in exact]
    for key in keys:
        for total, one in zip(sums, apply_linear_loss(head, table, grad, h, key), strict=True):
            total += np.asarray(one) / count
    for mean, one, expected in zip(sums, once, exact, strict=True):
        assert measure_error(mean, expected) < 2 / np.sqrt(count) * measure_error(one, expected)


# --- the program ------------------------------------------------------------------------------------------------------


def walk(jaxpr: Any, depth: int = 0) -> Iterator[tuple[JaxprEqn, int]]:
    """Yield all equations with the number of loops around them."""
    for eqn in jaxpr.eqns:
        yield eqn, depth
        inside = depth + (eqn.primitive.name in ("scan", "while"))
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))):
            if isinstance(value, ClosedJaxpr):
                yield from walk(value.jaxpr, inside)
            elif isinstance(value, Jaxpr):
                yield from walk(value, inside)


def find_roundings(jaxpr: Any, dtype: str, shape: tuple[int, ...]) -> list[int]:
    """Return, for each conversion of an array of this shape to an 8-bit dtype, the number of loops around it."""
    return [
        depth
        for eqn, depth in walk(jaxpr)
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.dtype == dtype
        and eqn.outvars[0].aval.shape == shape
    ]


@pytest.mark.parametrize("name", HEAD_RECIPES)
@pytest.mark.parametrize("method", ["apply", "log_probs", "map_logits"])
def test_factors_are_rounded_once(name: str, method: str) -> None:
    """For the forward and the backward pass, before the loop over chunks."""
    head = make_head(name, chunk_tokens=12, gradient_tokens=24)
    ctx = make_context(key=jax.random.key(0))

    def compute(table: jax.Array, x: jax.Array) -> jax.Array:
        weights = {"table": table, "norm": {"scale": jnp.ones(DIM)}}
        if method == "apply":
            return head.apply(weights, x, ctx, {})[1].loss
        if method == "log_probs":
            return jnp.sum(head.log_probs(weights, x, ctx))
        return jnp.sum(head.map_logits(lambda y: jnp.max(y, axis=-1), weights, x, ctx))

    if method != "map_logits":
        compute = jax.grad(compute, argnums=(0, 1))
    jaxpr = jax.make_jaxpr(compute)(jnp.ones((VOCAB, DIM)), jnp.ones((BATCH, LENGTH, DIM))).jaxpr
    forward = RECIPES[name].forward
    assert find_roundings(jaxpr, forward, (VOCAB, DIM)) == [0]
    assert find_roundings(jaxpr, forward, (BATCH, LENGTH, DIM)) == [0]
    products = [eqn for eqn, _ in walk(jaxpr) if eqn.primitive.name == "dot_general"]
    assert all(var.aval.dtype.itemsize == 1 for eqn in products for var in eqn.invars)
    assert len(products) == {"apply": 3, "log_probs": 4, "map_logits": 1}[method]


@pytest.mark.parametrize(("name", "itemsize"), [("fp8_tensor", 1), ("fp8_row", 2), ("int8_row", 2), (None, 2)])
def test_saved_gradients_of_logits(name: str | None, itemsize: int) -> None:
    """With a scale for each chunk, a group saves 8-bit numbers instead of the compute dtype."""
    head = make_head(name, chunk_tokens=12, gradient_tokens=24)
    ctx = make_context(key=jax.random.key(0))

    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        return head.apply({"table": table, "norm": {"scale": jnp.ones(DIM)}}, x, ctx, {})[1].loss

    arguments = jnp.ones((VOCAB, DIM), jnp.bfloat16), jnp.ones((BATCH, LENGTH, DIM), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*arguments).jaxpr
    stacks = [
        var.aval.dtype.itemsize
        for eqn, depth in walk(jaxpr)
        for var in eqn.outvars
        if eqn.primitive.name == "scan" and depth == 1 and var.aval.shape == (2, BATCH, LENGTH // 4, VOCAB)
    ]
    assert stacks == [itemsize]


@pytest.mark.parametrize("name", HEAD_RECIPES)
@pytest.mark.parametrize("method", ["log_probs", "logits"])
def test_gradient_checkpointing_saves_bits(name: str, method: str) -> None:
    """JAX applies `reduce_precision` to saved floats, for which numbers of e4m3 above 240 are infinite."""
    head = make_head(name, chunk_tokens=12)
    ctx = make_context()

    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(getattr(head, method)({**make_weights(np.ones(1)), "table": table}, x, ctx)))

    checkpointed = jax.checkpoint(loss, policy=jax.checkpoint_policies.everything_saveable)
    arguments = jnp.asarray(draw(VOCAB, DIM, seed=1)), jnp.asarray(draw(BATCH, LENGTH, DIM))
    text = str(jax.make_jaxpr(jax.grad(checkpointed, argnums=(0, 1)))(*arguments))
    assert re.findall(r":f8_\w+\[[\d,]*\] = reduce_precision", text) == []
    gradients = (jax.grad(function, argnums=(0, 1))(*arguments) for function in (checkpointed, loss))
    for found, expected in zip(*gradients, strict=True):
        assert measure_error(found, expected) < 2e-6


@pytest.mark.parametrize("name", HEAD_RECIPES)
def test_frozen_tables_have_no_gradient(name: str) -> None:
    head = make_head(name, chunk_tokens=12, gradient_tokens=24)
    ctx = make_context(key=jax.random.key(0))
    weights = make_weights(draw(VOCAB, DIM, seed=1))
    x = jnp.asarray(draw(BATCH, LENGTH, DIM))
    trained, frozen = (
        lambda table, x: head.apply({**weights, "table": table}, x, ctx, {})[1].loss,
        lambda x: head.apply(weights, x, ctx, {})[1].loss,
    )
    jaxpr = jax.make_jaxpr(jax.grad(frozen))(x).jaxpr
    assert sum(eqn.primitive.name == "dot_general" for eqn, _ in walk(jaxpr)) == 2
    np.testing.assert_allclose(jax.grad(frozen)(x), jax.grad(trained, argnums=1)(weights["table"], x), rtol=1e-6)


def test_fsdp_gathers_8_bit_tables() -> None:
    """Also a tied one, whose copy for the embedding is not rounded."""
    for tied in (False, True):
        config = small.llama(precision={"^head$": "fp8_tensor"}, head__tied=tied, compute_dtype="bfloat16")
        program = small.program(small.experiment(config, mesh={"fsdp": 8}))
        model = program.experiment.model
        assert model.head.table_spec().gathered_as_fp8
        assert not any(
            spec.gathered_as_fp8 for path, spec in flatten(model.parameter_specs()).items() if "embed" in path
        )
        text = str(program.jit_step.traced_step.jaxpr)
        shape = rf"{small.VOCAB},{model.dim}"
        assert re.search(rf"u8\[{shape}\] = sharding_constraint", text)


# --- in a model -------------------------------------------------------------------------------------------------------


def experiment(recipe: str | None, tied: bool = False, chunks: tuple[int, int] = (1024, 4096), **options: Any) -> Any:
    rules = {} if recipe is None else {"^head$": recipe}
    model = small.llama(
        precision=rules,
        compute_dtype="float32",
        head__tied=tied,
        head__chunk_tokens=chunks[0],
        head__gradient_tokens=chunks[1],
    )
    return small.experiment(model, seq_len=32, optimizer=small.STEADY_ADAMW, **options)


CASES = [("fp8_tensor", False), ("fp8_tensor", True), ("fp8_row", False), ("int8_row", False)]


def compute_losses(config: Any) -> list[float]:
    """Return the losses of three steps."""
    _, metrics = small.run(small.program(config), 3)
    return [one["loss"] for one in metrics]


@cache
def run_compiled(recipe: str | None, tied: bool) -> list[float]:
    """Return the losses of a step that is one program."""
    return compute_losses(experiment(recipe, tied, (64, 128), clip=None))


@pytest.mark.pairs
@pytest.mark.parametrize(("name", "tied"), CASES)
@pytest.mark.parametrize(
    "memory",
    [
        {"remat": "full"},
        {"update": "streamed", "optimizer_state": "pinned_host", "remat": "full"},
        {"update": "in_backward", "optimizer_state": "pinned_host"},
        {"update": "layer_programs", "optimizer_state": "pinned_host", "parameters": "pinned_host"},
    ],
    ids=["full", "streamed", "in_backward", "layer_programs"],
)
def test_schedules_round_the_same_numbers(name: str, tied: bool, memory: dict[str, str]) -> None:
    losses = run_compiled(name, tied)
    # The clipping of in_backward differs by design.
    others = compute_losses(experiment(name, tied, (64, 128), clip=None, memory=memory))
    np.testing.assert_allclose(others, losses, rtol=2e-5)
    assert 1e-6 < abs(losses[-1] / run_compiled(None, tied)[-1] - 1) < 1e-2


@pytest.mark.pairs
@pytest.mark.parametrize(("name", "tied"), CASES)
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 4}, {"fsdp": 2, "model": 2, "seq": 2}], ids=str)
def test_meshes_round_the_same_numbers(name: str, tied: bool, mesh: dict[str, int]) -> None:
    """A scale covers the whole array, not a shard of it; four chunks in two groups on every mesh."""
    one = small.program(experiment(name, tied, (64, 128)))
    state = one.init()
    loss, grads = small.loss_and_grads(one, state)
    shards = 8 // mesh.get("model", 1)
    chunks = (64 // shards, 128 // shards)
    other_loss, other_grads = small.loss_and_grads(small.program(experiment(name, tied, chunks, mesh=mesh)), state)
    np.testing.assert_allclose(other_loss, loss, rtol=2e-6)
    for path, grad in grads.items():
        # Sums in another order move single numbers across a boundary; a scale of a shard would move most of them.
        assert np.linalg.norm(other_grads[path] - grad) < 5e-3 * np.linalg.norm(grad), path


def test_rules_name_the_head() -> None:
    named = small.llama(precision={"^head$": "fp8_row"}).instantiate()
    assert named.head.recipe is RECIPES["fp8_row"]
    assert small.llama(precision={".": "int8_row"}).instantiate().head.recipe is RECIPES["int8_row"]
    assert small.llama(precision={"mlp|attention": "int8_row"}).instantiate().head.recipe is None
    first = small.llama(precision={"head": "fp8_tensor", ".": "int8_row"}).instantiate()
    assert first.head.recipe is RECIPES["fp8_tensor"]


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - set(HEAD_RECIPES)))
def test_other_recipes_are_refused(name: str) -> None:
    message = r"matches head; expected one of fp8_tensor, fp8_row, int8_row for the output head"
    for pattern in ("head", "."):
        with pytest.raises(ValueError, match=message):
            small.llama(dim=64, precision={"stack/": "fp8_row", pattern: name}).instantiate()


def test_score_heads_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="matches head, a ScoreHead; the product of a score head has no 8-bit form"):
        small.llama(head=config_for(ScoreHead), precision={"head": "fp8_row"}).instantiate()
    small.llama(head=config_for(ScoreHead), precision={".": "fp8_row"}).instantiate()
