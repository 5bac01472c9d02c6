"""The computation of one layer of a stack, forward and backward, and of one stage, without loops or placement.

A "layer" is one iteration of the stack's loop: one period of its pattern. `schedules/stack_pass.py`
calls these functions in loops within one program; `schedules/layerwise/layer_functions.py` compiles a program for each
call. The callers decide where arrays are stored and when they are moved. `schedules/gradients.py` processes the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.tree_util import SequenceKey

from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layers.pull_back import PullBack
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import Nested, TensorSpec, merge, move_to_host
from plimsoll.framework.models.chain import Chain

Carry = Any  # the pytree of activations that flows from one stage or layer to the next
Cotangent = Any  # the gradient of the loss with respect to a carry, in the structure of that carry
Loss = jax.Array | None  # f32 scalar, a layer's term of the objective; None where layers have none

# --- arguments and residuals of a layer ------------------------------------------------------------------------------


class LayerConstants(NamedTuple):
    """Inputs of one layer that are not differentiated.

    Attributes:
        frozen: the layer's frozen parameters.
        frozen_shared: the frozen parameters that all layers share.
        buffers: the layer's buffers.
        ctx: the layer's context.
    """

    frozen: Nested
    frozen_shared: Nested
    buffers: Nested
    ctx: Context


class LayerArguments(NamedTuple):
    """All arguments of one layer except its input."""

    params: Nested  # the layer's trainable parameters
    shared: Nested  # the trainable parameters that all layers share
    constants: LayerConstants


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class LayerResiduals:
    """Residuals that one or more layers save for the backward pass.

    A pytree of `leaves`. The other fields become known when the layer is traced. As pytree metadata they leave the
    scan, or the program, together with the arrays.

    Attributes:
        leaves: what the layer's pull-back holds in addition to the layer's arguments. Without a pull-back: the leaves
            of the layer's input, from which it runs forward again; of its output, from which it is inverted; or
            nothing.
        pull_back: rebuilds the pull-back from the leaves and the arguments.
        loss: the ShapeDtypeStruct of the layer's loss, or None.
    """

    leaves: list[Any]
    pull_back: PullBack | None
    loss: jax.ShapeDtypeStruct | None

    def with_leaves(self, leaves: list[Any]) -> Self:
        """Return the same residuals with other leaves, for example after moving them."""
        return replace(self, leaves=leaves)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Return (leaves by path, metadata), as JAX requires."""
        keyed_leaves = [(SequenceKey(i), leaf) for i, leaf in enumerate(self.leaves)]
        return keyed_leaves, (self.pull_back, self.loss)

    @classmethod
    def tree_unflatten(cls, metadata: Any, leaves: Any) -> Self:
        """Invert `tree_flatten_with_keys`, as JAX requires."""
        pull_back, loss = metadata
        return cls(list(leaves), pull_back, loss)


class LayerForward(NamedTuple):
    """The result of one layer's forward pass.

    Attributes:
        output: output of the layer.
        out: loss, metrics and buffers.
        residuals: what the backward pass needs.
    """

    output: Carry
    out: Out
    residuals: LayerResiduals


class LayerBackward(NamedTuple):
    """The result of one layer's backward pass.

    Attributes:
        x: the layer's input, where layers are inverted; else None.
        grads: gradients of its trainable parameters.
        shared_grads: gradients of the trainable parameters that all layers share.
        ct: the cotangent of its input.
    """

    x: Carry
    grads: Nested
    shared_grads: Nested
    ct: Cotangent


