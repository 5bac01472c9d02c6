"""Combinations of an expert's gate and `up` projections other than act(gate) * up."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from plimsoll.framework.config import PositiveFloat, component


@component
class ClampedSwiGLU:
    """Computes (up + 1) * gate * sigmoid(alpha * gate), with gate and `up` clamped (gpt-oss, arXiv 2508.10925).

    Args:
        alpha: factor on the gate inside the sigmoid; 1.702 makes the product nearly GELU (arXiv 1606.08415).
        limit: the gate is clamped from above to this; `up` is clamped to [-limit, limit].
    """

    def __init__(self, *, alpha: PositiveFloat = 1.702, limit: PositiveFloat = 7.0):
        self.alpha = alpha
        self.limit = limit

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return [..., F], the shape of both inputs, in the gate's dtype."""
        # At the limit itself, the gradient passes in full, like that of torch's clamp; that of a minimum would be half.
        gate = jnp.where(gate > self.limit, self.limit, gate)
        up = jnp.where(jnp.abs(up) > self.limit, self.limit * jnp.sign(up), up)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)
