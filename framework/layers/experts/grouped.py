"""Products of rows with their experts' weights: row n of expert e becomes x_n @ weight_e.

Implementations, of which "auto" chooses by the platform:
    megablox   kernels for TPU, see grouped_tpu.py
    triton     kernels for GPU, see grouped_gpu.py
    blocks     for CPU, and for dtypes that those kernels do not take: a loop over experts, and inside it one over
               blocks of rows. The last block of an expert reaches into the rows of the next one, which come later and
               overwrite it.
    ragged     `jax.lax.ragged_dot`. XLA for CPU and GPU computes it as a product with every expert's weight, of which
               all but one are thrown away, and XLA for TPU so computes the gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from framework.layers.experts import grouped_gpu, grouped_tpu
from framework.layers.experts.stored import dense_experts
from framework.layers.products import dense_cotangent

Implementation = Literal["auto", "megablox", "triton", "blocks", "ragged"]
Chosen = Literal["megablox", "triton", "blocks", "ragged"]
_ONLY_PLATFORM = {"megablox": "tpu", "triton": "gpu"}
# The beginning of the name of a scope around the products, by which framework/plan/grouped_work.py counts them.
EVEN_ROWS = "even_rows_"
# Rows of a block, the large ones first: many rows make a fast product, few rows waste little at an expert's end.
BLOCKS = (256, 64, 16)


def check_platform(implementation: Implementation, platform: str) -> None:
    """Raises ValueError: the implementation is a kernel for another platform than this one (tpu, gpu or cpu)."""
    only_platform = _ONLY_PLATFORM.get(implementation, platform)
    if only_platform != platform:
        raise ValueError(
            f"experts.implementation = {implementation!r} is for {only_platform}, not {platform}; try auto"
        )


def choose_implementation(implementation: Implementation, platform: str, dtype: Any) -> Chosen:
    """The implementation for a platform (tpu, gpu or cpu) and a dtype; one that is asked for by name is that one.

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
    """How many rows there have to be for so many that are used: with spare ones behind those of the last expert."""
    if implementation == "megablox":
        tile = grouped_tpu.TILE_ROWS
        return (num_rows + tile - 1) // tile * tile
    if implementation == "triton":
        return num_rows + grouped_gpu.TILE_ROWS
    if implementation == "blocks":
        # Large blocks are full always.
        return num_rows + BLOCKS[-1]
    return num_rows


def grouped_dot(
    x_NI: jax.Array,
    weight_EIO: jax.Array,
    sizes_E: jax.Array,
    implementation: Chosen,
    even_rows: int | None = None,
) -> jax.Array:
    """Multiplies each row by the weight of its expert: [N, O] in x's dtype.

    Args:
        x_NI: rows, all of expert 0 first, then all of expert 1, and so on, then spare ones (`with_spare_rows`).
        weight_EIO: of x's dtype.
        sizes_E: int32, the number of each expert's rows; 0 is one.
        implementation: how. Rows behind the last expert's are undefined in the result, and have no part in gradients.
        even_rows: how many rows an even router would fill, for those who count a program's work; None means all.
    """
    if implementation == "ragged":
        return jax.lax.ragged_dot(x_NI, weight_EIO, sizes_E)
    # Kernels skip the rows that nobody chose, which the shapes of their arrays do not tell.
    work = _Work(implementation, f"{EVEN_ROWS}{even_rows or x_NI.shape[0]}")
    return _grouped_dot(x_NI, weight_EIO, sizes_E, work)


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
    """`grouped_dot` with weights that are stored otherwise, as `framework.layers.experts.stored.Multiply` says.

    "blocks" has one expert's weights at a time, the others the matrix of all experts that are here.
    """
    with jax.named_scope(f"{EVEN_ROWS}{even_rows}"):
        if implementation == "blocks":
            return _rows_times_weights(x, weights, sizes, transpose, dense)
        weight_EIO = dense_experts(dense, weights)
        if implementation == "ragged":
            return jax.lax.ragged_dot(x, weight_EIO.mT if transpose else weight_EIO, sizes)
        return _PRODUCTS[implementation].rows_times_weights(x, weight_EIO, sizes, transpose=transpose)


class _Work(NamedTuple):
    """How products are computed, and the name of the scope that says how much they are."""

    implementation: Chosen
    scope: str


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_dot(x_NI: jax.Array, weight_EIO: jax.Array, sizes_E: jax.Array, work: _Work) -> jax.Array:
    with jax.named_scope(work.scope):
        return _PRODUCTS[work.implementation].rows_times_weights(x_NI, weight_EIO, sizes_E)


