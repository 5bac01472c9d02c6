"""Scan over invertible layers: the memory for its gradient does not grow with their number.

The gradient of `jax.lax.scan` saves the activations of every layer until the backward pass reaches it. With invertible
layers nothing needs to be saved: the backward pass starts from the last layer's output and recomputes each layer's
input just before it differentiates the layer (Gomez et al. 2017, arXiv:1707.04585).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from plimsoll.extras.functions.closures import select_arrays
from plimsoll.extras.functions.reversible_layer import ReversibleLayer, make_layer
from plimsoll.framework.layout import fill_none, floats

_NO_FORWARD_MODE = (
    "reversible_scan: no forward-mode derivatives (jax.jvp, jax.jacfwd, jax.linearize): its layers are differentiated "
    "only in reverse mode; use jax.grad, jax.vjp or jax.jacrev, or jax.lax.scan with the same forward function"
)
_NO_SECOND_DERIVATIVES = (
    "reversible_scan: no second derivatives: differentiating the backward pass would save the activations of every "
    "layer; use jax.lax.scan with the same forward function"
)


def reversible_scan(
    forward: Callable[..., Any], inverse: Callable[..., Any], weights: Any, x: Any, xs: Any = None
) -> Any:
    """Apply L layers in sequence, like `jax.lax.scan`, with a gradient that saves no layer's activations.

        for layer in range(L):
            x = forward(weights[layer], x, xs[layer])

    Args:
        forward: (weights of a layer, x) -> y. With `xs`, it takes the layer's slice of them as a third argument. y has
            the structure, shapes and dtypes of x. Arrays that it closes over get gradients too.
        inverse: (weights of a layer, y) -> x, with the same arguments. It is not differentiated. Its accuracy affects
            the gradients; `reconstruction_error` measures it.
        weights: any tree whose arrays are [L, ...], of any dtype. Leaves that are not arrays, such as an activation
            function in an equinox module, are passed to every layer unchanged.
        x: any tree of arrays: the first layer's input.
        xs: other per-layer inputs, a tree of arrays [L, ...]: keys, flags, conditioning. None if there are none.

    Returns:
        The last layer's output, like x. Integers, booleans and keys among weights, x and xs have no gradient.

    Complexity, for L layers whose forward function takes time T and whose pullback saves K bytes: the gradient holds K
    and x in addition to the arguments, their gradients and the output, for any L. `jax.lax.scan` holds L K, or L x if
    each layer is in `jax.checkpoint`. With the pair of `additive_coupling` it takes L times 4 T, as with
    `jax.checkpoint`: each branch is evaluated once forward, and once more in the backward pass, where it is
    differentiated (2 T). Any other pair adds the time of L inverses.

    Raises:
        ValueError: the arrays of weights and xs do not have the same L, or there are none; `forward` or `inverse`
            returns another structure, shape or dtype than x has.
        TypeError: forward-mode or second derivatives. If the function was traced before (`jax.jvp(jax.jit(...))`), JAX
            raises the error itself.
    """
    x = jax.tree.map(jnp.asarray, x)
    stacks = (weights,) if xs is None else (weights, xs)
    length = num_layers(stacks)
    if length == 0:
        return x
    layer = make_layer(forward, inverse, stacks, x)
    run = _differentiable(layer)
    try:
        return run(select_arrays(stacks), layer.shared, x)
    except TypeError as error:
        # JAX's own message does not name the function.
        if "forward-mode" not in str(error):
            raise
        raise TypeError(_NO_FORWARD_MODE) from error


def num_layers(stacks: tuple[Any, ...]) -> int:
    """Return the length L of the first axis of all arrays. Raise ValueError if they differ or there are no arrays."""
    first_name = ""
    length = None
    for keys, leaf in jax.tree_util.tree_leaves_with_path(select_arrays(stacks)):
        # The first key is the index in `stacks`.
        name = ("weights", "xs")[keys[0].idx] + jax.tree_util.keystr(keys[1:])
        if not leaf.shape:
            raise ValueError(f"reversible_scan: {name}: expected an array [L, ...], got a scalar")
        if length is None:
            first_name = name
            length = leaf.shape[0]
        if leaf.shape[0] != length:
            raise ValueError(
                f"reversible_scan: expected one L for all arrays [L, ...]: {first_name} has {length} layers, "
                f"{name} has {leaf.shape[0]}"
            )
    if length is None:
        raise ValueError("reversible_scan: expected arrays [L, ...] among weights and xs, got none")
    return length


def _differentiable(layer: ReversibleLayer) -> Callable[[Any, Any, Any], Any]:
    """Return (stacked arrays, shared values, x) -> y, with a gradient that runs the layers backward."""

    def run(stacks: Any, shared: Any, x: Any) -> Any:
        def body(x: Any, layer_arrays: Any) -> tuple[Any, None]:
            return layer.forward(shared, layer_arrays, x), None

        y, _ = lax.scan(body, x, stacks)
        return y

    def run_forward(stacks: Any, shared: Any, x: Any) -> tuple[Any, Any]:
        y = run(stacks, shared, x)
        # Only the output is saved, not the inputs of all layers.
        return y, (stacks, shared, y)

    def run_backward(residuals: Any, y_ct: Any) -> tuple[Any, Any, Any]:
        residual_floats, y_ct = _forbid_differentiation((floats(residuals), floats(y_ct)))
        stacks, shared, y = fill_none(residual_floats, residuals)

        def body(carry: Any, layer_arrays: Any) -> tuple[Any, Any]:
            y, y_ct, shared_sum = carry
            reversed_layer = layer.reverse(shared, layer_arrays, y, y_ct)
            shared_sum = jax.tree.map(jnp.add, shared_sum, reversed_layer.shared_ct)
            return (reversed_layer.x, reversed_layer.x_ct, shared_sum), reversed_layer.layer_ct

        no_shared_ct = jax.tree.map(jnp.zeros_like, floats(shared))
        end, stacks_ct = lax.scan(body, (y, y_ct, no_shared_ct), stacks, reverse=True)
        _, x_ct, shared_ct = end
        return stacks_ct, shared_ct, x_ct

    differentiable = jax.custom_vjp(run)
    differentiable.defvjp(run_forward, run_backward)
    return differentiable


@jax.custom_jvp
def _forbid_differentiation(tree: Any) -> Any:
    """Return the tree unchanged; raise an error if it is differentiated."""
    return tree


@_forbid_differentiation.defjvp
def _refuse_second_derivatives(primals: Any, tangents: Any) -> Any:
    raise TypeError(_NO_SECOND_DERIVATIVES)
