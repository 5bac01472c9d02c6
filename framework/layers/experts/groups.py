"""Rows of tokens, sorted by expert: dispatch of tokens to rows, addition of each expert's bias, and the way back.

T is the number of tokens, K the number of experts per token, E the number of local experts, N the number of rows, O the
number of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layers.custom_gradients import zero_cotangent


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
    padded = jnp.pad(order, (0, max(0, num_rows - num_choices)), constant_values=num_choices)[:num_rows]
    choices_N = jnp.where(jnp.arange(num_rows) < num_here, padded, num_choices)
    return Groups(sizes_E, rows_TK, choices_N)


def rows_or_zeros(x_MD: jax.Array, indices: jax.Array) -> jax.Array:
    """Return x_MD[indices], with zeros for the index M."""
    return jnp.take(x_MD, indices, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x_TD: jax.Array, groups: Groups) -> jax.Array:
    """Return the token of each row, [N, D]; zeros in rows after the last expert's."""
    top_k = groups.rows_TK.shape[1]
    # The choice T * K, which marks no token, maps to the token index T.
    return rows_or_zeros(x_TD, groups.choices_N // top_k)


@jax.custom_vjp
def sum_choices(y_ND: jax.Array, groups: Groups) -> jax.Array:
    """Return the sum of each token's rows, [T, D] in y's dtype, summed in float32 or wider."""
    y_TKD = rows_or_zeros(y_ND, groups.rows_TK)
    wide = jnp.promote_types(y_ND.dtype, jnp.float32)
    return jnp.sum(y_TKD.astype(wide), axis=1).astype(y_ND.dtype)


# Each is the transpose of the other. JAX's own rules would scatter rows, and sum them in their dtype.
dispatch.defvjp(
    lambda x_TD, groups: (dispatch(x_TD, groups), groups),
    lambda groups, grad_ND: (sum_choices(grad_ND, groups), jax.tree.map(zero_cotangent, groups)),
)
sum_choices.defvjp(
    lambda y_ND, groups: (sum_choices(y_ND, groups), groups),
    lambda groups, grad_TD: (dispatch(grad_TD, groups), jax.tree.map(zero_cotangent, groups)),
)


@jax.custom_vjp
def dispatch_choices(values_TK: jax.Array, groups: Groups) -> jax.Array:
    """Return the value of each row's choice, [N, 1]; zeros in rows after the last expert's."""
    return rows_or_zeros(values_TK.reshape(-1, 1), groups.choices_N)


def _dispatch_choices_backward(groups: Groups, grad_N1: jax.Array) -> tuple[jax.Array, Groups]:
    # Each choice has one row, so nothing is summed.
    return rows_or_zeros(grad_N1, groups.rows_TK)[..., 0], jax.tree.map(zero_cotangent, groups)


dispatch_choices.defvjp(
    lambda values_TK, groups: (dispatch_choices(values_TK, groups), groups), _dispatch_choices_backward
)


@jax.custom_vjp
def collect(y_ND: jax.Array, groups: Groups) -> jax.Array:
    """Return the row of each choice, [T, K, D]; zeros if its expert is not local."""
    return rows_or_zeros(y_ND, groups.rows_TK)


def _collect_backward(groups: Groups, grad_TKD: jax.Array) -> tuple[jax.Array, Groups]:
    grad_choices = grad_TKD.reshape(-1, grad_TKD.shape[-1])
    # Each choice has one row, so nothing is summed.
    return rows_or_zeros(grad_choices, groups.choices_N), jax.tree.map(zero_cotangent, groups)


collect.defvjp(lambda y_ND, groups: (collect(y_ND, groups), groups), _collect_backward)


def find_row_experts(sizes_E: jax.Array, num_rows: int) -> jax.Array:
    """Return the expert of each row, int32[N], with rows sorted by expert; E for rows after the last expert's."""
    ends_E = jnp.cumsum(sizes_E)
    rows_N1 = jnp.arange(num_rows)[:, None]
    return jnp.sum(ends_E <= rows_N1, axis=1, dtype=jnp.int32)


@jax.custom_vjp
def add_biases(y_NO: jax.Array, bias_EO: jax.Array, experts_N: jax.Array) -> jax.Array:
    """Add the bias of each row's expert to y_NO, in y's dtype.

    Args:
        y_NO: rows; those after the last expert's may hold anything, and do not contribute to the gradient of the
            biases.
        bias_EO: biases in y's dtype.
        experts_N: the result of `find_row_experts`.
    """
    return y_NO + jnp.take(bias_EO, experts_N, axis=0, mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _BiasResiduals:
    """The expert of each row, and E."""

    experts_N: jax.Array
    num_experts: int = field(metadata={"static": True})


def _add_biases_backward(saved: _BiasResiduals, grad_NO: jax.Array) -> tuple[jax.Array | np.ndarray, ...]:
    # A matrix product, summed in float32 or wider; JAX's own rule would scatter N rows into E in the rows' dtype.
    # Rows after the last expert's may hold NaN, and 0 times NaN is NaN, so they are replaced by zeros first.
    is_row_N1 = (saved.experts_N < saved.num_experts)[:, None]
    rows_grad_NO = jnp.where(is_row_N1, grad_NO, 0)
    one_hot_NE = jax.nn.one_hot(saved.experts_N, saved.num_experts, dtype=grad_NO.dtype)
    wide = jnp.promote_types(grad_NO.dtype, jnp.float32)
    bias_grad_EO = jnp.einsum("ne,no->eo", one_hot_NE, rows_grad_NO, preferred_element_type=wide)
    return grad_NO, bias_grad_EO.astype(grad_NO.dtype), zero_cotangent(saved.experts_N)


add_biases.defvjp(
    lambda y_NO, bias_EO, experts_N: (
        add_biases(y_NO, bias_EO, experts_N),
        _BiasResiduals(experts_N, bias_EO.shape[0]),
    ),
    _add_biases_backward,
)
