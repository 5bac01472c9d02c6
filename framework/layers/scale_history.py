"""Delayed scaling: the scale of an array is the largest one that it needed in the last steps.

Such a scale is known before the array is computed, so that rounding needs no pass over the array to find its largest
number (NVIDIA Transformer Engine, `DelayedScaling` with amax_compute_algo="max"; its scales are powers of two here).
Numbers that have become larger than the scale allows are clipped, for one step.

A layer's history is a parameter, float32 [2, LENGTH]: log2 of the scales of the layer's input and of its output's
cotangent, the newest first. So every schedule places, updates and saves it with the layer's other parameters. In place
of a gradient, the backward pass returns the scales of the step, and in place of an optimizer, `record_scales` puts them
into the history. With gradient accumulation, or several uses of a layer, scales add up to a bound of the largest one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from plimsoll.framework.layout import ParameterSpec

# The name of the parameter, and the label of its optimizer.
HISTORY = "scale_history"
LENGTH = 16
# What is in the history before the first step, and for arrays of zeros: less than any exponent of a scale.
_NOTHING = -127.0


def history_spec() -> ParameterSpec:
    """Return the spec of a layer's history."""
    return ParameterSpec(
        (2, LENGTH),
        "float32",
        (None, None),
        initializer=jax.nn.initializers.constant(_NOTHING),
        roles=("array", "step"),
        keeps_dtype=True,
        is_history=True,
    )


def read_scales(history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the scales of input and cotangent, float32 scalars; 1 if nothing is recorded, as in Transformer Engine."""
    exponent = jnp.max(history, axis=-1)
    exponent = jnp.where(exponent == _NOTHING, 0.0, exponent)
    scales = jnp.ldexp(jnp.float32(1), exponent.astype(jnp.int32))
    return scales[0], scales[1]


def pack_scales(input_scale: jax.Array, cotangent_scale: jax.Array) -> jax.Array:
    """Return what the backward pass returns for a history [2, LENGTH]: the scales that a step needs."""
    scales = jnp.stack([input_scale, cotangent_scale])
    return jnp.pad(scales[:, None], ((0, 0), (0, LENGTH - 1)))


def record_scales() -> optax.GradientTransformation:
    """Return the optimizer of histories, whose gradients are results of `pack_scales`, or sums of these."""

    def append(scales: jax.Array, history: jax.Array) -> jax.Array:
        mantissa, exponent = jnp.frexp(jnp.max(scales, axis=-1, keepdims=True))
        # A power of two has a mantissa of 0.5; a sum of powers is rounded up.
        exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent).astype(history.dtype)
        exponent = jnp.where(mantissa == 0, _NOTHING, exponent)
        appended = jnp.concatenate([exponent, history[..., :-1]], axis=-1)
        # The sum with the history is exact, because both are integers.
        return appended - history

    return optax.stateless(lambda scales, histories: jax.tree.map(append, scales, histories))
