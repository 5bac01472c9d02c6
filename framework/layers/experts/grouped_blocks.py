"""Grouped products in plain XLA operations: a loop over experts, and inside it one over blocks of rows.

The last block of an expert extends into the rows of the next one, which are computed later and overwrite it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from plimsoll.framework.layout import Nested

# Rows per block, largest first: many rows make a fast product, few rows waste little at an expert's end.
BLOCKS = (256, 64, 16)
T = TypeVar("T")


def rows_times_weights(
    x_NI: jax.Array,
    weights: jax.Array | Nested,
    sizes_E: jax.Array,
    transpose: bool = False,
    dense: Callable[..., jax.Array] = lambda weight_IO: weight_IO,
) -> jax.Array:
    """Multiply rows by their experts' weights: [N, O]; with `transpose`, x_NI is [N, O] and the result [N, I].

    Args:
        weights: [E, I, O]; or a tree of arrays with a leading expert axis, from which `dense` computes one expert's
            [I, O].
    """
    ends_E = jnp.cumsum(sizes_E)
    contracted = 1 if transpose else 0
    num_outputs = jax.eval_shape(jax.vmap(dense), weights).shape[1 if transpose else 2]

    def expert(y: jax.Array, xs: tuple[jax.Array | Nested, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        stored, size, end = xs
        weight_IO = dense(stored)

        def product(row: jax.Array, block: int, y: jax.Array) -> jax.Array:
            x_block = jax.lax.dynamic_slice_in_dim(x_NI, row, block)
            y_block = jax.lax.dot_general(x_block, weight_IO, (((1,), (contracted,)), ((), ())))
            return jax.lax.dynamic_update_slice_in_dim(y, y_block, row, axis=0)

        return _over_blocks(product, end - size, end, x_NI.shape[0], y), None

    zeros = jnp.zeros((x_NI.shape[0], num_outputs), x_NI.dtype)
    y, _ = jax.lax.scan(expert, zeros, (weights, sizes_E, ends_E))
    return y


def weight_gradients(x_NI: jax.Array, grad_NO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Return [E, I, O], the sum over each expert's rows of x^T grad.

    The result has the rows' dtype; the sum is in float32 or wider.
    """
    ends_E = jnp.cumsum(sizes_E)
    wide = jnp.promote_types(x_NI.dtype, jnp.float32)

    def expert(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        size, end = xs

        def product(row: jax.Array, block: int, total_IO: jax.Array) -> jax.Array:
            x_block = jax.lax.dynamic_slice_in_dim(x_NI, row, block)
            grad_block = jax.lax.dynamic_slice_in_dim(grad_NO, row, block)
            if block == BLOCKS[-1]:
                # The block may contain rows of the next expert, which must not contribute.
                is_in_expert = row + jnp.arange(block) < end
                grad_block = jnp.where(is_in_expert[:, None], grad_block, 0)
            block_grad = jax.lax.dot_general(x_block, grad_block, (((0,), (0,)), ((), ())), preferred_element_type=wide)
            return total_IO + block_grad

        zeros = jnp.zeros((x_NI.shape[1], grad_NO.shape[1]), wide)
        total_IO = _over_blocks(product, end - size, end, x_NI.shape[0], zeros)
        return None, total_IO.astype(x_NI.dtype)

    _, weight_grads = jax.lax.scan(expert, None, (sizes_E, ends_E))
    return weight_grads


def _over_blocks(
    body: Callable[[jax.Array, int, T], T], start: jax.Array, end: jax.Array, num_rows: int, carry: T
) -> T:
    """Call carry = body(first row, number of rows, carry) for the blocks that cover the rows from start to end.

    `num_rows` is the total number of rows.
    """
    smallest = BLOCKS[-1]
    for block in BLOCKS:
        # No expert can have that many rows.
        if block > num_rows:
            continue
        rows_left = end - start
        # Only the last one of the smallest blocks may be partly empty.
        count = rows_left // block if block != smallest else (rows_left + block - 1) // block
        carry = jax.lax.fori_loop(
            0, count, lambda number, carry, start=start, block=block: body(start + number * block, block, carry), carry
        )
        start = start + count * block
    return carry
