"""Eager modules match `jax.grad` and optax in float64: with checkpoints, shared weights and nested modules."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import plimsoll as pl
from tests.support.eager import DIM, OPTIMIZERS, X, assert_equal, dense, dense_weights, eager_steps, plain_steps, random


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.once("outside-adamw")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("checkpoint", ["none", "inside", "outside"])
def test_two_layers_end_where_optax_ends(name: str, checkpoint: str) -> None:
    optimizer = OPTIMIZERS[name]()
    apply_module = jax.checkpoint(dense) if checkpoint == "inside" else dense
    layers = {key: pl.eager(apply_module, optimizer, name=key) for key in ("first", "second")}
    weights = {"first": dense_weights(0), "second": dense_weights(2)}

    def run(call: Callable[..., jax.Array], weights: Any) -> jax.Array:
        layer = jax.checkpoint(call, static_argnums=0) if checkpoint == "outside" else call
        x = jnp.asarray(X)
        for key in ("first", "second"):
            x = layer(key, weights[key], x)
        return jnp.sum(jnp.sin(x))

    trained = {key: layer.init(weights[key]) for key, layer in layers.items()}
    actual = eager_steps(lambda weights: run(lambda key, w, x: layers[key](w, x), weights), trained)
    expected = plain_steps(lambda weights: run(lambda key, w, x: dense(w, x), weights), optimizer, weights)
    assert_equal(actual, expected)


@pytest.mark.pairs
def test_jax_grad_returns_new_weights_and_input_gradients() -> None:
    layer = pl.eager(dense, optax.adamw(0.01), name="dense")
    weights = dense_weights(0)
    new, input_gradient = jax.grad(lambda trained, x: layer(trained, x).sum(), (0, 1))(
        layer.init(weights), jnp.asarray(X)
    )
    gradient, expected = jax.grad(lambda weights, x: dense(weights, x).sum(), (0, 1))(weights, jnp.asarray(X))
    optimizer = optax.adamw(0.01)
    updates, state = optimizer.update(gradient, optimizer.init(weights), weights)
    assert_equal((new.weights, new.state, input_gradient), (optax.apply_updates(weights, updates), state, expected))


@pytest.mark.pairs
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_in_two_branches_is_updated_once_by_the_sum(name: str) -> None:
    """FluxML/Zygote.jl#1541."""
    optimizer = OPTIMIZERS[name]()
    shared = pl.eager_weights(optimizer, name="shared")
    weights = {"shared": dense_weights(0)}

    def branches(weights: Any) -> jax.Array:
        return jnp.sum(dense(weights, X) * dense(weights, dense(weights, 2 * X)))

    actual = eager_steps(
        lambda trained: branches(shared(trained["shared"])), {"shared": shared.init(weights["shared"])}
    )
    expected = plain_steps(lambda weights: branches(weights["shared"]), optimizer, weights)
    assert_equal(actual, expected)


def test_inner_eager_layer_updates_inside_an_outer_one() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    inner = pl.eager(dense, optimizer, name="inner")

    def apply_outer(weights: Any, inner_weights: Any, x: jax.Array, call: Callable[..., jax.Array]) -> jax.Array:
        return dense(weights, call(inner_weights, x)) + x

    outer = pl.eager(jax.checkpoint(apply_outer, static_argnums=3), optimizer, name="outer")
    weights = {"inner": dense_weights(0), "outer": dense_weights(2)}
    trained = {"inner": inner.init(weights["inner"]), "outer": outer.init(weights["outer"])}
    x = jnp.asarray(X)
    actual = eager_steps(lambda w: outer(w["outer"], w["inner"], x, inner).sum(), trained)
    expected = plain_steps(lambda w: apply_outer(w["outer"], w["inner"], x, dense).sum(), optimizer, weights)
    assert_equal(actual, expected)


@pytest.mark.pairs
def test_auxiliary_outputs_keys_and_static_inputs() -> None:
    """The module has dropout from a key, an integer output without a gradient, and a string that selects the mode."""

    def apply_module(weights: Any, x: jax.Array, key: jax.Array, tokens: jax.Array, mode: str) -> dict[str, jax.Array]:
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        y = dense(weights, jnp.where(kept, x, 0)) if mode == "train" else x
        return {"y": y[tokens], "count": kept.sum(), "mean": y.mean()}

    def compute_loss(outputs: dict[str, jax.Array]) -> jax.Array:
        return outputs["y"].sum() + outputs["mean"]

    layer = pl.eager(apply_module, optax.lion(0.01), name="dropout")
    weights = {"layer": dense_weights(0)}
    inputs = (jnp.asarray(X), jax.random.key(3), jnp.array([0, 2, 2]))
    trained = {"layer": layer.init(weights["layer"])}
    actual = eager_steps(lambda w: compute_loss(layer(w["layer"], *inputs, "train")), trained)
    expected = plain_steps(
        lambda w: compute_loss(apply_module(w["layer"], *inputs, "train")), optax.lion(0.01), weights
    )
    assert_equal(actual, expected)

    def with_count(trained: Any) -> tuple[jax.Array, jax.Array]:
        outputs = layer(trained, *inputs, "train")
        return compute_loss(outputs), outputs["count"]

    (_, count), _ = pl.value_and_update(with_count, has_aux=True)(trained["layer"])
    assert count == apply_module(weights["layer"], *inputs, "train")["count"]


