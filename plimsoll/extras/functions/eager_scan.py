"""Updates inside the backward pass of a loop over stacked layers, with no second copy of the stack.

An `eager` module inside `jax.lax.scan` is correct, but the transposed loop reads one stack and writes another. Here one
`jax.custom_vjp` wraps the whole loop instead. Its backward loop carries weights and state and overwrites each layer's
old values with the new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.extras.functions.module_updates import UpdateOptions, Updater, make_updater, mark_update
from plimsoll.extras.functions.trained_weights import (
    USE_TRACKER,
    Trained,
    Tree,
    decode,
    encode,
    num_layers,
    weights_at,
    wrap_static,
)
from plimsoll.extras.functions.update_rules import RuleFunction
from plimsoll.framework.layers.pull_back import PullBack

# layer(weights, carry, x, *shared) -> (carry, y)
ScanLayer = Callable[..., tuple[Tree, Tree]]


class _ForwardResults(NamedTuple):
    """Residuals that the forward loop saves for the backward loop.

    Attributes:
        trained: the stack.
        xs: per-layer inputs.
        shared: inputs that all layers share.
        residuals: residuals of each layer's pullback, stacked.
    """

    trained: Trained
    xs: Tree
    shared: Tree
    residuals: Residuals


class _BackwardScanCarry(NamedTuple):
    """Carry of the backward loop: the stack, and the cotangents of the layer's input and of the shared inputs."""

    trained: Trained
    cotangent: Cotangents
    shared_cotangents: Cotangents


class EagerStack:
    """Stacked layers that are updated in the backward pass; made by `eager_scan`."""

    def __init__(self, layer: ScanLayer, updater: Updater):
        self.name = updater.name
        self._layer = layer
        self._updater = updater
        apply = jax.custom_vjp(self._forward)
        apply.defvjp(self._forward_with_residuals, self._backward)
        self._apply = apply

    def init(self, stacked_weights: Tree, state: Tree | None = None) -> Trained:
        """Return the stack with the initial state of its optimizer, a separate state for each layer.

        Args:
            stacked_weights: any pytree whose arrays are [L, ...], for L layers.
            state: stacked optimizer state to start from, arrays [L, ...]; None for the initial one.

        Raises:
            ValueError: see `EagerModule.init`; or the arrays do not have the same number of layers.
        """
        encoded_weights, floats = self._updater.encode_weights(stacked_weights)
        num_layers(self.name, encoded_weights)
        state = self._updater.prepare_stack_state(floats, state)
        return Trained(encoded_weights, encode(state), self.name)

    def __call__(self, trained: Trained, carry: Tree, xs: Tree = None, *shared: Tree) -> tuple[Tree, Tree]:
        """Run the layers one after another, as `jax.lax.scan` does.

        Args:
            trained: result of `init` or of the previous update.
            carry: the first layer's input.
            xs: per-layer inputs such as PRNG keys, arrays [L, ...]; None if there are none.
            shared: inputs that all layers get, such as a mask.

        Returns:
            (the last layer's carry, each layer's `y`, stacked).

        Raises:
            TypeError: `trained` does not come from `init`.
            ValueError: the same weights are used twice in a function that is being differentiated, or `xs` has
                a different number of layers.
        """
        if not isinstance(trained, Trained):
            raise TypeError(f"{self.name}: expected the Trained of `init`, given {type(trained).__name__}")
        USE_TRACKER.record(trained, self.name)
        num_layers(self.name, (trained, xs))
        return self._apply(trained, carry, xs, wrap_static(shared))

    def _forward(self, trained: Trained, carry: Tree, xs: Tree, shared: Tree) -> tuple[Tree, Tree]:
        def body(carry: Tree, item: tuple[jax.Array, Tree]) -> tuple[Tree, Tree]:
            index, x = item
            layer = weights_at(trained, index)
            return self._layer(layer.weights, carry, x, *decode(shared))

        return jax.lax.scan(body, carry, (_indices(trained), xs))

    def _forward_with_residuals(
        self, trained: Trained, carry: Tree, xs: Tree, shared: Tree
    ) -> tuple[tuple[Tree, Tree], _ForwardResults]:
        def body(carry: Tree, item: tuple[jax.Array, Tree]) -> tuple[Tree, tuple[Tree, Residuals]]:
            index, x = item
            layer = weights_at(trained, index)

            def call_with_floats(floats: Tree, carry: Tree, x: Tree, shared: Tree) -> tuple[Tree, Tree]:
                return self._layer(layer.weights_with(floats), carry, x, *decode(shared))

            floats = layer.floats
            (carry, y), pull_back = jax.vjp(call_with_floats, floats, carry, x, shared)
            # Arrays that the backward loop can read again are left out of the stacked residuals.
            return carry, (y, Residuals.from_vjp(pull_back, (floats, x, shared)))

        carry, (ys, residuals) = jax.lax.scan(body, carry, (_indices(trained), xs))
        return (carry, ys), _ForwardResults(trained, xs, shared, residuals)

    def _backward(
        self, forward_results: _ForwardResults, cotangents: tuple[Tree, Tree]
    ) -> tuple[Trained, Tree, Tree, Tree]:
        carry_cotangent, ys_cotangents = cotangents

        def body(carry: _BackwardScanCarry, item: Any) -> tuple[_BackwardScanCarry, Cotangents]:
            index, x, residuals, y_cotangents = item
            layer = self._updater.get_layer(carry.trained, index)
            pull_back = residuals.pull_back((layer.floats, x, forward_results.shared))
            gradient, cotangent, x_cotangents, shared_cotangents = pull_back(
                (carry.cotangent.restore(), y_cotangents.restore_slice())
            )
            # The preceding layer waits for the update, so that only one layer's gradients exist at a time.
            later = (cotangent, x_cotangents)
            stack, later = self._updater.apply_layer_update(carry.trained, index, layer, gradient, later)
            cotangent, x_cotangents = later
            summed = jax.tree.map(jnp.add, carry.shared_cotangents, Cotangents.from_vjp(shared_cotangents))
            new_carry = _BackwardScanCarry(stack, Cotangents.from_vjp(cotangent), summed)
            return new_carry, Cotangents.from_vjp(x_cotangents)

        first = _BackwardScanCarry(
            forward_results.trained, Cotangents.from_vjp(carry_cotangent), _zeros(forward_results.shared)
        )
        items = (
            _indices(forward_results.trained),
            forward_results.xs,
            forward_results.residuals,
            Cotangents.from_vjp(ys_cotangents),
        )
        last, xs_cotangents = jax.lax.scan(body, first, items, reverse=True)
        length = num_layers(self.name, forward_results.trained)
        return (
            mark_update(last.trained, self.name),
            last.cotangent.restore(),
            xs_cotangents.restore_stack(length),
            last.shared_cotangents.restore(),
        )


