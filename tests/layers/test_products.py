"""Matmuls on one CPU: values and gradients equal plain ones, and a weight that does not train saves no residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.linear import project

CTX = Context(batch={})


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (5, 3)])
@pytest.mark.parametrize("axes", [(4,), (2, 4), (2, 2, 2)])
def test_gradients_match_float64(inputs: int, outputs: int, axes: tuple[int, ...]):
    rng = np.random.default_rng(0)
    x, weight, grad = (rng.normal(size=shape) for shape in ((*axes, inputs), (inputs, outputs), (*axes, outputs)))
    y, pull = jax.vjp(lambda x, w: project(x, w, CTX), jnp.float32(x), jnp.float32(weight))
    x_grad, weight_grad = pull(jnp.float32(grad))
    np.testing.assert_allclose(y, x @ weight, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x_grad, grad @ weight.T, rtol=1e-5, atol=1e-5)
    expected = x.reshape(-1, inputs).T @ grad.reshape(-1, outputs)
    np.testing.assert_allclose(weight_grad, expected, rtol=1e-5, atol=1e-5)


def test_weight_gradient_needs_no_transpose():
    x, weight = jnp.ones((2, 8, 16)), jnp.ones((16, 32))
    text = jax.jit(jax.grad(lambda w: project(x, w, CTX).sum())).lower(weight).as_text()
    assert "transpose" not in text
    assert "transpose" in jax.jit(jax.grad(lambda w: (x @ w).sum())).lower(weight).as_text()


@pytest.mark.parametrize(("argnums", "kept"), [(0, (5, 3)), (1, (2, 4, 5))])
def test_frozen_arguments_save_no_residuals(argnums: int, kept: tuple[int, ...]):
    arguments = [jnp.ones((2, 4, 5)), jnp.ones((5, 3))]

    def one(varied: jax.Array) -> jax.Array:
        given = [varied if i == argnums else x for i, x in enumerate(arguments)]
        return project(given[0], given[1], CTX)

    _, pull = jax.vjp(one, arguments[argnums])
    assert [leaf.shape for leaf in jax.tree.leaves(pull)] == [kept]


def test_other_weight_dtypes_are_promoted():
    x, weight = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.float32)
    assert project(x, weight, CTX).dtype == (x @ weight).dtype == jnp.float32
