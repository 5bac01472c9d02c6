"""Grouped products on TPUs, with the kernels that JAX ships (megablox, Gale et al. 2022, arXiv 2211.15841).

`jax.lax.ragged_dot` uses kernels too, but not for the gradient of the weights: XLA computes that as a convolution
over all rows for each expert, E times the multiply-adds (jax 0.10.2, seen in the compiler's text).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The kernels process rows in whole tiles. With the tiles of the other axes below, two of each operand and one sum in
# float32 take under 12 of the 16 MiB of vector memory that a kernel may use.
TILE_ROWS = 512
_TILE_BYTES = 2048
DTYPES = (jnp.bfloat16, jnp.float32)


def rows_times_weights(
    x_NI: jax.Array, weight_EIO: jax.Array, sizes_E: jax.Array, transpose: bool = False, interpret: bool = False
) -> jax.Array:
    """Multiply each row by its expert's weight: [N, O] in x's dtype, summed in float32.

    Args:
        x_NI: rows sorted by expert; N is a multiple of TILE_ROWS.
        weight_EIO: weights in x's dtype.
        sizes_E: int32, the number of rows of each expert.
        transpose: x is [N, O], and the result [N, I].
        interpret: run the kernel as JAX operations, on any platform.
    """
    # Imported here, because importing Pallas takes a tenth of a second, and most models have no experts.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    columns = weight_EIO.shape[1 if transpose else 2]
    return gmm(
        x_NI,
        weight_EIO,
        sizes_E,
        preferred_element_type=x_NI.dtype,
        tiling=_tiling(x_NI, columns),
        transpose_rhs=transpose,
        interpret=interpret,
    )


def weight_gradients(x_NI: jax.Array, grad_NO: jax.Array, sizes_E: jax.Array, interpret: bool = False) -> jax.Array:
    """Return the sums over each expert's rows of x^T grad: [E, I, O] in the rows' dtype, summed in float32.

    The arguments are as in `rows_times_weights`.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    return tgmm(
        x_NI.swapaxes(0, 1),
        grad_NO,
        sizes_E,
        preferred_element_type=x_NI.dtype,
        tiling=_tiling(x_NI, grad_NO.shape[1]),
        interpret=interpret,
    )


def _tiling(x_NI: jax.Array, columns: int) -> tuple[int, int, int]:
    """Return the tile sizes: of rows, of x's columns, and of the other operand's columns."""
    widest = _TILE_BYTES // x_NI.dtype.itemsize
    return TILE_ROWS, min(widest, x_NI.shape[1]), min(widest, columns)