def eager_scan(layer: ScanLayer, optimizer_or_rule: Any | RuleFunction, **options: Unpack[UpdateOptions]) -> EagerStack:
    """Make a loop over stacked layers that updates each layer inside the backward pass.

        stack = pl.eager_scan(layer, optax.adamw(1e-3), name="stack")
        trained = stack.init(stacked_weights)
        y, ys = stack(trained, x, keys)

    The forward pass saves the residuals of each layer's `jax.vjp`, except for weights and `xs`, which the backward pass
    reads from the stack. A layer in `jax.checkpoint` saves only its input.

    Complexity, for L layers with P bytes of weights, S bytes of state and X bytes of input each: the arithmetic of
    `jax.grad` of a `jax.lax.scan`, and of the optimizer. If the arguments are donated and the layer is in
    `jax.checkpoint`, a step holds L (P + S + X), one layer's gradient P, and the residuals of one layer. With a
    `stream`, L S is in host memory, and one chunk of it on the device.

    Args:
        layer: `layer(weights, carry, x, *shared) -> (carry, y)`, as for `jax.lax.scan`.
        optimizer_or_rule: the optimizer, with a separate state for each layer, as if it were the only one; see `eager`.
        options: options for each layer; see `eager`, also for the errors raised.
    """
    return EagerStack(layer, make_updater(optimizer_or_rule, **options))


def _indices(trained: Trained) -> jax.Array:
    return jnp.arange(num_layers(trained.name, trained))


def _zeros(tree: Tree) -> Cotangents:
    """Return cotangents that are all zero."""

    def zero(leaf: Any) -> Any:
        has_cotangent = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.zeros_like(leaf) if has_cotangent else np.zeros(leaf.shape, jax.dtypes.float0)

    return Cotangents.from_vjp(jax.tree.map(zero, tree))


# --- values that the loop passes from its forward to its backward pass -----------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """The arrays that a pullback holds in addition to its arguments; a pytree that a loop can stack and slice."""

    arrays: list[Any]
    frame: PullBack = field(metadata={"static": True})

    @staticmethod
    def from_vjp(pull_back: Callable[[Tree], Tree], arguments: Tree) -> Residuals:
        """Split a pullback of `jax.vjp` into arrays and a static frame; see `PullBack.split`."""
        frame, arrays = PullBack.split(pull_back, arguments)
        return Residuals(arrays, frame)

    def pull_back(self, arguments: Tree) -> Callable[[Tree], Tree]:
        """Rebuild the pullback from the original arguments."""
        return self.frame.rebuild(arguments, self.arrays)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NoCotangent:
    """Placeholder for the cotangent of a non-float array, which a loop cannot carry."""

    shape: tuple[int, ...]


class Cotangents(NamedTuple):
    """Cotangents in a form that a loop can carry."""

    tree: Tree

    @staticmethod
    def from_vjp(cotangents: Tree) -> Cotangents:
        """Convert cotangents that `jax.vjp` returns or takes."""

        # A float0 array has no data, so its shape is enough to restore it.
        def to_carry(leaf: Any) -> Any:
            return _NoCotangent(leaf.shape) if leaf.dtype == jax.dtypes.float0 else leaf

        return Cotangents(jax.tree.map(to_carry, cotangents))

    def restore(self) -> Tree:
        """Return the original cotangents, the inverse of `from_vjp`."""
        return self._map(lambda shape: shape)

    def _map(self, get_shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Tree:
        def leaf(node: Any) -> Any:
            if isinstance(node, _NoCotangent):
                return np.zeros(get_shape(node.shape), jax.dtypes.float0)
            return node

        return jax.tree.map(leaf, self.tree, is_leaf=lambda node: isinstance(node, _NoCotangent))

    def restore_slice(self) -> Tree:
        """Return the cotangents of one iteration, for floats that a loop has sliced along their first axis."""
        return self._map(lambda shape: shape[1:])

    def restore_stack(self, length: int) -> Tree:
        """Return the cotangents of all iterations, for floats that a loop has stacked."""
        return self._map(lambda shape: (length, *shape))
