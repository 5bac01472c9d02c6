"""Scan over invertible layers: the memory for its gradient does not grow with their number.

The gradient of `jax.lax.scan` saves the activations of every layer until the backward pass reaches it. With invertible
layers nothing needs to be saved: the backward pass starts from the last layer's output and recomputes each layer's
input just before it differentiates the layer (Gomez et al. 2017, arXiv:1707.04585). `reconstruction_error` measures how
closely the layers reproduce their input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import core, lax

from plimsoll.extras.functions.additive_coupling import add_branch, find_coupling, subtract_branch
from plimsoll.extras.functions.leaf_selection import is_array, is_float
from plimsoll.framework.layout import PyTree, fill_none, flatten, floats

_NO_FORWARD_MODE = (
    "reversible_scan: no forward-mode derivatives (jax.jvp, jax.jacfwd, jax.linearize): its layers are differentiated "
    "only in reverse mode; use jax.grad, jax.vjp or jax.jacrev, or jax.lax.scan with the same forward function"
)
_NO_SECOND_DERIVATIVES = (
    "reversible_scan: no second derivatives: differentiating the backward pass would save the activations of every "
    "layer; use jax.lax.scan with the same forward function"
)


def reversible_scan(
    forward: Callable[..., PyTree], inverse: Callable[..., PyTree], weights: PyTree, x: PyTree, xs: PyTree = None
) -> PyTree:
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


def num_layers(stacks: tuple[PyTree, ...]) -> int:
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


def _differentiable(layer: _GenericLayer | _CouplingLayer) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """Return (stacked arrays, shared values, x) -> y, with a gradient that runs the layers backward."""

    def run(stacks: PyTree, shared: PyTree, x: PyTree) -> PyTree:
        def body(x: PyTree, layer_arrays: PyTree) -> tuple[PyTree, None]:
            return layer.forward(shared, layer_arrays, x), None

        y, _ = lax.scan(body, x, stacks)
        return y

    def run_forward(stacks: PyTree, shared: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        y = run(stacks, shared, x)
        # Only the output is saved, not the inputs of all layers.
        return y, (stacks, shared, y)

    def run_backward(residuals: PyTree, y_ct: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        residual_floats, y_ct = _forbid_differentiation((floats(residuals), floats(y_ct)))
        stacks, shared, y = fill_none(residual_floats, residuals)

        def body(carry: PyTree, layer_arrays: PyTree) -> tuple[PyTree, PyTree]:
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
def _forbid_differentiation(tree: PyTree) -> PyTree:
    """Return the tree unchanged; raise an error if it is differentiated."""
    return tree


@_forbid_differentiation.defjvp
def _refuse_second_derivatives(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> NoReturn:
    raise TypeError(_NO_SECOND_DERIVATIVES)


# --- one layer -------------------------------------------------------------------------------------------------------

# (values that the layers share, arrays of a layer, x) -> a tree of arrays.
LayerFunction = Callable[[PyTree, PyTree, PyTree], PyTree]


@dataclass(frozen=True)
class ReverseResult:
    """Result of a layer's reverse pass. Cotangents have None for integers, booleans and keys.

    Attributes:
        x: the layer's input.
        x_ct: cotangent of the input.
        layer_ct: cotangent of the layer's own arrays.
        shared_ct: cotangent of the values that the layers share.
    """

    x: PyTree
    x_ct: PyTree
    layer_ct: PyTree
    shared_ct: PyTree


@dataclass(frozen=True)
class _GenericLayer:
    """A layer made of any two functions that are inverse to each other.

    Attributes:
        shared: traced values that its functions close over, shared by all layers.
        forward_function, inverse_function: the two functions.
    """

    shared: tuple[PyTree, PyTree]
    forward_function: LayerFunction
    inverse_function: LayerFunction

    def forward(self, shared: PyTree, layer_arrays: PyTree, x: PyTree) -> PyTree:
        """Return the layer's output."""
        forward_shared, _ = shared
        return self.forward_function(forward_shared, layer_arrays, x)

    def reverse(self, shared: PyTree, layer_arrays: PyTree, y: PyTree, y_ct: PyTree) -> ReverseResult:
        """Return the layer's input and the gradients, given its output and the output's cotangent."""
        forward_shared, inverse_shared = shared
        x = self.inverse_function(inverse_shared, layer_arrays, y)
        _, pull = compute_float_vjp(self.forward_function, forward_shared, layer_arrays, x)
        forward_ct, layer_ct, x_ct = pull(y_ct)
        # The gradient is that of `forward`, so the closed-over values of the inverse get zero cotangents.
        inverse_ct = [jnp.zeros_like(value) if is_float(value) else None for value in inverse_shared]
        return ReverseResult(x, x_ct, layer_ct, (forward_ct, inverse_ct))


