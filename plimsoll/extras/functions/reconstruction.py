"""Rounding error of an inverse: how closely running layers forward and back reproduces the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from plimsoll.extras.functions.closures import select_arrays, select_constants
from plimsoll.extras.functions.reversible import num_layers
from plimsoll.framework.layout import fill_none, flatten, floats


def reconstruction_error(
    forward: Callable[..., Any], inverse: Callable[..., Any], weights: Any, x: Any, xs: Any = None
) -> dict[str, jax.Array]:
    """Run all layers forward and back again, and compare the result with x.

    Layers in bfloat16 drift, because additive couplings subtract values whose low bits were rounded away in the
    addition. The usual remedy is streams in float32 with branches in bfloat16.

    Complexity: each layer once forward and once back. Memory holds x, y and one layer, for any number of layers.

    Args:
        forward, inverse, weights, x, xs: see `reversible_scan`.

    Returns:
        {path of a float array in x: max |x' - x| / max |x|}, float32 scalars; only the numerator if x is all zeros. May
        be jitted. x itself has the path "".

    Raises:
        ValueError: see `reversible_scan`.
    """
    x = jax.tree.map(jnp.asarray, x)
    stacks = (weights,) if xs is None else (weights, xs)
    num_layers(stacks)
    constants = select_constants(stacks)

    def step(function: Callable[..., Any]) -> Callable[[Any, Any], tuple[Any, None]]:
        def body(x: Any, layer_arrays: Any) -> tuple[Any, None]:
            layer_weights, *layer_xs = fill_none(layer_arrays, constants)
            return function(layer_weights, x, *layer_xs), None

        return body

    y, _ = lax.scan(step(forward), x, select_arrays(stacks))
    # Without the barrier a compiler might see that a sum is subtracted again, and drop both operations.
    y = lax.optimization_barrier(y)
    back, _ = lax.scan(step(inverse), y, select_arrays(stacks), reverse=True)
    errors = jax.tree.map(_relative_error, floats(back), floats(x))
    return flatten(errors)


def _relative_error(back: jax.Array, x: jax.Array) -> jax.Array:
    # Subtracted in a wider dtype, because the difference would be rounded as well.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    difference = jnp.max(jnp.abs(back.astype(wide) - x.astype(wide)))
    scale = jnp.max(jnp.abs(x.astype(wide)))
    return (difference / jnp.where(scale == 0.0, 1.0, scale)).astype(jnp.float32)