def _grouped_dot_forward(x: Any, weight: Any, sizes: Any, work: _Work) -> Any:
    """The product, and what the gradients need: of weights that do not learn, no rows."""
    # With symbolic_zeros each argument says whether it is differentiated.
    weight_residual = weight.value if x.perturbed else None
    x_residual = x.value if weight.perturbed else None
    y_NO = _grouped_dot(x.value, weight.value, sizes.value, work)
    return y_NO, (x_residual, weight_residual, sizes.value)


def _grouped_dot_backward(work: _Work, residuals: Any, grad_NO: Any) -> tuple[Any, Any, Any]:
    x_NI, weight_EIO, sizes_E = residuals
    products = _PRODUCTS[work.implementation]
    grad_NO = dense_cotangent(grad_NO)
    x_grad = None
    weight_grad = None
    with jax.named_scope(work.scope):
        if weight_EIO is not None:
            x_grad = products.rows_times_weights(grad_NO, weight_EIO, sizes_E, transpose=True)
        if x_NI is not None:
            weight_grad = products.weight_gradients(x_NI, grad_NO, sizes_E)
    return x_grad, weight_grad, np.zeros(sizes_E.shape, jax.dtypes.float0)


_grouped_dot.defvjp(_grouped_dot_forward, _grouped_dot_backward, symbolic_zeros=True)


def _over_blocks(
    body: Callable[[jax.Array, int, Any], Any],
    start: jax.Array,
    end: jax.Array,
    num_rows: int,
    carry: Any,
) -> Any:
    """Calls carry = body(first row, number of rows, carry) for the blocks that cover the rows from start to end, of
    `num_rows` rows that there are."""
    smallest = BLOCKS[-1]
    for block in BLOCKS:
        # No expert has so many rows.
        if block > num_rows:
            continue
        rows_left = end - start
        # Only the last of the smallest blocks may be partly empty.
        count = rows_left // block if block != smallest else (rows_left + block - 1) // block
        one_block = partial(_one_block, body, start, block)
        carry = jax.lax.fori_loop(0, count, one_block, carry)
        start = start + count * block
    return carry


def _one_block(
    body: Callable[[jax.Array, int, Any], Any],
    start: jax.Array,
    block: int,
    number: jax.Array,
    carry: Any,
) -> Any:
    return body(start + number * block, block, carry)


def _rows_times_weights(
    x_NI: jax.Array,
    weights: Any,
    sizes_E: jax.Array,
    transpose: bool = False,
    dense: Callable[[Any], jax.Array] = lambda weight_IO: weight_IO,
) -> jax.Array:
    """[N, O], or with `transpose` x_NI is [N, O] and the result [N, I].

    Args:
        weights: [E, I, O]; or a tree of arrays whose first axis is that of the experts, of which `dense` makes one
            expert's [I, O].
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
    """[E, I, O], each the sum over the expert's rows of x^T grad, in the rows' dtype but summed in float32 at least."""
    ends_E = jnp.cumsum(sizes_E)
    wide = jnp.promote_types(x_NI.dtype, jnp.float32)

    def expert(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        size, end = xs

        def product(row: jax.Array, block: int, total_IO: jax.Array) -> jax.Array:
            x_block = jax.lax.dynamic_slice_in_dim(x_NI, row, block)
            grad_block = jax.lax.dynamic_slice_in_dim(grad_NO, row, block)
            if block == BLOCKS[-1]:
                # The rows of the next expert are none of this one's.
                is_own = row + jnp.arange(block) < end
                grad_block = jnp.where(is_own[:, None], grad_block, 0)
            block_grad = jax.lax.dot_general(
                x_block,
                grad_block,
                (((0,), (0,)), ((), ())),
                preferred_element_type=wide,
            )
            return total_IO + block_grad

        zeros = jnp.zeros((x_NI.shape[1], grad_NO.shape[1]), wide)
        total_IO = _over_blocks(product, end - size, end, x_NI.shape[0], zeros)
        return None, total_IO.astype(x_NI.dtype)

    _, weight_grads = jax.lax.scan(expert, None, (sizes_E, ends_E))
    return weight_grads


class _Products(NamedTuple):
    """An implementation: the products forward, which with `transpose` give the rows' gradients, and the weights'."""

    rows_times_weights: Callable[..., jax.Array]
    weight_gradients: Callable[..., jax.Array]


_PRODUCTS = {
    "megablox": _Products(grouped_tpu.rows_times_weights, grouped_tpu.weight_gradients),
    "triton": _Products(grouped_gpu.rows_times_weights, grouped_gpu.weight_gradients),
    "blocks": _Products(_rows_times_weights, _weight_gradients),
}