@dataclass(frozen=True)
class _CouplingLayer:
    """An additive coupling. Each branch's output is used for both the inverse and the gradient."""

    shared: tuple[PyTree, PyTree]
    f: LayerFunction
    g: LayerFunction

    def forward(self, shared: PyTree, layer_arrays: PyTree, x: PyTree) -> PyTree:
        """See `_GenericLayer.forward`."""
        f_shared, g_shared = shared
        x1, x2 = x
        y1 = add_branch(x1, self.f(f_shared, layer_arrays, x2))
        y2 = add_branch(x2, self.g(g_shared, layer_arrays, y1))
        return y1, y2

    def reverse(self, shared: PyTree, layer_arrays: PyTree, y: PyTree, y_ct: PyTree) -> ReverseResult:
        """See `_GenericLayer.reverse`."""
        f_shared, g_shared = shared
        y1, y2 = y
        y1_ct, y2_ct = y_ct
        h2, pull = compute_float_vjp(self.g, g_shared, layer_arrays, y1)
        x2 = subtract_branch(y2, h2)
        # A stream's cotangent is cast to the dtype of the branch that was added to the stream.
        g_ct, g_layer_ct, g_input_ct = pull(jax.tree.map(lambda ct, h: ct.astype(h.dtype), y2_ct, h2))
        y1_ct = jax.tree.map(jnp.add, y1_ct, g_input_ct)
        # The barrier finishes the gradients of g before the activations of f exist: a compiler might keep both alive.
        barrier_inputs = (y1, x2, y1_ct, g_ct, g_layer_ct)
        y1, x2, y1_ct, g_ct, g_layer_ct = lax.optimization_barrier(barrier_inputs)
        h1, pull = compute_float_vjp(self.f, f_shared, layer_arrays, x2)
        x1 = subtract_branch(y1, h1)
        f_ct, f_layer_ct, f_input_ct = pull(jax.tree.map(lambda ct, h: ct.astype(h.dtype), y1_ct, h1))
        x2_ct = jax.tree.map(jnp.add, y2_ct, f_input_ct)
        layer_ct = jax.tree.map(jnp.add, f_layer_ct, g_layer_ct)
        return ReverseResult((x1, x2), (y1_ct, x2_ct), layer_ct, (f_ct, g_ct))


def make_layer(
    forward: Callable[..., PyTree], inverse: Callable[..., PyTree], stacks: tuple[PyTree, ...], x: PyTree
) -> _GenericLayer | _CouplingLayer:
    """Make the layer for a user's forward and inverse functions.

    Args:
        forward, inverse, x: see `reversible_scan`.
        stacks: (weights,) or (weights, xs).

    Raises:
        ValueError: `forward` or `inverse` returns another structure, shape or dtype than x has.
    """
    constants = select_constants(stacks)
    layer_shapes = jax.eval_shape(lambda arrays: jax.tree.map(lambda stack: stack[0], arrays), select_arrays(stacks))
    x_shapes = jax.eval_shape(lambda x: x, x)

    def bind_constants(function: Callable[..., PyTree]) -> Callable[[PyTree, PyTree], PyTree]:
        """Return the function of (arrays of a layer, x)."""

        def call_with_arrays(layer_arrays: PyTree, x: PyTree) -> PyTree:
            layer_weights, *layer_xs = fill_none(layer_arrays, constants)
            return function(layer_weights, x, *layer_xs)

        return call_with_arrays

    forward_once = hoist_closure(bind_constants(forward), layer_shapes, x_shapes)
    _refuse_change("forward", forward_once.result, x_shapes)
    coupling = find_coupling(forward, inverse)
    if coupling is not None:
        first_shapes, second_shapes = x_shapes
        f = hoist_closure(bind_constants(coupling.f), layer_shapes, second_shapes)
        g = hoist_closure(bind_constants(coupling.g), layer_shapes, first_shapes)
        return _CouplingLayer((f.values, g.values), f.call, g.call)
    inverse_once = hoist_closure(bind_constants(inverse), layer_shapes, x_shapes)
    _refuse_change("inverse", inverse_once.result, x_shapes)
    shared = (forward_once.values, inverse_once.values)
    return _GenericLayer(shared, forward_once.call, inverse_once.call)


def _refuse_change(name: str, result: PyTree, x: PyTree) -> None:
    """Raise ValueError if the result of function `name` is not like x; both are trees of ShapeDtypeStructs."""
    expected_structure = jax.tree.structure(x)
    structure = jax.tree.structure(result)
    if structure != expected_structure:
        raise ValueError(f"reversible_scan: {name}: expected a result like x, {expected_structure}, got {structure}")
    pairs = zip(jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(result), strict=True)
    for (keys, old), new in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            path = jax.tree_util.keystr(keys)
            raise ValueError(
                f"reversible_scan: {name}: expected x{path} to stay {old.dtype}{list(old.shape)}, "
                f"got {new.dtype}{list(new.shape)}"
            )


