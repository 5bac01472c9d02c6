"""How an expert joins what its gate and its `up` projection say of a token, where that is more than act(gate) * up."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from framework.config import PositiveFloat, component


@component
class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), of a gate and an `up` that are clamped (gpt-oss, arXiv 2508.10925).

    Args:
        alpha: multiplies the gate inside of the sigmoid; 1.702 makes the product nearly GELU (arXiv 1606.08415).
        limit: the gate is at most this; `up` is at most this, and at least minus this.
    """

    def __init__(self, *, alpha: PositiveFloat = 1.702, limit: PositiveFloat = 7.0):
        self.alpha = alpha
        self.limit = limit

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """[..., F] of the same shape, in the gate's dtype."""
        # At the limit itself the gradient is whole, as torch's clamp has it; that of a minimum would be half.
        gate = jnp.where(gate > self.limit, self.limit, gate)
        up = jnp.where(jnp.abs(up) > self.limit, self.limit * jnp.sign(up), up)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)
