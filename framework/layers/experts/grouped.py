"""Products of rows with their experts' weights: row n of expert e becomes x_n @ weight_e.

Implementations; "auto" chooses one by platform and dtype:
    megablox   kernels for TPU, see grouped_tpu.py
    triton     kernels for GPU, see grouped_gpu.py
    blocks     for CPU, and for dtypes that those kernels do not support: a loop over experts, and inside it one over
               blocks of rows. The last block of an expert extends into the rows of the next one, which are computed
               later and overwrite it.
    ragged     `jax.lax.ragged_dot`. XLA for CPU and GPU computes it as a product with every expert's weight and
               discards all but one; XLA for TPU computes the gradient of the weights in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layers.experts import grouped_gpu, grouped_tpu
from plimsoll.framework.layers.experts.expert_storage import dense_experts
from plimsoll.framework.layers.products import dense_cotangent

Implementation = Literal["auto", "megablox", "triton", "blocks", "ragged"]
Chosen = Literal["megablox", "triton", "blocks", "ragged"]
_ONLY_PLATFORM = {"megablox": "tpu", "triton": "gpu"}
# Prefix of the name of a scope around the products; framework/plan/grouped_products.py counts them by it.
EVEN_ROWS = "even_rows_"
# Rows per block, largest first: many rows make a fast product, few rows waste little at an expert's end.
BLOCKS = (256, 64, 16)


def check_platform(implementation: Implementation, platform: str) -> None:
    """Raise ValueError if the implementation is a kernel for another platform than this one (tpu, gpu or cpu)."""
    only_platform = _ONLY_PLATFORM.get(implementation, platform)
    if only_platform != platform:
        raise ValueError(
            f"experts.implementation = {implementation!r} is for {only_platform}, not {platform}; try auto"
        )


def choose_implementation(implementation: Implementation, platform: str, dtype: Any) -> Chosen:
    """Return the implementation for a platform (tpu, gpu or cpu) and a dtype; an explicit choice is returned unchanged.

    Raises:
        ValueError: it is a kernel for another platform.
    """
    check_platform(implementation, platform)
    if implementation != "auto":
        return implementation
    if platform == "tpu" and dtype in grouped_tpu.DTYPES:
        return "megablox"
    if platform == "gpu" and dtype in grouped_gpu.DTYPES:
        return "triton"
    return "blocks"


def with_spare_rows(num_rows: int, implementation: Chosen) -> int:
    """Return the number of rows to allocate for `num_rows` used ones, including spare rows after the last expert's."""
    if implementation == "megablox":
        tile = grouped_tpu.TILE_ROWS
        return (num_rows + tile - 1) // tile * tile
    if implementation == "triton":
        return num_rows + grouped_gpu.TILE_ROWS
    if implementation == "blocks":
        # Large blocks are always full.
        return num_rows + BLOCKS[-1]
    return num_rows


def grouped_dot(
    x_NI: jax.Array, weight_EIO: jax.Array, sizes_E: jax.Array, implementation: Chosen, even_rows: int | None = None
) -> jax.Array:
    """Multiply each row by the weight of its expert: [N, O] in x's dtype.

    Args:
        x_NI: rows sorted by expert: all of expert 0, then all of expert 1, and so on, then spare ones
            (`with_spare_rows`).
        weight_EIO: weights in x's dtype.
        sizes_E: int32, the number of rows of each expert; may be 0.
        implementation: how the products are computed. Rows of the result after the last expert's are undefined, and
            do not contribute to gradients.
        even_rows: number of rows that an even router would fill, for counting a program's work; None means all.
    """
    if implementation == "ragged":
        return jax.lax.ragged_dot(x_NI, weight_EIO, sizes_E)
    # Kernels skip rows without a token; array shapes do not show this, so the scope records the number of rows.
    options = _ProductOptions(implementation, f"{EVEN_ROWS}{even_rows or x_NI.shape[0]}")
    return _multiply_groups(x_NI, weight_EIO, sizes_E, options)


