"""Attention sinks: a softmax with one more logit in its denominator, which has no value.

As in gpt-oss (arXiv 2508.10925, section 2.1): each head learns the logit, and what falls to it is attention to nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softmax_with_sinks(logits: jax.Array, sinks: jax.Array) -> jax.Array:
    """exp(logits) / (exp(sinks) + sum(exp(logits))) over the last axis, in the dtype of the logits.

    Args:
        logits: [..., T], floating; -inf is a logit that is masked.
        sinks: [..., 1], finite; its axes broadcast with those of the logits.

    Returns:
        [..., T]: weights that add up to less than 1.
    """
    sinks = sinks.astype(logits.dtype)
    # The result does not depend on what is subtracted, so no gradient flows through it.
    largest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks)
    largest = jax.lax.stop_gradient(largest)
    powers = jnp.exp(logits - largest)
    total = jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sinks - largest)
    return powers / total