# --- closures and trees of mixed leaves ------------------------------------------------------------------------------


@dataclass(frozen=True)
class HoistedFunction:
    """A traced function with its closed-over values as the first argument.

    Attributes:
        call: (values, *arguments) -> result.
        values: traced values that the original function closes over.
        result: shapes and dtypes of the result, a tree of jax.ShapeDtypeStruct.
    """

    call: Callable[..., PyTree]
    values: list[jax.Array]
    result: PyTree


def hoist_closure(function: Callable[..., PyTree], *examples: PyTree) -> HoistedFunction:
    """Trace `function` for arguments with the shapes and dtypes of `examples`, trees of jax.ShapeDtypeStruct."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*examples)
    structure = jax.tree.structure(result)
    # A value that is not a tracer depends on nothing that is differentiated or mapped, so it stays a constant.
    is_traced = [isinstance(value, core.Tracer) for value in closed.consts]

    def call(values: list[jax.Array], *arguments: PyTree) -> PyTree:
        next_value = iter(values)
        consts = [next(next_value) if traced else const for traced, const in zip(is_traced, closed.consts, strict=True)]
        leaves = core.eval_jaxpr(closed.jaxpr, consts, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(structure, leaves)

    values = [value for traced, value in zip(is_traced, closed.consts, strict=True) if traced]
    return HoistedFunction(call, values, result)


def compute_float_vjp(
    function: Callable[..., PyTree], *arguments: PyTree
) -> tuple[PyTree, Callable[[PyTree], tuple[PyTree, ...]]]:
    """Apply `jax.vjp` to trees of any arrays, including integers, booleans and keys.

    Returns:
        (the float part of the result, a function from its cotangents to those of the arguments). All of them are trees
        with None for leaves that have no gradient, see `framework.layout.floats`.
    """

    def call_with_floats(*float_arguments: PyTree) -> PyTree:
        full_arguments = [fill_none(new, old) for new, old in zip(float_arguments, arguments, strict=True)]
        return floats(function(*full_arguments))

    return jax.vjp(call_with_floats, *(floats(argument) for argument in arguments))


def select_arrays(tree: PyTree) -> PyTree:
    """Return the tree with None for leaves that are not arrays, such as an activation function in an equinox module."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


def select_constants(tree: PyTree) -> PyTree:
    """Return the tree with None for its arrays."""
    return jax.tree.map(lambda leaf: None if is_array(leaf) else leaf, tree)


# --- rounding error of the inverse -----------------------------------------------------------------------------------


def reconstruction_error(
    forward: Callable[..., PyTree], inverse: Callable[..., PyTree], weights: PyTree, x: PyTree, xs: PyTree = None
) -> dict[str, jax.Array]:
    """Run all layers forward and back again, and compare the result with x.

    Layers in bfloat16 drift, because additive couplings subtract values whose low bits were rounded away in the
    addition. The usual remedy is streams in float32 with branches in bfloat16.

    Complexity: each layer once forward and once back. Memory holds x, y and one layer, for any number of layers.

    Args:
        forward, inverse, weights, x, xs: see `reversible_scan`.

    Returns:
        {path of a float array in x: max |x' - x| / max |x|}, float32 scalars; only the numerator if x is all zeros. May
        be jitted. x itself has the path "".

    Raises:
        ValueError: see `reversible_scan`.
    """
    x = jax.tree.map(jnp.asarray, x)
    stacks = (weights,) if xs is None else (weights, xs)
    num_layers(stacks)
    constants = select_constants(stacks)

    def step(function: Callable[..., PyTree]) -> Callable[[PyTree, PyTree], tuple[PyTree, None]]:
        def body(x: PyTree, layer_arrays: PyTree) -> tuple[PyTree, None]:
            layer_weights, *layer_xs = fill_none(layer_arrays, constants)
            return function(layer_weights, x, *layer_xs), None

        return body

    y, _ = lax.scan(step(forward), x, select_arrays(stacks))
    # Without the barrier a compiler might see that a sum is subtracted again, and drop both operations.
    y = lax.optimization_barrier(y)
    back, _ = lax.scan(step(inverse), y, select_arrays(stacks), reverse=True)

    def relative_error(back: jax.Array, x: jax.Array) -> jax.Array:
        # Subtracted in a wider dtype, because the difference would be rounded as well.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        difference = jnp.max(jnp.abs(back.astype(wide) - x.astype(wide)))
        scale = jnp.max(jnp.abs(x.astype(wide)))
        return (difference / jnp.where(scale == 0.0, 1.0, scale)).astype(jnp.float32)

    return flatten(jax.tree.map(relative_error, floats(back), floats(x)))
