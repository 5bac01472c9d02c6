"""Inverses of unit lower triangular matrices, for many small ones at a time."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp


def invert_unit_lower(lower: jax.Array, platform: str) -> jax.Array:
    """Return the inverses of I + L, for strictly lower triangular matrices L [..., C, C]."""
    # On a CPU of two cores, two of XLA's batched solvers at a time wait for each other forever: jaxlib 0.10 splits each
    # batch into tasks of the thread pool that runs the solvers themselves.
    return _invert(lower, platform == "cpu")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _invert(lower: jax.Array, by_blocks: bool) -> jax.Array:
    return _compute_inverse(lower, by_blocks)


def _compute_inverse(lower: jax.Array, by_blocks: bool) -> jax.Array:
    if by_blocks:
        return _invert_by_blocks(lower)
    identity = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True, unit_diagonal=True)


def _invert_forward(lower: jax.Array, by_blocks: bool) -> tuple[jax.Array, jax.Array]:
    inverse = _compute_inverse(lower, by_blocks)
    return inverse, inverse


def _invert_backward(by_blocks: bool, inverse: jax.Array, inverse_ct: jax.Array) -> tuple[jax.Array]:
    # d inverse(M) = -inverse(M) dM inverse(M). The caller sets all elements from the diagonal on to zero.
    return (-_multiply(inverse.mT, _multiply(inverse_ct, inverse.mT)),)


_invert.defvjp(_invert_forward, _invert_backward)


def _invert_by_blocks(lower: jax.Array) -> jax.Array:
    """Return the inverses of I + L from those of their diagonal blocks, which begin with one row each.

    inverse([[A, 0], [B, D]]) = [[inverse(A), 0], [-inverse(D) B inverse(A), inverse(D)]]
    """
    C = lower.shape[-1]
    batch = lower.shape[:-2]
    # Rows of zeros in L are rows of the identity in the inverse, and do not change the others.
    size = 1 << (C - 1).bit_length()
    lower = jnp.pad(lower, [(0, 0)] * len(batch) + [(0, size - C)] * 2)
    # [..., number, width, width].
    inverses = jnp.ones((*batch, size, 1, 1), lower.dtype)
    width = 1
    while width < size:
        number = size // (2 * width)
        pairs = inverses.reshape(*batch, number, 2, width, width)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        # For each pair, the block of L in the rows of the second and the columns of the first.
        tiles = lower.reshape(*batch, number, 2, width, number, 2, width)[..., 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
        corner = -_multiply(second, _multiply(below, first))
        upper_rows = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower_rows = jnp.concatenate([corner, second], axis=-1)
        inverses = jnp.concatenate([upper_rows, lower_rows], axis=-2)
        width *= 2
    return inverses[..., 0, :C, :C]


def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the product in full precision, because errors of an inverse spread to all tokens of its chunk."""
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)
