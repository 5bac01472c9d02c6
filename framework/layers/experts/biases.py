"""Biases of experts: each row gets the bias of its own expert.

N is the number of rows, E the number of local experts, O the number of outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def find_row_experts(sizes_E: jax.Array, num_rows: int) -> jax.Array:
    """Return the expert of each row, int32[N], with rows sorted by expert; E for rows after the last expert's."""
    ends_E = jnp.cumsum(sizes_E)
    rows_N1 = jnp.arange(num_rows)[:, None]
    return jnp.sum(ends_E <= rows_N1, axis=1, dtype=jnp.int32)


def add_biases(y_NO: jax.Array, bias_EO: jax.Array, experts_N: jax.Array) -> jax.Array:
    """Add the bias of each row's expert to y_NO, in y's dtype.

    Args:
        y_NO: rows; those after the last expert's may hold anything, and do not contribute to the gradient of the
            biases.
        bias_EO: biases in y's dtype.
        experts_N: the result of `find_row_experts`.
    """
    return _add(bias_EO.shape[0], y_NO, bias_EO, experts_N)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add(num_experts: int, y_NO: jax.Array, bias_EO: jax.Array, experts_N: jax.Array) -> jax.Array:
    return y_NO + jnp.take(bias_EO, experts_N, axis=0, mode="fill", fill_value=0)


def _forward(
    num_experts: int, y_NO: jax.Array, bias_EO: jax.Array, experts_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _add(num_experts, y_NO, bias_EO, experts_N), experts_N


def _backward(num_experts: int, experts_N: jax.Array, grad_NO: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    # A matrix product, summed in float32 or wider; JAX's own rule would scatter N rows into E in the rows' dtype.
    # Rows after the last expert's may hold NaN, and 0 times NaN is NaN, so they are replaced by zeros first.
    is_row_N1 = (experts_N < num_experts)[:, None]
    rows_grad_NO = jnp.where(is_row_N1, grad_NO, 0)
    one_hot_NE = jax.nn.one_hot(experts_N, num_experts, dtype=grad_NO.dtype)
    wide = jnp.promote_types(grad_NO.dtype, jnp.float32)
    bias_grad_EO = jnp.einsum("ne,no->eo", one_hot_NE, rows_grad_NO, preferred_element_type=wide)
    # float0 is JAX's dtype for cotangents of integers.
    return grad_NO, bias_grad_EO.astype(grad_NO.dtype), np.zeros(experts_N.shape, jax.dtypes.float0)


_add.defvjp(_forward, _backward)
