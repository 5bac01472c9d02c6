"""Clipping by tensor: what a schedule can do that never has all gradients at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def limit_update_rms(updates: Any, limit: float, learning_rate: jax.Array | float) -> Any:
    """Each tensor u times min(1, limit * learning_rate / RMS(u)): Adafactor's update clipping (Shazeer and Stern 2018,
    arXiv 1804.04235, section 6) for any optimizer, whose updates have the learning rate in them already."""

    def clipped(u: jax.Array) -> jax.Array:
        rms = jnp.sqrt(jnp.mean(jnp.square(u.astype(_wide(u)))))
        bound = limit * learning_rate
        return u * jnp.where(rms > bound, bound / jnp.where(rms > 0, rms, 1), 1).astype(u.dtype)

    return jax.tree.map(clipped, updates)


def limit_norm_growth(grads: Any, norms: Any, growth: float) -> tuple[Any, Any]:
    """Each tensor's norm is at most `growth` times what it was after the limiter in the step before (Fira, Chen et al.
    2024, arXiv 2410.01623, section 4.3; there and in APOLLO growth is 1.01).

    Args:
        grads: the gradients.
        norms: f32 scalars in the same structure, the norms of the last step; 0 before the first, which is not limited.
        growth: over 1.

    Returns:
        (gradients, their norms).
    """

    def factor(g: jax.Array, before: jax.Array) -> jax.Array:
        norm = _norm(g)
        bound = growth * before.astype(norm.dtype)
        return jnp.where((before > 0) & (norm > bound), bound / jnp.where(norm > 0, norm, 1), 1)

    factors = jax.tree.map(factor, grads, norms)
    limited = jax.tree.map(lambda g, f: g * f.astype(g.dtype), grads, factors)
    new = jax.tree.map(lambda g, f, before: (_norm(g) * f).astype(before.dtype), grads, factors, norms)
    return limited, new


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(_wide(x)))))
