"""Functions with adapters beside the same functions of merged parameters, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import framework as pl

# Of float64, by the largest element of what is compared.
TOLERANCE = 1e-12
Adapters = dict[str, pl.Adapter]


def random_adapters(params: Any, target: str, **options: Any) -> Adapters:
    """Adapters of rank 3 in float64, none of whose factors is zero."""
    adapters = pl.lora_init(jax.random.key(2), params, target, rank=3, dtype="float64", **options)
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    return structure.unflatten(
        [leaf + 0.2 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    )


def dense(params: Any) -> Any:
    """The parameters with arrays in the place of matrices in 4 bits."""

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
    """Value and gradients with respect to A and B are those of the function of merged parameters.

    Args:
        function: `function(params, *arguments)` returns a scalar.
        params: may have matrices in 4 bits, which are dequantized before they are merged.
        adapters: of some of its matrices.
        arguments: further ones of the function.
        tolerance: of each array, by its largest element.
        options: of `with_lora`.
    """
    dense_params = dense(params)
    with_adapters = pl.with_lora(function, **options)

    @jax.jit
    def merged(adapters: Adapters) -> Any:
        return jax.value_and_grad(lambda one: function(pl.lora_merge(dense_params, one), *arguments))(adapters)

    @jax.jit
    def in_factors(adapters: Adapters) -> Any:
        return jax.value_and_grad(lambda one: with_adapters(params, one, *arguments))(adapters)

    value, gradient = merged(adapters)
    given_value, given_gradient = in_factors(adapters)
    assert_close(given_value, value, tolerance)
    for given, expected in zip(jax.tree.leaves(given_gradient), jax.tree.leaves(gradient), strict=True):
        assert jnp.any(expected), "a gradient of zeros would show nothing"
        assert_close(given, expected, tolerance)


def assert_close(given: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Two float64 arrays differ by a part of the largest element at most."""
    assert given.dtype == expected.dtype == jnp.float64
    largest = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(given, expected, rtol=0, atol=tolerance * largest)
