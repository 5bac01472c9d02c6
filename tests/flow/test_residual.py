"""Residual flow blocks: the contraction, the fixed-point inverse, and estimates of the log-determinant."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.extras.flows.residual import ResidualBlock
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layout import initialize
from tests.support import small

SHAPE = (2, 4, 4, 2)
X = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32)


def block(**fields: Any) -> tuple[ResidualBlock, Any]:
    """Return a block whose weights put each convolution at its bound, all of one sign so that the bounds multiply."""
    layer = ResidualBlock(**{"dim": 2, "hidden": 8, "size": 4, **fields})
    params = jax.jit(lambda key: initialize(layer.parameter_specs(), key))(jax.random.key(0))
    return layer, jax.tree.map(lambda p: 3.0 * jnp.abs(p) + 0.1, params)


def training(seed: int = 0) -> Context:
    return Context(batch={}, rng=jax.random.key(seed), rows=jnp.arange(2), training=True)


@pytest.mark.pairs
@pytest.mark.parametrize("coefficient", [0.5, 0.9])
def test_the_residual_contracts(coefficient: float):
    layer, params = block(coefficient=coefficient, power_iterations=20)
    small_weights = jax.tree.map(lambda p: 1e-3 * p, params)

    @jax.jit
    def jacobians(params: Any, x: jax.Array) -> Any:
        weights = layer.prepare(params, training())

        def flat(x: jax.Array) -> jax.Array:
            return layer.residual(weights, x.reshape(1, *SHAPE[1:]), training()).reshape(-1)

        def linear(weight: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                x.reshape(1, 4, 4, -1), weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ).reshape(-1)

        conv_jacobians = {
            name: jax.jacobian(linear, argnums=1)(weights[name]["weight"], jnp.zeros(16 * conv.shape[2]))
            for name, conv in layer.convs.items()
        }
        return jax.vmap(jax.jacobian(flat))(x.reshape(len(x), -1)), conv_jacobians

    residual_jacobians, conv_jacobians = jacobians(params, jnp.stack([X[0], X[1], 10.0 * jnp.abs(X[0])]))
    norms = [np.linalg.norm(jacobian, 2) for jacobian in residual_jacobians]
    assert max(norms) <= coefficient**3
    assert max(norms) > 0.3 * coefficient**3
    for jacobian in conv_jacobians.values():  # each one is at its bound, to the accuracy of the power iteration
        np.testing.assert_allclose(np.linalg.norm(jacobian, 2), coefficient, rtol=0.02)
    same = jax.jit(lambda p: layer.prepare(p, training()))(small_weights)
    np.testing.assert_array_equal(same["first"]["weight"], small_weights["first"]["weight"])


@pytest.mark.pairs
def test_the_inverse_is_bounded_in_steps_and_stops_at_its_tolerance():
    layer, params = block(coefficient=0.97)
    short, _ = block(coefficient=0.97, max_iterations=2)
    loose, _ = block(coefficient=0.97, tolerance=1e-2)
    ctx = training()

    @jax.jit
    def everything(params: Any) -> Any:
        weights = layer.prepare(params, ctx)
        y = X + layer.residual(weights, X, ctx)
        by_hand = y - layer.residual(weights, y - layer.residual(weights, y, ctx), ctx)
        return by_hand, [one.inverse(weights, y, ctx)[0] for one in (layer, short, loose)]

    by_hand, (whole, after_two, near) = everything(params)
    np.testing.assert_allclose(whole, X, atol=5e-6)
    np.testing.assert_allclose(after_two, by_hand, atol=1e-6)
    assert np.abs(by_hand - X).max() > 1e-3
    assert 1e-5 < np.abs(near - X).max() < 0.1


@pytest.mark.pairs
def test_the_series_is_unbiased_in_value_and_gradient():
    """Compare the mean over many draws of the roulette, with two certain terms, to the dense Jacobian's value."""
    exact, params = block(log_det="exact")
    series, _ = block(terms=2)
    num_samples = 1000

    def total(layer: ResidualBlock, params: Any, x: jax.Array, ctx: Context) -> jax.Array:
        return layer.forward(layer.prepare(params, ctx), x, ctx)[1].sum()

    value_and_grad = jax.value_and_grad(total, argnums=(1, 2))
    expected, grads = jax.jit(lambda: value_and_grad(exact, params, X, training()))()
    many = jax.jit(
        lambda: jax.lax.map(
            lambda key: value_and_grad(series, params, X, replace(training(), rng=key)),
            jax.random.split(jax.random.key(1), num_samples),
            batch_size=250,
        )
    )
    values, sampled = many()
    spread = np.std(values) / np.sqrt(num_samples)
    assert spread < 0.02 * abs(expected) + 0.02
    np.testing.assert_allclose(np.mean(values), expected, atol=4.0 * spread)
    truths = small.arrays(grads)
    for path, samples in small.arrays(sampled).items():
        mean, truth = samples.mean(0), truths[path]
        scale = np.linalg.norm(samples.std(0) / np.sqrt(num_samples))
        assert np.linalg.norm(mean - truth) < 2.0 * scale + 1e-6, path
        assert np.linalg.norm(truth) > 3.0 * scale or "bias" in path, f"{path}: too noisy to tell"


@pytest.mark.pairs
def test_evaluation_is_exact_where_dims_are_few_and_repeats_itself_elsewhere():
    layer, params = block()
    exact, _ = block(log_det="exact")
    evaluation = Context(batch={})
    large, _ = block(exact_dims=0)
    weights = jax.jit(lambda p: layer.prepare(p, evaluation))(params)

    def log_det(layer: ResidualBlock) -> Any:
        return jax.jit(lambda w: layer.forward(w, X, evaluation)[1])

    truth = log_det(exact)(weights)
    np.testing.assert_array_equal(log_det(layer)(weights), truth)
    estimate = log_det(large)
    first = estimate(weights)
    np.testing.assert_array_equal(first, estimate(weights))
    assert np.abs(first - truth).max() > 1e-4
    np.testing.assert_allclose(first, truth, atol=3.0)
