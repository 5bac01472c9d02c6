"""Attention sinks: a softmax with one extra logit in its denominator, which has no value.

As in gpt-oss (arXiv 2508.10925, section 2.1): each head learns this logit; the weight that it takes attends to nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softmax_with_sinks(logits: jax.Array, sinks: jax.Array) -> jax.Array:
    """Compute exp(logits) / (exp(sinks) + sum(exp(logits))) over the last axis, in the dtype of the logits.

    Args:
        logits: [..., T], floating point; -inf for masked positions.
        sinks: [..., 1], finite; its axes broadcast with those of the logits.

    Returns:
        [..., T]: weights that add up to less than 1.
    """
    sinks = sinks.astype(logits.dtype)
    # The result does not depend on the subtracted maximum, so no gradient flows through it.
    largest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks)
    largest = jax.lax.stop_gradient(largest)
    powers = jnp.exp(logits - largest)
    total = jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sinks - largest)
    return powers / total
