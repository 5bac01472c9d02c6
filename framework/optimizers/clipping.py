"""Per-tensor clipping, for schedules that never have all gradients at the same time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import PyTree


def limit_update_rms(updates: PyTree, limit: float, learning_rate: jax.Array | float) -> PyTree:
    """Multiply each tensor u by min(1, limit * learning_rate / RMS(u)).

    This is Adafactor's update clipping (Shazeer and Stern 2018, arXiv 1804.04235, section 6) for any optimizer whose
    updates already include the learning rate.

    Args:
        updates: tensors of any shapes.
        limit: the largest RMS of an update, relative to the learning rate.
        learning_rate: learning rate of this step.
    """

    leaves, structure = jax.tree.flatten(updates)
    clipped = []
    for u in leaves:
        squares = jnp.square(u.astype(jnp.promote_types(u.dtype, jnp.float32)))
        rms = jnp.sqrt(jnp.mean(squares))
        bound = limit * learning_rate
        # The inner `where` avoids x / 0 in the branch that is not taken, which jax_debug_nans would report.
        factor = jnp.where(rms > bound, bound / jnp.where(rms > 0, rms, 1), 1)
        clipped.append(u * factor.astype(u.dtype))
    return structure.unflatten(clipped)


def limit_norm_growth(grads: PyTree, norms: PyTree, growth: float) -> tuple[PyTree, PyTree]:
    """Limit each tensor's norm to `growth` times its limited norm from the previous step.

    The limiter is that of Fira (Chen et al. 2024, arXiv 2410.01623, section 4.3). Fira and APOLLO use growth 1.01.

    Args:
        grads: the gradients.
        norms: float32 scalars in the same structure, the norms of the last step; 0 before the first step, which is not
            limited.
        growth: the largest allowed ratio, greater than 1.

    Returns:
        (limited gradients, their norms).
    """

    def factor(g: jax.Array, old_norm: jax.Array) -> jax.Array:
        norm = _norm(g)
        bound = growth * old_norm.astype(norm.dtype)
        # Before the first step the old norm is zero, so nothing is limited.
        is_over = (old_norm > 0) & (norm > bound)
        return jnp.where(is_over, bound / jnp.where(norm > 0, norm, 1), 1)

    factors = jax.tree.map(factor, grads, norms)
    limited = jax.tree.map(lambda g, grad_factor: g * grad_factor.astype(g.dtype), grads, factors)
    # Computed from the precise norm and factor, because the limited gradient may be rounded to bfloat16.
    new_norms = jax.tree.map(
        lambda g, grad_factor, old_norm: (_norm(g) * grad_factor).astype(old_norm.dtype), grads, factors, norms
    )
    return limited, new_norms


def _norm(x: jax.Array) -> jax.Array:
    """Return the norm of a tensor in its own dtype, or in float32 if that is wider."""
    # Sums of squares in bfloat16, which has eight bits, may stop growing after a few hundred elements.
    squares = jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return jnp.sqrt(jnp.sum(squares))
