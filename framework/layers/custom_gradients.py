"""Helpers of functions with custom gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def save_inputs(function: Callable[..., jax.Array], *, apart: bool = False) -> Callable[..., jax.Array]:
    """Wrap a cheap function so that only its inputs are saved, and the backward pass recomputes the rest.

    Differentiating GELU saves six arrays of the hidden width, and differentiating a norm saves six float32 arrays of
    the model's width. Reading them takes more time than recomputing them from one input. Values and gradients stay the
    same. Reverse mode only: the result has no forward-mode derivative.

    Args:
        function: maps arrays to an array; it closes over no traced array. It should be cheap: no matrix products.
        apart: keep XLA from computing the result and the gradients at the same time, where both are computed from the
            saved inputs: the result could not be freed before the cotangent is there.
    """

    def backward(inputs: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
        if apart:
            inputs, cotangent = jax.lax.optimization_barrier((inputs, cotangent))
        _, pull = jax.vjp(function, *inputs)
        return pull(cotangent)

    # Not `jax.checkpoint`: inside a layer that is itself under `jax.checkpoint`, the layer's policy would decide.
    cheap = jax.custom_vjp(function)
    cheap.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
    return cheap


def dense_cotangent(grad: jax.Array | jax.custom_derivatives.SymbolicZero) -> jax.Array:
    """Convert a cotangent to an array: with symbolic_zeros, JAX passes a zero only as shape and dtype."""
    if isinstance(grad, jax.custom_derivatives.SymbolicZero):
        # SymbolicZero passes attributes on to its abstract value, which no type checker knows.
        return jnp.zeros(grad.shape, grad.dtype)  # pyright: ignore[reportArgumentType]
    return grad


def zero_cotangent(x: jax.Array) -> jax.Array | np.ndarray:
    """Return the cotangent of an argument that a function is not differentiated in, such as targets: zeros."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    # float0 is JAX's dtype for cotangents of integers.
    return np.zeros(x.shape, jax.dtypes.float0)
