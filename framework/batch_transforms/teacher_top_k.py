"""The top-K next tokens of a model at each position, which a student is distilled from."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from plimsoll.framework.batch_transforms.forward import HeadFunction
from plimsoll.framework.data.batches import Shapes
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.chunked_loss import by_position
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layout import Nested

IDS = "teacher_ids"
LOG_PROBS = "teacher_log_probs"
TAIL = "teacher_tail"
# The log of a probability too small to change a float32 sum with 1. An empty bucket gets this value, because minus
# infinity would make the divergence NaN.
_LEAST_TAIL = -50.0


def teacher_shapes(rows: int, length: int, top_k: int) -> Shapes:
    """Return the shapes of the arrays that a teacher adds to a batch; see `framework.objectives.distillation`."""
    return {
        IDS: ((rows, length, top_k), "int32"),
        LOG_PROBS: ((rows, length, top_k), "float32"),
        TAIL: ((rows, length), "float32"),
    }


def make_top_k_function(top_k: int, vocab_size: int) -> HeadFunction:
    """Return a head function that computes the arrays of `teacher_shapes` in chunks of positions.

    The full logits are never materialized.

    Args:
        top_k: K, the number of tokens to keep per position.
        vocab_size: the distribution covers the ids below this; a teacher's table may be padded to more rows.
    """

    def function(head: LMHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        h_BSD = head.apply_norm(weights, x_BSD, ctx)
        batch, length, _ = h_BSD.shape
        chunks = head.chunks(batch, length, ctx)
        compute_values = partial(_compute_top_k, top_k=top_k, vocab_size=vocab_size)
        return by_position(compute_values, chunks, ctx, h_BSD, weights["table"], head.softcap)

    return function


def _compute_top_k(logits_BSV: jax.Array, *, top_k: int, vocab_size: int) -> dict[str, jax.Array]:
    logits_BSV = logits_BSV[..., :vocab_size]
    lse_BS1 = jax.nn.logsumexp(logits_BSV, axis=-1, keepdims=True)
    values_BSK, ids_BSK = jax.lax.top_k(logits_BSV, top_k)
    # Sum over the other tokens: 1 minus the sum of the top K would lose all precision where the result is small.
    others_BSV = jnp.put_along_axis(logits_BSV, ids_BSK, -jnp.inf, axis=-1, inplace=False)
    tail_BS = jax.nn.logsumexp(others_BSV, axis=-1) - lse_BS1[..., 0]
    return {
        IDS: ids_BSK,
        LOG_PROBS: (values_BSK - lse_BS1).astype(jnp.float32),
        TAIL: jnp.maximum(tail_BS, _LEAST_TAIL).astype(jnp.float32),
    }
