"""One layer of a reversible scan: its forward function, and a reverse pass that returns input and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from plimsoll.extras.functions.closures import compute_float_vjp, hoist_closure, select_arrays, select_constants
from plimsoll.extras.functions.coupling import add_branch, find_coupling, subtract_branch
from plimsoll.extras.functions.leaves import is_float
from plimsoll.framework.layout import fill_none

# (values that the layers share, arrays of a layer, x) -> a tree of arrays.
LayerFunction = Callable[[Any, Any, Any], Any]


class ReverseResult(NamedTuple):
    """Result of a layer's reverse pass. Cotangents have None for integers, booleans and keys.

    Attributes:
        x: the layer's input.
        x_ct: cotangent of the input.
        layer_ct: cotangent of the layer's own arrays.
        shared_ct: cotangent of the values that the layers share.
    """

    x: Any
    x_ct: Any
    layer_ct: Any
    shared_ct: Any


class ReversibleLayer(Protocol):
    """A layer that runs forward and in reverse."""

    @property
    def shared(self) -> Any:
        """Traced values that its functions close over, shared by all layers."""
        ...

    def forward(self, shared: Any, layer_arrays: Any, x: Any) -> Any:
        """Return the layer's output."""
        ...

    def reverse(self, shared: Any, layer_arrays: Any, y: Any, y_ct: Any) -> ReverseResult:
        """Return the layer's input and the gradients, given its output and the output's cotangent."""
        ...


@dataclass(frozen=True)
class _GenericLayer:
    """A layer made of any two functions that are inverse to each other."""

    shared: tuple[Any, Any]
    forward_function: LayerFunction
    inverse_function: LayerFunction

    def forward(self, shared: Any, layer_arrays: Any, x: Any) -> Any:
        forward_shared, _ = shared
        return self.forward_function(forward_shared, layer_arrays, x)

    def reverse(self, shared: Any, layer_arrays: Any, y: Any, y_ct: Any) -> ReverseResult:
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

    shared: tuple[Any, Any]
    f: LayerFunction
    g: LayerFunction

    def forward(self, shared: Any, layer_arrays: Any, x: Any) -> Any:
        f_shared, g_shared = shared
        x1, x2 = x
        y1 = add_branch(x1, self.f(f_shared, layer_arrays, x2))
        y2 = add_branch(x2, self.g(g_shared, layer_arrays, y1))
        return y1, y2

    def reverse(self, shared: Any, layer_arrays: Any, y: Any, y_ct: Any) -> ReverseResult:
        f_shared, g_shared = shared
        y1, y2 = y
        y1_ct, y2_ct = y_ct
        h2, pull = compute_float_vjp(self.g, g_shared, layer_arrays, y1)
        x2 = subtract_branch(y2, h2)
        g_ct, g_layer_ct, g_input_ct = pull(_cast(y2_ct, h2))
        y1_ct = jax.tree.map(jnp.add, y1_ct, g_input_ct)
        # The barrier finishes the gradients of g before the activations of f exist: a compiler might keep both alive.
        barrier_inputs = (y1, x2, y1_ct, g_ct, g_layer_ct)
        y1, x2, y1_ct, g_ct, g_layer_ct = lax.optimization_barrier(barrier_inputs)
        h1, pull = compute_float_vjp(self.f, f_shared, layer_arrays, x2)
        x1 = subtract_branch(y1, h1)
        f_ct, f_layer_ct, f_input_ct = pull(_cast(y1_ct, h1))
        x2_ct = jax.tree.map(jnp.add, y2_ct, f_input_ct)
        layer_ct = jax.tree.map(jnp.add, f_layer_ct, g_layer_ct)
        return ReverseResult((x1, x2), (y1_ct, x2_ct), layer_ct, (f_ct, g_ct))


def make_layer(
    forward: Callable[..., Any], inverse: Callable[..., Any], stacks: tuple[Any, ...], x: Any
) -> ReversibleLayer:
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

    def bind_constants(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """Return the function of (arrays of a layer, x)."""

        def call_with_arrays(layer_arrays: Any, x: Any) -> Any:
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


def _cast(ct: Any, branch: Any) -> Any:
    """Cast a stream's cotangent to the dtype of the branch that was added to the stream."""
    return jax.tree.map(lambda ct, h: ct.astype(h.dtype), ct, branch)


def _refuse_change(name: str, result: Any, x: Any) -> None:
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