@pytest.mark.pairs
def test_mixed_dtypes_and_leaves_that_are_not_trained() -> None:
    """The weights are bfloat16 and float32; an integer table and a function stay unchanged."""
    weights = {
        "low": random(0, DIM, DIM).astype(jnp.bfloat16),
        "high": random(1, DIM).astype(jnp.float32),
        "table": jnp.arange(DIM)[::-1],
        "activation": jnp.tanh,
    }

    def apply_module(weights: Any, x: jax.Array) -> jax.Array:
        return weights["activation"](x[:, weights["table"]] @ weights["low"] + weights["high"])

    layer = pl.eager(apply_module, optax.adamw(0.01), name="mixed")
    trained = layer.init(weights)
    x = jnp.asarray(X, jnp.float32)
    new = jax.jit(jax.grad(lambda trained: layer(trained, x).sum()))(trained)
    floats = {"low": weights["low"], "high": weights["high"]}
    gradient = jax.jit(jax.grad(lambda floats: apply_module({**weights, **floats}, x).sum()))(floats)
    optimizer = optax.adamw(0.01)
    updates, state = jax.jit(optimizer.update)(gradient, optimizer.init(floats), floats)
    assert_equal({key: new.weights[key] for key in floats}, optax.apply_updates(floats, updates))
    np.testing.assert_array_equal(new.weights["table"], weights["table"])
    assert new.weights["activation"] is jnp.tanh
    assert_equal(jax.tree.leaves(new.state), jax.tree.leaves(state))


@pytest.mark.pairs
def test_function_rule_keeps_a_custom_state() -> None:
    def rule(weights: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        new = jax.tree.map(lambda w, g: w - g / state["count"], weights, gradient)
        return new, {"count": state["count"] + 1}

    layer = pl.eager(lambda weights, x: weights * x, rule, name="scale")
    trained = layer.init(jnp.ones(3), {"count": 2})
    for _ in range(2):
        trained = jax.grad(lambda trained: layer(trained, jnp.arange(3.0)).sum())(trained)
    np.testing.assert_allclose(trained.weights, 1 - np.arange(3.0) * (1 / 2 + 1 / 3))
    assert trained.state == {"count": 4}


@pytest.mark.pairs
@pytest.mark.parametrize("skip", [True, False])
def test_nonfinite_gradient_skips_only_its_own_layer(skip: bool) -> None:
    layers = [pl.eager(dense, optax.adamw(0.01), name=f"layer{n}", skip_nonfinite=skip) for n in range(2)]
    trained = [layer.init(dense_weights(n)) for n, layer in enumerate(layers)]

    def loss_with_inf(trained: Any) -> jax.Array:
        return layers[0](trained[0], jnp.asarray(X)).sum() + layers[1](trained[1], jnp.full_like(X, jnp.inf)).sum()

    first, second = jax.grad(loss_with_inf)(trained)
    assert int(first.state[0].count) == 1
    assert int(second.state[0].count) == (0 if skip else 1)
    assert bool(jnp.isfinite(second.weights["kernel"]).all()) == skip
    if skip:
        assert_equal(second.weights, trained[1].weights)


@pytest.mark.pairs
def test_updates_are_limited_by_tensor() -> None:
    layer = pl.eager(dense, optax.sgd(1.0), name="dense", max_update_rms=0.01)
    weights = dense_weights(0)
    new = jax.grad(lambda trained: layer(trained, jnp.asarray(X)).sum())(layer.init(weights))
    for key, weight in weights.items():
        rms = jnp.sqrt(jnp.mean(jnp.square(new.weights[key] - weight)))
        np.testing.assert_allclose(rms, 0.01, rtol=1e-10)


@pytest.mark.pairs
def test_ordinary_leaves_still_get_gradients() -> None:
    layer = pl.eager(dense, optax.sgd(0.1), name="dense")
    params = {"layer": layer.init(dense_weights(0)), "scale": jnp.asarray(2.0)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return params["scale"] * layer(params["layer"], x).sum()

    value, new = pl.value_and_update(loss)(params, jnp.asarray(X))
    np.testing.assert_allclose(new["scale"], value / 2)
    assert isinstance(new["layer"], pl.Trained)
