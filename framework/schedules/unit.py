"""What one unit of a stack computes, forward and backward, and one stage: no loop, and no placement.

`schedules/stack_pass.py` calls this in loops within one program, `schedules/layerwise/functions.py` makes a program of
each call. Which arrays are where, and when they come and go, is up to them. What becomes of the gradients is in
`schedules/gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.tree_util import SequenceKey

from framework.layers.base import Context, Out
from framework.layers.pull_back import PullBack
from framework.layers.stack import Stack
from framework.layout import Nested, TensorSpec, merge, move_to_host
from framework.models.chain import Chain

Carry = Any  # the pytree of activations that flows from one stage or unit to the next
Cotangent = Any  # the gradient of the loss by a carry, in the structure of that carry
Loss = jax.Array | None  # f32 scalar, a unit's term of the objective; None where units have none

# --- what a unit reads, and what is kept of it -----------------------------------------------------------------------


class UnitConstants(NamedTuple):
    """What one unit reads and is not differentiated by.

    Attributes:
      frozen: the unit's frozen parameters.
      frozen_shared: the frozen ones of the parameters that all units share.
      buffers: the unit's.
      ctx: the unit's.
    """

    frozen: Nested
    frozen_shared: Nested
    buffers: Nested
    ctx: Context


class UnitArguments(NamedTuple):
    """All that one unit is a function of, besides its input."""

    params: Nested  # the unit's trainable parameters
    shared: Nested  # the trainable ones of the parameters that all units share
    constants: UnitConstants


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class UnitResiduals:
    """What is kept of a unit, or of stacked units, for the backward pass.

    A pytree of `leaves`. The other fields are learnt when the unit is traced; as metadata of a pytree they leave the
    scan, or the program, in which that happens, together with the arrays.

    Attributes:
      leaves: what the unit's pull-back holds besides the unit's arguments. Without a pull-back: the leaves of the
        unit's input, from which it runs forward again; of its output, from which it is inverted; or nothing.
      pull_back: what puts the pull-back together again.
      loss: the ShapeDtypeStruct of the unit's loss, or None.
    """

    leaves: list[Any]
    pull_back: PullBack | None
    loss: jax.ShapeDtypeStruct | None

    def with_leaves(self, leaves: list[Any]) -> Self:
        """The same of other leaves: moved ones, say."""
        return replace(self, leaves=leaves)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """(leaves by their paths, metadata), for jax."""
        keyed_leaves = [(SequenceKey(i), leaf) for i, leaf in enumerate(self.leaves)]
        return keyed_leaves, (self.pull_back, self.loss)

    @classmethod
    def tree_unflatten(cls, metadata: Any, leaves: Any) -> Self:
        """The inverse of `tree_flatten_with_keys`, for jax."""
        pull_back, loss = metadata
        return cls(list(leaves), pull_back, loss)


class UnitForward(NamedTuple):
    """What one unit hands on after its forward pass.

    Attributes:
      output: of the unit.
      out: loss, metrics and buffers.
      residuals: what its backward pass needs.
    """

    output: Carry
    out: Out
    residuals: UnitResiduals


class UnitBackward(NamedTuple):
    """What one unit hands on after its backward pass.

    Attributes:
      x: its input, where units are inverted; else None.
      grads: of its trainable parameters.
      shared_grads: of the trainable parameters that all units share.
      ct: the cotangent of its input.
    """

    x: Carry
    grads: Nested
    shared_grads: Nested
    ct: Cotangent


# --- forward and backward --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitFunctions:
    """One unit of a stack; the same function for all of them.

    Attributes:
      name: the stack's, as a stage; names the unit's buffers in profiles and plans.
      stack: that the unit is of.
      function: of `Stack.unit_function`.
    """

    name: str
    stack: Stack
    function: Callable[..., tuple[Carry, Out]]

    def _run(
        self,
        params: Nested,
        shared: Nested,
        x: Carry,
        constants: UnitConstants,
    ) -> tuple[tuple[Carry, Loss], Out]:
        """((output, loss), Out), as a function of what is differentiated."""
        weights = merge(params, constants.frozen)
        shared_weights = merge(shared, constants.frozen_shared)
        with jax.named_scope(self.name):
            y, out = self.function(x, weights, shared_weights, constants.buffers, constants.ctx)
        return (y, out.loss), out

    def forward(self, arguments: UnitArguments, x: Carry) -> UnitForward:
        """Runs the unit on its input `x`, and keeps nothing."""
        (y, loss), out = self._run(arguments.params, arguments.shared, x, arguments.constants)
        return UnitForward(y, out, UnitResiduals([], None, _shapes(loss)))

    def forward_with_residuals(self, arguments: UnitArguments, x: Carry) -> UnitForward:
        """Runs the unit on its input `x`, and keeps what the remat policy says for `backward`."""

        def run(params: Nested, shared: Nested, x: Carry) -> tuple[tuple[Carry, Loss], Out]:
            return self._run(params, shared, x, arguments.constants)

        (y, loss), pull, out = jax.vjp(run, arguments.params, arguments.shared, x, has_aux=True)
        pull_back, leaves = PullBack.split(pull, arguments)
        return UnitForward(y, out, UnitResiduals(leaves, pull_back, _shapes(loss)))

    def backward(
        self,
        arguments: UnitArguments,
        residuals: UnitResiduals,
        ct: Cotangent,
    ) -> UnitBackward:
        """Runs the unit backward, from what `forward_with_residuals` kept.

        Args:
            arguments: as the forward pass had them.
            residuals: on the device.
            ct: the cotangent of the unit's output.
        """
        assert residuals.pull_back is not None
        loss_ct = _loss_cotangent(residuals.loss)
        pull = residuals.pull_back.joined(arguments, residuals.leaves)
        grads, shared_grads, ct = pull((ct, loss_ct))
        return UnitBackward(None, grads, shared_grads, ct)

    def invert(
        self,
        arguments: UnitArguments,
        y: Carry,
        loss: jax.ShapeDtypeStruct | None,
        ct: Cotangent,
    ) -> UnitBackward:
        """Runs the unit backward, from its output `y`: its input is computed on the way.

        Args:
            arguments: as the forward pass had them.
            y: the unit's output.
            loss: see `UnitResiduals`.
            ct: the cotangent of `y`.
        """
        params, shared, constants = arguments
        loss_ct = _loss_cotangent(loss)

        def join(params: Nested, shared: Nested) -> Nested:
            weights = merge(params, constants.frozen)
            shared_weights = merge(shared, constants.frozen_shared)
            return {**weights, **shared_weights}

        with jax.named_scope(self.name):
            x, (grads, shared_grads), ct = self.stack.reverse_unit(
                y, (params, shared), join, constants.buffers, constants.ctx, (ct, loss_ct)
            )
        return UnitBackward(x, grads, shared_grads, ct)


def run_stage(
    model: Chain,
    name: str,
    params: Nested,
    carry: Carry,
    ctx: Context,
    buffers: Nested,
) -> tuple[Carry, Out]:
    """Runs a stage outside of stacks: its output (the loss, of the last one) and its Out.

    Args:
        model: whose stage.
        name: the stage's.
        params: all that it reads, on the device.
        carry: the output of the stage before.
        ctx: the model's.
        buffers: the stage's.
    """
    stage = model.stages[name]
    with jax.named_scope(name):
        weights = stage.prepare(params, ctx)
        y, out = stage.apply(weights, carry, ctx.fold(name), buffers)
    return (out.loss if y is None else y), out


def is_worth_offloading(x: Any) -> bool:
    """Whether an activation, or its shape, is a large matrix: what memory.activations = pinned_host is about."""
    # Random keys, whose dtypes are extended ones, are small.
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    return move_to_host(TensorSpec(x.shape, x.dtype), "pinned_host").memory_kind != "device"


def _shapes(tree: Any) -> Any:
    """The ShapeDtypeStructs of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _loss_cotangent(loss: jax.ShapeDtypeStruct | None) -> Loss:
    """One: a unit's loss is a term of the objective. None for no loss."""
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), loss)
