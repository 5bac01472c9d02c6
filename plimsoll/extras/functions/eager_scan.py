"""Updates inside the backward pass of a loop over stacked layers, with no second copy of the stack.

An `eager` module inside `jax.lax.scan` is correct, but the transposed loop reads one stack and writes another. Here one
`jax.custom_vjp` wraps the whole loop instead. Its backward loop carries weights and state and overwrites each layer's
old values with the new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.extras.functions.module_updates import UpdateOptions, Updater, make_updater, mark_update
from plimsoll.extras.functions.trained_weights import Trained, decode, encode, num_layers, record_use, wrap_static
from plimsoll.extras.functions.update_rules import Optimizer, RuleFunction
from plimsoll.framework.layers.pull_back import PullBack
from plimsoll.framework.layout import PyTree

# layer(weights, carry, x, *shared) -> (carry, y)
ScanLayer = Callable[..., tuple[PyTree, PyTree]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _ForwardResults:
    """Residuals that the forward loop saves for the backward loop.

    Attributes:
        trained: the stack.
        xs: per-layer inputs.
        shared: inputs that all layers share.
        residuals: residuals of each layer's pullback, stacked.
    """

    trained: Trained
    xs: PyTree
    shared: PyTree
    residuals: Residuals


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _BackwardScanCarry:
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

    def init(self, stacked_weights: PyTree, state: PyTree | None = None) -> Trained:
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

    def __call__(self, trained: Trained, carry: PyTree, xs: PyTree = None, *shared: PyTree) -> tuple[PyTree, PyTree]:
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
        record_use(trained, self.name)
        num_layers(self.name, (trained, xs))
        return self._apply(trained, carry, xs, wrap_static(shared))

    def _forward(self, trained: Trained, carry: PyTree, xs: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        def body(carry: PyTree, item: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
            index, x = item
            layer = trained.slice_weights(index)
            return self._layer(layer.weights, carry, x, *decode(shared))

        return jax.lax.scan(body, carry, (jnp.arange(num_layers(self.name, trained)), xs))

    def _forward_with_residuals(
        self, trained: Trained, carry: PyTree, xs: PyTree, shared: PyTree
    ) -> tuple[tuple[PyTree, PyTree], _ForwardResults]:
        def body(carry: PyTree, item: tuple[jax.Array, PyTree]) -> tuple[PyTree, tuple[PyTree, Residuals]]:
            index, x = item
            layer = trained.slice_weights(index)

            def call_with_floats(floats: PyTree, carry: PyTree, x: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
                return self._layer(layer.weights_with(floats), carry, x, *decode(shared))

            floats = layer.floats
            (carry, y), pull_back = jax.vjp(call_with_floats, floats, carry, x, shared)
            # Arrays that the backward loop can read again are left out of the stacked residuals.
            frame, arrays = PullBack.split(pull_back, (floats, x, shared))
            return carry, (y, Residuals(arrays, frame))

        carry, (ys, residuals) = jax.lax.scan(body, carry, (jnp.arange(num_layers(self.name, trained)), xs))
        return (carry, ys), _ForwardResults(trained, xs, shared, residuals)

    def _backward(
        self, forward_results: _ForwardResults, cotangents: tuple[PyTree, PyTree]
    ) -> tuple[Trained, PyTree, PyTree, PyTree]:
        carry_cotangent, ys_cotangents = cotangents

        def body(
            carry: _BackwardScanCarry, item: tuple[jax.Array, PyTree, Residuals, Cotangents]
        ) -> tuple[_BackwardScanCarry, Cotangents]:
            index, x, residuals, y_cotangents = item
            layer = self._updater.get_layer(carry.trained, index)
            pull_back = residuals.frame.rebuild((layer.floats, x, forward_results.shared), residuals.arrays)
            gradient, cotangent, x_cotangents, shared_cotangents = pull_back(
                (carry.cotangent.restore(), y_cotangents.restore(lambda shape: shape[1:]))
            )
            # The preceding layer waits for the update, so that only one layer's gradients exist at a time.
            later = (cotangent, x_cotangents)
            stack, later = self._updater.apply_layer_update(carry.trained, index, layer, gradient, later)
            cotangent, x_cotangents = later
            summed = jax.tree.map(jnp.add, carry.shared_cotangents, Cotangents.from_vjp(shared_cotangents))
            new_carry = _BackwardScanCarry(stack, Cotangents.from_vjp(cotangent), summed)
            return new_carry, Cotangents.from_vjp(x_cotangents)

        length = num_layers(self.name, forward_results.trained)
        first = _BackwardScanCarry(
            forward_results.trained, Cotangents.from_vjp(carry_cotangent), _zeros(forward_results.shared)
        )
        items = (jnp.arange(length), forward_results.xs, forward_results.residuals, Cotangents.from_vjp(ys_cotangents))
        last, xs_cotangents = jax.lax.scan(body, first, items, reverse=True)
        return (
            mark_update(last.trained, self.name),
            last.cotangent.restore(),
            xs_cotangents.restore(lambda shape: (length, *shape)),
            last.shared_cotangents.restore(),
        )


def eager_scan(
    layer: ScanLayer, optimizer_or_rule: Optimizer | RuleFunction, **options: Unpack[UpdateOptions]
) -> EagerStack:
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


def _zeros(tree: PyTree) -> Cotangents:
    """Return cotangents that are all zero."""

    def zero(leaf: jax.Array) -> jax.Array | np.ndarray:
        has_cotangent = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.zeros_like(leaf) if has_cotangent else np.zeros(leaf.shape, jax.dtypes.float0)

    return Cotangents.from_vjp(jax.tree.map(zero, tree))


# --- values that the loop passes from its forward to its backward pass -----------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """The arrays that a pullback holds in addition to its arguments; a pytree that a loop can stack and slice.

    Attributes:
        arrays, frame: the two parts of the pullback, see `PullBack.split`.
    """

    arrays: list[jax.Array]
    frame: PullBack = field(metadata={"static": True})


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NoCotangent:
    """Placeholder for the cotangent of a non-float array, which a loop cannot carry."""

    shape: tuple[int, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cotangents:
    """Cotangents in a form that a loop can carry."""

    tree: PyTree

    @staticmethod
    def from_vjp(cotangents: PyTree) -> Cotangents:
        """Convert cotangents that `jax.vjp` returns or takes."""

        # A float0 array has no data, so its shape is enough to restore it.
        def to_carry(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray | _NoCotangent:
            return _NoCotangent(leaf.shape) if leaf.dtype == jax.dtypes.float0 else leaf

        return Cotangents(jax.tree.map(to_carry, cotangents))

    def restore(self, get_shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape) -> PyTree:
        """Return the cotangents as `jax.vjp` returns or takes them, the inverse of `from_vjp`.

        Args:
            get_shape: (old shape) -> new shape of a cotangent that holds no data, if a loop has sliced or stacked the
                others along their first axis.
        """

        def leaf(node: jax.Array | _NoCotangent) -> jax.Array | np.ndarray:
            if isinstance(node, _NoCotangent):
                return np.zeros(get_shape(node.shape), jax.dtypes.float0)
            return node

        return jax.tree.map(leaf, self.tree, is_leaf=lambda node: isinstance(node, _NoCotangent))
