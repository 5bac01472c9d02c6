"""Products of activations with weights, in the forms that XLA computes fast on each type of device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from plimsoll.framework.layers.base import Context


def project(x: jax.Array, weight: jax.Array, ctx: Context) -> jax.Array:
    """Return x [..., inputs] @ weight [inputs, outputs], in x's dtype.

    On a single CPU device, the gradient of the weight is one product of matrices [tokens, inputs] and [tokens,
    outputs], in the layout in which the weight is stored. JAX's own rule computes the transposed gradient and
    transposes the result. XLA for CPU then transposes the input or the cotangent instead, element by element,
    recomputes everything that produced it, and multiplies in an order for which Eigen takes up to three times as
    long.
    """
    # With tokens on several devices, they are not one axis of a matrix.
    on_one_cpu = ctx.platform == "cpu" and (ctx.mesh is None or ctx.mesh.size == 1)
    # A vector has no token axis, and products of mixed dtypes are left to JAX's type promotion.
    if on_one_cpu and x.dtype == weight.dtype and x.ndim > 1:
        return _project(x, weight)
    return x @ weight


@jax.custom_vjp
def _project(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def _forward(x: Any, weight: Any) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
    """Return the product, and the inputs that the gradients need: a frozen weight, for example, needs no x."""
    # With symbolic_zeros, each argument has a flag that tells whether it is differentiated.
    weight_residual = weight.value if x.perturbed else None
    x_residual = x.value if weight.perturbed else None
    return x.value @ weight.value, (x_residual, weight_residual)


def dense_cotangent(grad: Any) -> jax.Array:
    """Convert a cotangent to an array: with symbolic_zeros, JAX passes a zero only as shape and dtype."""
    if isinstance(grad, jax.custom_derivatives.SymbolicZero):
        zero: Any = grad
        return jnp.zeros(zero.shape, zero.dtype)
    return grad


def _backward(residuals: tuple[jax.Array | None, jax.Array | None], grad: Any) -> tuple[Any, Any]:
    x, weight = residuals
    grad = dense_cotangent(grad)
    x_grad = None
    weight_grad = None
    if weight is not None:
        over_outputs = (((grad.ndim - 1,), (1,)), ((), ()))
        x_grad = jax.lax.dot_general(grad, weight, over_outputs)
    if x is not None:
        x_TD = x.reshape(-1, x.shape[-1])
        grad_TF = grad.reshape(-1, grad.shape[-1])
        over_tokens = (((0,), (0,)), ((), ()))
        # The wider factor comes second: Eigen is slow at packing the first one transposed.
        if x_TD.shape[1] > grad_TF.shape[1]:
            weight_grad = jax.lax.dot_general(grad_TF, x_TD, over_tokens).T
        else:
            weight_grad = jax.lax.dot_general(x_TD, grad_TF, over_tokens)
    return x_grad, weight_grad


_project.defvjp(_forward, _backward, symbolic_zeros=True)
