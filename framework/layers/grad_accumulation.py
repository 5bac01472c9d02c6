"""Sums of gradients over the uses of a parameter, in float32 or wider regardless of the parameter's dtype.

A layer that all repeats of a stack's pattern share has one gradient per use. Differentiating a loop adds them up in the
parameter's own dtype, and in bfloat16 each addition loses up to 1/512 of the sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.layout import Nested


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype for summing gradients of parameters of this dtype: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def zeros(params: Nested) -> Nested:
    """Return zeros for the gradient sums of these parameters."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), params)


def add(sums: Nested, grads: Nested) -> Nested:
    """Add the gradients of one more use to the sums."""
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads)


def make_taps(params: Nested) -> Nested:
    """Return an array for each parameter, through which its gradient returns in the dtype of sums: see `attach_taps`.

    Return {} if gradients are summed in float32 anyway. The arrays' values are zeros that nothing reads.
    """
    leaves = jax.tree.leaves(params)
    float_leaves = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if all(sum_dtype(leaf.dtype) == leaf.dtype for leaf in float_leaves):
        return {}
    return jax.tree.map(lambda x: _tap(x, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None, params)


def attach_taps(params: Nested, taps: Nested) -> Nested:
    """Return the parameters for one use in a loop; the gradient of this use goes to the taps.

    There it is added to the gradients of other uses, in the taps' dtype. Without taps, the parameters are returned
    unchanged.
    """
    if not taps:
        return params
    # The tap of an integer parameter is None, which has to count as a leaf. stop_gradient, because the parameter's own
    # gradient would be summed in its narrow dtype.
    return jax.tree.map(
        lambda tap, x: x if tap is None else _pass(jax.lax.stop_gradient(x), tap),
        taps,
        params,
        is_leaf=lambda tap: tap is None,
    )


# The tap is a function of the parameter, so the summed gradient flows on to the parameter.
_tap = jax.custom_vjp(lambda x, dtype: jnp.zeros(x.shape, sum_dtype(dtype)), nondiff_argnums=(1,))
_tap.defvjp(lambda x, dtype: (_tap(x, dtype), None), lambda dtype, _, sum_of_uses: (sum_of_uses.astype(dtype),))


@jax.custom_vjp
def _pass(x: jax.Array, tap: jax.Array) -> jax.Array:
    # The gradient of x goes to the tap, in the tap's dtype: see the rule below.
    return x


_pass.defvjp(lambda x, tap: (x, None), lambda _, grad: (None, grad.astype(sum_dtype(grad.dtype))))
