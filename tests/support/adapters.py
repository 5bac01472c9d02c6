"""Compares functions with adapters to the same functions of merged parameters, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import plimsoll as pl

# For float64, relative to the largest element of the expected array.
TOLERANCE = 1e-12
Adapters = dict[str, pl.Adapter]


def random_adapters(params: Any, target: str, **options: Any) -> Adapters:
    """Return adapters of rank 3 in float64 with nonzero factors."""
    adapters = pl.lora_init(jax.random.key(2), params, target, rank=3, dtype="float64", **options)
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    return structure.unflatten(
        [leaf + 0.2 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    )


def dense(params: Any) -> Any:
    """Return the parameters with all 4-bit matrices dequantized to arrays."""

    def is_quantized(node: Any) -> bool:
        return isinstance(node, pl.QuantizedMatrix)

    return jax.tree.map(lambda node: node.dense() if is_quantized(node) else node, params, is_leaf=is_quantized)


def assert_equals_merged(
    function: Callable[..., jax.Array],
    params: Any,
    adapters: Adapters,
    *arguments: Any,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Assert that value and gradients with respect to A and B equal those of the function of merged parameters.

    Args:
        function: `function(params, *arguments)` returns a scalar.
        params: parameters of the function; 4-bit matrices are dequantized before they are merged.
        adapters: adapters for some of the matrices in `params`.
        arguments: further arguments of the function.
        tolerance: allowed error of each array, relative to its largest element.
        options: options of `with_lora`.
    """
    dense_params = dense(params)
    with_adapters = pl.with_lora(function, **options)

    @jax.jit
    def compute_merged(adapters: Adapters) -> Any:
        return jax.value_and_grad(lambda one: function(pl.lora_merge(dense_params, one), *arguments))(adapters)

    @jax.jit
    def in_factors(adapters: Adapters) -> Any:
        return jax.value_and_grad(lambda one: with_adapters(params, one, *arguments))(adapters)

    value, gradient = compute_merged(adapters)
    given_value, given_gradient = in_factors(adapters)
    assert_close(given_value, value, tolerance)
    for given, expected in zip(jax.tree.leaves(given_gradient), jax.tree.leaves(gradient), strict=True):
        assert jnp.any(expected), "a gradient of zeros would show nothing"
        assert_close(given, expected, tolerance)


def assert_close(given: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Assert that two float64 arrays differ by at most `tolerance` times the largest expected element."""
    assert given.dtype == expected.dtype == jnp.float64
    largest = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(given, expected, rtol=0, atol=tolerance * largest)
