"""Sums of gradients over the uses of a parameter, in float32 whatever its dtype.

A layer that all units share has one gradient for each use. Differentiating a loop adds them up in the parameter's own
dtype, and in bfloat16 each addition loses up to 1/512 of the sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from framework.layout import Nested


def wide(dtype: Any) -> Any:
    """The dtype in which gradients of parameters of this dtype are added up: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def zeros(params: Nested) -> Nested:
    """What a sum of gradients of these parameters begins with."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), params)


def add(sums: Nested, grads: Nested) -> Nested:
    """The sum with one more use's gradients."""
    return jax.tree.map(lambda old, grad: old + grad.astype(old.dtype), sums, grads)


def rounded(sums: Nested, params: Nested) -> Nested:
    """Sums in the dtypes of their parameters."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype), sums, params)


def taps(params: Nested) -> Nested:
    """For each parameter an array, through which its gradient comes back in the dtype of sums: see `tapped`.

    {} where gradients are added up in float32 at any rate. The arrays' values are zeros that nothing reads.
    """
    leaves = jax.tree.leaves(params)
    if all(wide(x.dtype) == x.dtype for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)):
        return {}
    return jax.tree.map(_tap, params)


def tapped(params: Nested, taps: Nested) -> Nested:
    """The parameters, at one use of them in a loop: the gradient of this use goes to the taps, and so is added to those
    of other uses in their dtype. The parameters as they are if there are no taps."""
    return jax.tree.map(_use, taps, params, is_leaf=lambda tap: tap is None) if taps else params


def _tap(x: jax.Array) -> jax.Array | None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    dtype = x.dtype

    @jax.custom_vjp
    def tap(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, wide(dtype))

    tap.defvjp(lambda x: (tap(x), None), lambda _, sum_of_uses: (sum_of_uses.astype(dtype),))
    return tap(x)


@jax.custom_vjp
def _pass(x: jax.Array, tap: jax.Array) -> jax.Array:
    return x


_pass.defvjp(lambda x, tap: (x, None), lambda _, grad: (None, grad.astype(wide(grad.dtype))))


def _use(tap: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if tap is None else _pass(jax.lax.stop_gradient(x), tap)
