"""Products of rows with their experts' weights: row n of expert e becomes x_n @ weight_e.

Implementations; "auto" chooses one by platform and dtype:
    megablox   kernels for TPU, see grouped_tpu.py
    triton     kernels for GPU, see grouped_gpu.py
    blocks     for CPU, and for dtypes that those kernels do not support: loops over blocks of rows, see
               grouped_blocks.py
    ragged     `jax.lax.ragged_dot`. XLA for CPU and GPU computes it as a product with every expert's weight and
               discards all but one; XLA for TPU computes the gradient of the weights in this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.typing import DTypeLike

from plimsoll.framework.layers.custom_gradients import dense_cotangent, zero_cotangent
from plimsoll.framework.layers.experts import grouped_blocks, grouped_gpu, grouped_tpu
from plimsoll.framework.layers.experts.expert_storage import Dense, dense_experts
from plimsoll.framework.layout import Nested

Implementation = Literal["auto", "megablox", "triton", "blocks", "ragged"]
Chosen = Literal["megablox", "triton", "blocks", "ragged"]
# Each of these modules has `rows_times_weights` and `weight_gradients`.
_PRODUCTS = {"megablox": grouped_tpu, "triton": grouped_gpu, "blocks": grouped_blocks}
_ONLY_PLATFORM = {"megablox": "tpu", "triton": "gpu"}
# Prefix of the name of a scope around the products; framework/plan/grouped_products.py counts them by it.
EVEN_ROWS = "even_rows_"


def check_platform(implementation: Implementation, platform: str) -> None:
    """Raise ValueError if the implementation is a kernel for another platform than this one (tpu, gpu or cpu)."""
    only_platform = _ONLY_PLATFORM.get(implementation, platform)
    if only_platform != platform:
        raise ValueError(
            f"experts.implementation = {implementation!r} is for {only_platform}, not {platform}; try auto"
        )


def choose_implementation(implementation: Implementation, platform: str, dtype: DTypeLike) -> Chosen:
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
        return num_rows + grouped_blocks.BLOCKS[-1]
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
    weights: Nested,
    dense: Dense,
    transpose: bool,
    sizes: jax.Array | None,
    *,
    implementation: Chosen,
    even_rows: int,
) -> jax.Array:
    """Compute `grouped_dot` with stored weights, see `framework.layers.experts.expert_storage.Multiply`.

    "blocks" has one expert's dense weights at a time; the others have the matrix of all local experts.
    """
    assert sizes is not None, "rows are sorted by expert"
    with jax.named_scope(f"{EVEN_ROWS}{even_rows}"):
        if implementation == "blocks":
            return grouped_blocks.rows_times_weights(x, weights, sizes, transpose, dense)
        weight_EIO = dense_experts(dense, weights, x)
        if implementation == "ragged":
            return jax.lax.ragged_dot(x, weight_EIO.mT if transpose else weight_EIO, sizes)
        return _PRODUCTS[implementation].rows_times_weights(x, weight_EIO, sizes, transpose=transpose)


@dataclass(frozen=True)
class _ProductOptions:
    """The implementation of products, and the name of the scope that records the amount of work."""

    implementation: Chosen
    scope: str


def _multiply(x_NI: jax.Array, weight_EIO: jax.Array, sizes_E: jax.Array, options: _ProductOptions) -> jax.Array:
    with jax.named_scope(options.scope):
        return _PRODUCTS[options.implementation].rows_times_weights(x_NI, weight_EIO, sizes_E)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _ProductResiduals:
    """Residuals of the product: frozen weights need no rows, and rows without a gradient need no weights."""

    x_NI: jax.Array | None
    weight_EIO: jax.Array | None
    sizes_E: jax.Array


def _multiply_forward(
    x: CustomVJPPrimal, weight: CustomVJPPrimal, sizes: CustomVJPPrimal, options: _ProductOptions
) -> tuple[jax.Array, _ProductResiduals]:
    # With symbolic_zeros, each argument has a flag that tells whether it is differentiated.
    weight_residual = weight.value if x.perturbed else None
    x_residual = x.value if weight.perturbed else None
    y_NO = _multiply_groups(x.value, weight.value, sizes.value, options)
    return y_NO, _ProductResiduals(x_residual, weight_residual, sizes.value)


def _multiply_backward(
    options: _ProductOptions, saved: _ProductResiduals, grad: jax.Array | SymbolicZero
) -> tuple[jax.Array | np.ndarray | None, ...]:
    products = _PRODUCTS[options.implementation]
    grad_NO = dense_cotangent(grad)
    x_grad = None
    weight_grad = None
    with jax.named_scope(options.scope):
        if saved.weight_EIO is not None:
            x_grad = products.rows_times_weights(grad_NO, saved.weight_EIO, saved.sizes_E, transpose=True)
        if saved.x_NI is not None:
            weight_grad = products.weight_gradients(saved.x_NI, grad_NO, saved.sizes_E)
    return x_grad, weight_grad, zero_cotangent(saved.sizes_E)


_multiply_groups = jax.custom_vjp(_multiply, nondiff_argnums=(3,))
_multiply_groups.defvjp(_multiply_forward, _multiply_backward, symbolic_zeros=True)
