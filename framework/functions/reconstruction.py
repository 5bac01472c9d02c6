"""How well an inverse undoes its layers: what rounding loses on the way there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from framework.functions.closures import arrays_of, constants_of
from framework.functions.reversible import num_layers
from framework.layout import filled, flatten, floats


def reconstruction_error(
    forward: Callable[..., Any],
    inverse: Callable[..., Any],
    weights: Any,
    x: Any,
    xs: Any = None,
) -> dict[str, jax.Array]:
    """Runs all layers forward and back again, and compares what comes back with x.

    Layers in bfloat16 drift: what additive couplings subtract was rounded away when it was added. The usual remedy is
    streams in float32 with branches in bfloat16.

    Complexity: each layer once forward and once back; memory for x, y and one layer, whatever the number of layers.

    Args:
        forward, inverse, weights, x, xs: as `reversible_scan` has them.

    Returns:
        {path of a float array in x: max |x' - x| / max |x|}, float32 scalars; the numerator alone where x is all zeros.
        May be jitted. x itself has the path "".

    Raises:
        ValueError: as `reversible_scan`.
    """
    x = jax.tree.map(jnp.asarray, x)
    stacks = (weights,) if xs is None else (weights, xs)
    num_layers(stacks)
    constants = constants_of(stacks)

    def step(function: Callable[..., Any]) -> Callable[[Any, Any], tuple[Any, None]]:
        def body(x: Any, layer_arrays: Any) -> tuple[Any, None]:
            layer_weights, *layer_xs = filled(layer_arrays, constants)
            return function(layer_weights, x, *layer_xs), None

        return body

    y, _ = lax.scan(step(forward), x, arrays_of(stacks))
    # Without the barrier a compiler might see that a sum is taken back, and leave both out.
    y = lax.optimization_barrier(y)
    back, _ = lax.scan(step(inverse), y, arrays_of(stacks), reverse=True)
    errors = jax.tree.map(_relative_error, floats(back), floats(x))
    return flatten(errors)


def _relative_error(back: jax.Array, x: jax.Array) -> jax.Array:
    # Subtracted in a wider dtype, as the difference would be rounded as well.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    difference = jnp.max(jnp.abs(back.astype(wide) - x.astype(wide)))
    scale = jnp.max(jnp.abs(x.astype(wide)))
    return (difference / jnp.where(scale == 0.0, 1.0, scale)).astype(jnp.float32)
