"""Sorting rows of tokens by expert, and back: two gathers, each the gradient of the other.

T is the number of tokens, K the number of experts per token, E the number of local experts, N the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """The row of each choice of a token: all rows of expert 0, then all of expert 1, and so on.

    Attributes:
        sizes_E: int32, the number of rows of each expert.
        rows_TK: int32, the row of each choice; N if its expert is not local.
        choices_N: int32, the choice t * K + k of each row; T * K for rows after the last expert's.
    """

    sizes_E: jax.Array
    rows_TK: jax.Array
    choices_N: jax.Array


def group(experts_TK: jax.Array, num_experts: int, num_rows: int) -> Groups:
    """Sort the choices by expert; those of one expert stay in the order of tokens.

    Args:
        experts_TK: int32; values outside of 0 to E - 1 are not local, and get no row.
        num_experts: E.
        num_rows: N, at least T * K (or T * E, if that is less: a token chooses an expert at most once).
    """
    num_choices = experts_TK.size
    experts = experts_TK.reshape(-1)
    is_here = (experts >= 0) & (experts < num_experts)
    # Choices of experts that are not local come last.
    keys = jnp.where(is_here, experts, num_experts)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    sizes_E = jnp.sum(jax.nn.one_hot(keys, num_experts, dtype=jnp.int32), axis=0)
    num_here = jnp.sum(sizes_E)
    positions = jnp.zeros(num_choices, jnp.int32).at[order].set(jnp.arange(num_choices, dtype=jnp.int32))
    rows_TK = jnp.where(is_here, positions, num_rows).reshape(experts_TK.shape)
    # There may be more rows than choices, or fewer.
    filled = jnp.full(max(num_rows, num_choices), num_choices, jnp.int32).at[:num_choices].set(order)[:num_rows]
    choices_N = jnp.where(jnp.arange(num_rows) < num_here, filled, num_choices)
    return Groups(sizes_E, rows_TK, choices_N)


def dispatch(x_TD: jax.Array, groups: Groups) -> jax.Array:
    """Return the token of each row, [N, D]; zeros in rows after the last expert's."""
    return _dispatch(x_TD, groups)


def collect(y_ND: jax.Array, groups: Groups) -> jax.Array:
    """Return the row of each choice, [T, K, D]; zeros if its expert is not local."""
    return _collect(y_ND, groups)


def _rows_or_zeros(x_MD: jax.Array, indices: jax.Array) -> jax.Array:
    """Return x_MD[indices], with zeros for the index M."""
    return jnp.take(x_MD, indices, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _dispatch(x_TD: jax.Array, groups: Groups) -> jax.Array:
    top_k = groups.rows_TK.shape[1]
    # The choice T * K, which marks no token, maps to the token index T.
    return _rows_or_zeros(x_TD, groups.choices_N // top_k)


def _dispatch_forward(x_TD: jax.Array, groups: Groups) -> tuple[jax.Array, Groups]:
    return _dispatch(x_TD, groups), groups


def _dispatch_backward(groups: Groups, grad_ND: jax.Array) -> tuple[jax.Array, Any]:
    # A sum over K rows; JAX's own rule would scatter N rows into T in the rows' dtype.
    grad_TKD = _rows_or_zeros(grad_ND, groups.rows_TK)
    wide = jnp.promote_types(grad_ND.dtype, jnp.float32)
    grad_TD = jnp.sum(grad_TKD.astype(wide), axis=1)
    return grad_TD.astype(grad_ND.dtype), _no_gradient(groups)


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _collect(y_ND: jax.Array, groups: Groups) -> jax.Array:
    return _rows_or_zeros(y_ND, groups.rows_TK)


def _collect_forward(y_ND: jax.Array, groups: Groups) -> tuple[jax.Array, Groups]:
    return _collect(y_ND, groups), groups


def _collect_backward(groups: Groups, grad_TKD: jax.Array) -> tuple[jax.Array, Any]:
    grad_choices = grad_TKD.reshape(-1, grad_TKD.shape[-1])
    # Each choice has one row, so nothing is summed.
    return _rows_or_zeros(grad_choices, groups.choices_N), _no_gradient(groups)


_collect.defvjp(_collect_forward, _collect_backward)


def _no_gradient(groups: Groups) -> Any:
    # float0 is JAX's dtype for cotangents of integers.
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), groups)
