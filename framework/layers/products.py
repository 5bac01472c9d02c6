"""Products of activations with weights, in the forms that XLA is fast with on each kind of device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from framework.layers.base import Context


def project(x: jax.Array, weight: jax.Array, ctx: Context) -> jax.Array:
    """x [..., inputs] @ weight [inputs, outputs], in x's dtype.

    On one CPU the gradient of the weight is one product of matrices [tokens, inputs] and [tokens, outputs], in the
    layout in which the weight is stored. JAX's own rule asks for its transpose and turns that around. XLA for CPU then
    turns the input or the cotangent around instead, element by element, computes once more all that made it, and
    multiplies in an order in which Eigen takes up to three times as long. With tokens on several devices they are no
    axis of one matrix.
    """
    on_one_cpu = ctx.platform == "cpu" and (ctx.mesh is None or ctx.mesh.size == 1)
    return _project(x, weight) if on_one_cpu and x.dtype == weight.dtype and x.ndim > 1 else x @ weight


@jax.custom_vjp
def _project(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def _forward(x: Any, weight: Any) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
    """Keeps the weight if the input has a gradient, and the input if the weight has one: a frozen weight keeps none."""
    kept_weight = weight.value if x.perturbed else None
    kept_x = x.value if weight.perturbed else None
    return x.value @ weight.value, (kept_x, kept_weight)


def _backward(kept: tuple[jax.Array | None, jax.Array | None], grad: Any) -> tuple[Any, Any]:
    x, weight = kept
    if isinstance(grad, jax.custom_derivatives.SymbolicZero):
        zero: Any = grad
        grad = jnp.zeros(zero.shape, zero.dtype)
    x_grad = weight_grad = None
    if weight is not None:
        x_grad = jax.lax.dot_general(grad, weight, (((grad.ndim - 1,), (1,)), ((), ())))
    if x is not None:
        x_TD, grad_TF = (array.reshape(-1, array.shape[-1]) for array in (x, grad))
        over_tokens = (((0,), (0,)), ((), ()))
        # The wider of the two is the second one: packing the first one turned around is what Eigen is slow with.
        if x_TD.shape[1] > grad_TF.shape[1]:
            weight_grad = jax.lax.dot_general(grad_TF, x_TD, over_tokens).T
        else:
            weight_grad = jax.lax.dot_general(x_TD, grad_TF, over_tokens)
    return x_grad, weight_grad


_project.defvjp(_forward, _backward, symbolic_zeros=True)