# --- forward and backward --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerComputation:
    """The computation of any layer of a stack; all layers use the same function.

    Attributes:
        name: the stack's stage name; it also names the layer's buffers in profiles and plans.
        stack: the stack that contains the layer.
        function: the result of `Stack.layer_function`.
    """

    name: str
    stack: Stack
    function: Callable[..., tuple[Carry, Out]]

    def _run(
        self, params: Nested, shared: Nested, x: Carry, constants: LayerConstants
    ) -> tuple[tuple[Carry, Loss], Out]:
        """Return ((output, loss), Out) as a function of the differentiated arguments."""
        weights = merge(params, constants.frozen)
        shared_weights = merge(shared, constants.frozen_shared)
        with jax.named_scope(self.name):
            y, out = self.function(x, weights, shared_weights, constants.buffers, constants.ctx)
        return (y, out.loss), out

    def forward(self, arguments: LayerArguments, x: Carry) -> LayerForward:
        """Run the layer on its input `x` without saving residuals."""
        (y, loss), out = self._run(arguments.params, arguments.shared, x, arguments.constants)
        return LayerForward(y, out, LayerResiduals([], None, _shapes(loss)))

    def forward_with_residuals(self, arguments: LayerArguments, x: Carry) -> LayerForward:
        """Run the layer on its input `x`, and save the residuals that the remat policy selects for `backward`."""

        def run(params: Nested, shared: Nested, x: Carry) -> tuple[tuple[Carry, Loss], Out]:
            return self._run(params, shared, x, arguments.constants)

        (y, loss), pull, out = jax.vjp(run, arguments.params, arguments.shared, x, has_aux=True)
        pull_back, leaves = PullBack.split(pull, arguments)
        return LayerForward(y, out, LayerResiduals(leaves, pull_back, _shapes(loss)))

    def backward(self, arguments: LayerArguments, residuals: LayerResiduals, ct: Cotangent) -> LayerBackward:
        """Run the layer backward, from the residuals of `forward_with_residuals`.

        Args:
            arguments: the arguments of the forward pass.
            residuals: the layer's residuals, on the device.
            ct: the cotangent of the layer's output.
        """
        assert residuals.pull_back is not None
        loss_ct = _loss_cotangent(residuals.loss)
        pull = residuals.pull_back.rebuild(arguments, residuals.leaves)
        grads, shared_grads, ct = pull((ct, loss_ct))
        return LayerBackward(None, grads, shared_grads, ct)

    def invert(
        self, arguments: LayerArguments, y: Carry, loss: jax.ShapeDtypeStruct | None, ct: Cotangent
    ) -> LayerBackward:
        """Run the layer backward from its output `y`, computing its input in the process.

        Args:
            arguments: the arguments of the forward pass.
            y: the layer's output.
            loss: see `LayerResiduals`.
            ct: the cotangent of `y`.
        """
        params, shared, constants = arguments
        loss_ct = _loss_cotangent(loss)

        def join(params: Nested, shared: Nested) -> Nested:
            weights = merge(params, constants.frozen)
            shared_weights = merge(shared, constants.frozen_shared)
            return {**weights, **shared_weights}

        with jax.named_scope(self.name):
            x, (grads, shared_grads), ct = self.stack.reverse_layer(
                y, (params, shared), join, constants.buffers, constants.ctx, (ct, loss_ct)
            )
        return LayerBackward(x, grads, shared_grads, ct)


def run_stage(
    model: Chain, name: str, params: Nested, carry: Carry, ctx: Context, buffers: Nested
) -> tuple[Carry, Out]:
    """Run a stage outside the stacks: (its output, or the loss if it is the last stage; its `Out`).

    Args:
        model: the model that contains the stage.
        name: name of the stage.
        params: all parameters that the stage reads, on the device.
        carry: the output of the previous stage.
        ctx: the model's context.
        buffers: the stage's buffers.
    """
    stage = model.stages[name]
    with jax.named_scope(name):
        weights = stage.prepare(params, ctx)
        y, out = stage.apply(weights, carry, ctx.fold(name), buffers)
    return (out.loss if y is None else y), out


def is_worth_offloading(x: Any) -> bool:
    """Return whether an activation, or its shape, is a matrix large enough for memory.activations = pinned_host."""
    # Random keys, which have extended dtypes, are small.
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    return move_to_host(TensorSpec(x.shape, x.dtype), "pinned_host").memory_kind != "device"


def _shapes(tree: Any) -> Any:
    """Return the ShapeDtypeStructs of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _loss_cotangent(loss: jax.ShapeDtypeStruct | None) -> Loss:
    """Return ones, because a layer's loss is a term of the objective; None if there is no loss."""
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), loss)