def multiply_stored(
    x: jax.Array,
    weights: Any,
    dense: Callable[[Any], jax.Array],
    transpose: bool,
    sizes: jax.Array,
    *,
    implementation: Chosen,
    even_rows: int,
) -> jax.Array:
    """Compute `grouped_dot` with stored weights, see `framework.layers.experts.expert_storage.Multiply`.

    "blocks" has one expert's dense weights at a time; the others have the matrix of all local experts.
    """
    with jax.named_scope(f"{EVEN_ROWS}{even_rows}"):
        if implementation == "blocks":
            return _rows_times_weights(x, weights, sizes, transpose, dense)
        weight_EIO = dense_experts(dense, weights)
        if implementation == "ragged":
            return jax.lax.ragged_dot(x, weight_EIO.mT if transpose else weight_EIO, sizes)
        return _PRODUCTS[implementation].rows_times_weights(x, weight_EIO, sizes, transpose=transpose)


class _ProductOptions(NamedTuple):
    """The implementation of products, and the name of the scope that records the amount of work."""

    implementation: Chosen
    scope: str


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply_groups(x_NI: jax.Array, weight_EIO: jax.Array, sizes_E: jax.Array, options: _ProductOptions) -> jax.Array:
    with jax.named_scope(options.scope):
        return _PRODUCTS[options.implementation].rows_times_weights(x_NI, weight_EIO, sizes_E)


def _multiply_groups_forward(x: Any, weight: Any, sizes: Any, options: _ProductOptions) -> Any:
    """Return the product, and the residuals of the gradients: frozen weights need no rows."""
    # With symbolic_zeros, each argument has a flag that tells whether it is differentiated.
    weight_residual = weight.value if x.perturbed else None
    x_residual = x.value if weight.perturbed else None
    y_NO = _multiply_groups(x.value, weight.value, sizes.value, options)
    return y_NO, (x_residual, weight_residual, sizes.value)


def _multiply_groups_backward(options: _ProductOptions, residuals: Any, grad_NO: Any) -> tuple[Any, Any, Any]:
    x_NI, weight_EIO, sizes_E = residuals
    products = _PRODUCTS[options.implementation]
    grad_NO = dense_cotangent(grad_NO)
    x_grad = None
    weight_grad = None
    with jax.named_scope(options.scope):
        if weight_EIO is not None:
            x_grad = products.rows_times_weights(grad_NO, weight_EIO, sizes_E, transpose=True)
        if x_NI is not None:
            weight_grad = products.weight_gradients(x_NI, grad_NO, sizes_E)
    return x_grad, weight_grad, np.zeros(sizes_E.shape, jax.dtypes.float0)


_multiply_groups.defvjp(_multiply_groups_forward, _multiply_groups_backward, symbolic_zeros=True)


def _over_blocks(
    body: Callable[[jax.Array, int, Any], Any], start: jax.Array, end: jax.Array, num_rows: int, carry: Any
) -> Any:
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
        one_block = partial(_one_block, body, start, block)
        carry = jax.lax.fori_loop(0, count, one_block, carry)
        start = start + count * block
    return carry


def _one_block(
    body: Callable[[jax.Array, int, Any], Any], start: jax.Array, block: int, number: jax.Array, carry: Any
) -> Any:
    return body(start + number * block, block, carry)


def _rows_times_weights(
    x_NI: jax.Array,
    weights: Any,
    sizes_E: jax.Array,
    transpose: bool = False,
    dense: Callable[[Any], jax.Array] = lambda weight_IO: weight_IO,
) -> jax.Array:
    """Multiply rows by their experts' weights: [N, O]; with `transpose`, x_NI is [N, O] and the result [N, I].

    Args:
        weights: [E, I, O]; or a tree of arrays with a leading expert axis, from which `dense` computes one expert's
            [I, O].
    """
    ends_E = jnp.cumsum(sizes_E)
    contracted = 1 if transpose else 0
    num_outputs = jax.eval_shape(jax.vmap(dense), weights).shape[1 if transpose else 2]

    def expert(y: jax.Array, xs: tuple[Any, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
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


def _weight_gradients(x_NI: jax.Array, grad_NO: jax.Array, sizes_E: jax.Array) -> jax.Array:
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


class _Products(NamedTuple):
    """An implementation: the products (with `transpose`, the rows' gradients) and the gradients of the weights."""

    rows_times_weights: Callable[..., jax.Array]
    weight_gradients: Callable[..., jax.Array]


_PRODUCTS = {
    "megablox": _Products(grouped_tpu.rows_times_weights, grouped_tpu.weight_gradients),
    "triton": _Products(grouped_gpu.rows_times_weights, grouped_gpu.weight_gradients),
    "blocks": _Products(_rows_times_weights, _weight_gradients),
}
