"""One layer of a stack: its forward pass, its pull-back, and the movement of its weights and residuals.

A "layer" is one iteration of the stack's loop: one period of its pattern. `LayerComputation` has the pure functions;
`layerwise/layer_functions.py` compiles a program for each call and decides where arrays are. `LayerPass` adds the
movement of arrays inside the loops of `backward.py`: the layer's weights are sliced out of the stacks just before the
layer runs. Weights in host memory are fetched one layer ahead. Large residuals are offloaded to host memory and brought
back for the backward pass. `gradients.py` processes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import GetAttrKey, SequenceKey

from plimsoll.framework.layers import grad_accumulation
from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layers.pull_back import PullBack
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import (
    Nested,
    PyTree,
    TensorSpec,
    constrain_row_major,
    fetch_leaf,
    flatten,
    merge,
    move_to_host,
    unflatten,
)
from plimsoll.framework.learner.update import slice_layer
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.schedules.backward_state import Weights
from plimsoll.framework.schedules.gradients import shard_gradients

Carry: TypeAlias = PyTree  # the activations that flow from one stage or layer to the next
Cotangent: TypeAlias = PyTree  # the gradient of the loss with respect to a carry, in the structure of that carry
Loss = jax.Array | None  # f32 scalar, a layer's term of the objective; None where layers have none
T = TypeVar("T")

# --- arguments and residuals of a layer ------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerConstants:
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerArguments:
    """All arguments of one layer except its input.

    Attributes:
        params: the layer's trainable parameters.
        shared: the trainable parameters that all layers share.
        constants: the inputs that are not differentiated.
    """

    params: Nested
    shared: Nested
    constants: LayerConstants


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class LayerResiduals:
    """Residuals that one or more layers save for the backward pass.

    A pytree of `leaves`, each under its number: layer programs name their results after it. The other fields become
    known when the layer is traced. As pytree metadata they leave the scan, or the program, together with the arrays.

    Attributes:
        leaves: what the layer's pull-back holds in addition to the layer's arguments. Without a pull-back: the leaves
            of the layer's input, from which it runs forward again; of its output, from which it is inverted; or
            nothing.
        pull_back: rebuilds the pull-back from the leaves and the arguments.
        loss: the ShapeDtypeStruct of the layer's loss, or None.
        offloaded: for each leaf, whether `LayerPass` moved it to host memory.
        buffers: where a pass runs several microbatches, the layer's buffers before each of them, stacked; else {}.
    """

    leaves: list[jax.Array]
    pull_back: PullBack | None
    loss: jax.ShapeDtypeStruct | None
    offloaded: tuple[bool, ...] = ()
    buffers: Nested = field(default_factory=dict)

    def with_leaves(self, leaves: Sequence[object]) -> Self:
        """Return the same residuals with other leaves: the same arrays in another memory, or their specs."""
        return replace(self, leaves=list(leaves))

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, PyTree]], tuple[object, ...]]:
        """Return (children by key, metadata), as JAX requires."""
        keyed_leaves: list[tuple[object, PyTree]] = [(SequenceKey(i), leaf) for i, leaf in enumerate(self.leaves)]
        keyed_leaves.append((GetAttrKey("buffers"), self.buffers))
        return keyed_leaves, (self.pull_back, self.loss, self.offloaded)

    @classmethod
    def tree_unflatten(
        cls, metadata: tuple[PullBack | None, jax.ShapeDtypeStruct | None, tuple[bool, ...]], children: Iterable[PyTree]
    ) -> Self:
        """Invert `tree_flatten_with_keys`, as JAX requires."""
        pull_back, loss, offloaded = metadata
        *leaves, buffers = children
        return cls(leaves, pull_back, loss, offloaded, buffers)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerForward:
    """The result of one layer's forward pass.

    Attributes:
        output: output of the layer.
        out: loss, metrics and buffers.
        residuals: what the backward pass needs.
    """

    output: Carry
    out: Out
    residuals: LayerResiduals


@dataclass(frozen=True)
class LayerBackward:
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


# --- the computation -------------------------------------------------------------------------------------------------


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
        return LayerForward(y, out, LayerResiduals([], None, _loss_shape(loss)))

    def forward_with_residuals(self, arguments: LayerArguments, x: Carry) -> LayerForward:
        """Run the layer on its input `x`, and save the residuals that the remat policy selects for `backward`."""

        def run(params: Nested, shared: Nested, x: Carry) -> tuple[tuple[Carry, Loss], Out]:
            return self._run(params, shared, x, arguments.constants)

        (y, loss), pull, out = jax.vjp(run, arguments.params, arguments.shared, x, has_aux=True)
        pull_back, leaves = PullBack.split(pull, arguments)
        return LayerForward(y, out, LayerResiduals(leaves, pull_back, _loss_shape(loss)))

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
        constants = arguments.constants
        loss_ct = _loss_cotangent(loss)

        def join(params: Nested, shared: Nested) -> Nested:
            weights = merge(params, constants.frozen)
            shared_weights = merge(shared, constants.frozen_shared)
            return {**weights, **shared_weights}

        with jax.named_scope(self.name):
            result = self.stack.reverse_layer(
                y, (arguments.params, arguments.shared), join, constants.buffers, constants.ctx, (ct, loss_ct)
            )
        grads, shared_grads = result.grads
        return LayerBackward(result.carry, grads, shared_grads, result.ct)


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


def _loss_shape(loss: Loss) -> jax.ShapeDtypeStruct | None:
    return None if loss is None else jax.ShapeDtypeStruct(loss.shape, loss.dtype)


def _loss_cotangent(loss: jax.ShapeDtypeStruct | None) -> Loss:
    """Return one, because a layer's loss is a term of the objective; None if there is no loss."""
    return None if loss is None else jnp.ones(loss.shape, loss.dtype)


# --- the computation inside a loop over layers -----------------------------------------------------------------------


@dataclass(frozen=True)
class LayerPass:
    """Forward and backward pass of any one layer of a stack.

    Attributes:
        layer: the computation of the layer.
        ctx: the stack's context.
        buffers: the buffers of all layers, stacked.
        shared: the parameters that all layers share, on the device.
        specs: specs of the stacked parameters, by path.
        mesh: the device mesh of the layout.
        offloads: whether large residuals go to host memory.
        in_groups: whether layers run in groups (memory.remat = sqrt). Only a group's input outlives the group's own
            pass.
        num_microbatches: number of microbatches that run through a layer before the next layer. If it is over 1, the
            context's batch and rows and all activations have a leading axis of this size.
    """

    layer: LayerComputation
    ctx: Context
    buffers: Nested
    shared: Weights
    specs: Mapping[str, TensorSpec]
    mesh: Mesh
    offloads: bool
    in_groups: bool
    num_microbatches: int = 1

    @property
    def inverts(self) -> bool:
        """Return whether the backward pass computes a layer's input from its output."""
        return self.ctx.remat == "invert"

    def prefetch(self, stacks: Weights, index: jax.Array) -> dict[str, jax.Array]:
        """Start fetching a layer's offloaded parameters to the device; return them by path."""
        layer_leaves = {}
        for stack in (stacks.trainable, stacks.frozen):
            for path, leaf in flatten(stack).items():
                if self.specs[path].is_offloaded:
                    layer_leaves[path] = fetch_leaf(self.specs[path], slice_layer(leaf, index))
        return layer_leaves

    def take_weights(
        self, stacks: Weights, index: jax.Array, fetched: dict[str, jax.Array], carry: T
    ) -> tuple[Weights, T]:
        """Slice out a layer's parameters just before the layer runs: (parameters, carry).

        The optimization barrier keeps the compiler from slicing them earlier.

        Args:
            stacks: the parameters of all layers, stacked.
            index: index of the layer.
            fetched: the layer's offloaded parameters, from `prefetch`.
            carry: values that are ready when the layer runs; the slices depend on them.
        """
        trainable_stacks = flatten(stacks.trainable)
        # Offloaded leaves arrived while the previous layer ran; the others are slices of their stacks.
        leaves = {}
        for path, stack in {**trainable_stacks, **flatten(stacks.frozen)}.items():
            leaves[path] = fetched[path] if path in fetched else slice_layer(stack, index)
        trainable = {}
        frozen = {}
        for path, leaf in leaves.items():
            # The first axis of a stacked spec is the layer axis.
            row_major_leaf = constrain_row_major(leaf, self.specs[path].mesh_axes[1:], self.mesh)
            (trainable if path in trainable_stacks else frozen)[path] = row_major_leaf
        layer = Weights(unflatten(frozen), unflatten(trainable))
        return jax.lax.optimization_barrier((layer, carry))

    def forward(self, weights: Weights, index: jax.Array, x: Carry) -> LayerForward:
        """Run the layer at `index` on its input `x`, with the weights that `take_weights` returned."""
        run = self.layer.forward if self.inverts else self.layer.forward_with_residuals
        if self.num_microbatches > 1:
            run = partial(self._forward_each, run)
        result = run(self._arguments(weights, index), x)
        residuals = result.residuals
        # Residuals within a group stay on the device: the group's own backward pass needs them right away.
        moves = not self.in_groups
        offloaded = [moves and self.goes_to_host(leaf) for leaf in residuals.leaves]
        leaves = move_leaves(offloaded, residuals.leaves, to_host=True)
        return replace(result, residuals=replace(residuals, leaves=leaves, offloaded=tuple(offloaded)))

    def backward(
        self, weights: Weights, residuals: LayerResiduals, index: jax.Array, y: Carry, ct: Cotangent
    ) -> LayerBackward:
        """Run the layer at `index` backward.

        Args:
            weights: the layer's parameters, from `take_weights`.
            residuals: the layer's residuals.
            index: index of the layer.
            y: the layer's output, where layers are inverted; else None.
            ct: the cotangent of the layer's output.
        """
        arguments = self._arguments(weights, index)
        leaves = move_leaves(list(residuals.offloaded), residuals.leaves, to_host=False)
        run = self._backward_one if self.num_microbatches == 1 else self._backward_each
        return run(arguments, residuals.with_leaves(leaves), y, ct)

    def _backward_one(
        self, arguments: LayerArguments, residuals: LayerResiduals, y: Carry, ct: Cotangent
    ) -> LayerBackward:
        if self.inverts:
            return self.layer.invert(arguments, y, residuals.loss, ct)
        return self.layer.backward(arguments, residuals, ct)

    # --- several microbatches ----------------------------------------------------------------------------------------

    def _forward_each(
        self, run: Callable[[LayerArguments, Carry], LayerForward], arguments: LayerArguments, x: Carry
    ) -> LayerForward:
        """Run the layer on each microbatch; losses and metrics are added up.

        Args:
            run: runs the layer on one microbatch.
            arguments: the arguments of the layer, for all microbatches.
            x: the inputs of all microbatches, stacked.
        """
        constants = arguments.constants

        def body(buffers: Nested, micro: tuple[Carry, Nested, jax.Array | None]) -> tuple[Nested, LayerForward]:
            x, batch, rows = micro
            ctx = replace(constants.ctx, batch=batch, rows=rows)
            # `PullBack.split` finds the weights by identity. The barrier makes them values of this loop's body.
            weights = (arguments.params, arguments.shared, constants.frozen, constants.frozen_shared)
            (params, shared, frozen, frozen_shared), x = jax.lax.optimization_barrier((weights, x))
            result = run(LayerArguments(params, shared, LayerConstants(frozen, frozen_shared, buffers, ctx)), x)
            residuals = replace(result.residuals, buffers=buffers)
            out = replace(result.out, layer_state={})
            return result.out.layer_state, replace(result, out=out, residuals=residuals)

        ctx = constants.ctx
        buffers, results = jax.lax.scan(body, constants.buffers, (x, ctx.batch, ctx.rows))
        return replace(results, out=add_outs(results.out, buffers))

    def _backward_each(
        self, arguments: LayerArguments, residuals: LayerResiduals, y: Carry, ct: Cotangent
    ) -> LayerBackward:
        """Run the layer backward on each microbatch, and add up the gradients in float32 or wider.

        Args:
            arguments: the arguments of the layer, for all microbatches.
            residuals: the residuals of all microbatches, stacked; the same for `y` and `ct`.
        """
        constants = arguments.constants

        def body(
            sums: Nested, micro: tuple[LayerResiduals, Carry, Cotangent, Nested, jax.Array | None]
        ) -> tuple[Nested, tuple[Carry, Cotangent]]:
            residuals, y, ct, batch, rows = micro
            ctx = replace(constants.ctx, batch=batch, rows=rows)
            own_constants = replace(constants, buffers=residuals.buffers, ctx=ctx)
            result = self._backward_one(replace(arguments, constants=own_constants), residuals, y, ct)
            own_grads = shard_gradients(result.grads, self.specs, self.mesh)
            grads = {"own": own_grads, "shared": result.shared_grads}
            return grad_accumulation.add(sums, grads), (result.x, result.ct)

        zeros = grad_accumulation.zeros({"own": arguments.params, "shared": arguments.shared})
        ctx = constants.ctx
        sums, (x, ct) = jax.lax.scan(body, zeros, (residuals, y, ct, ctx.batch, ctx.rows))
        return LayerBackward(x, sums["own"], sums["shared"], ct)

    def _arguments(self, weights: Weights, index: jax.Array) -> LayerArguments:
        """Return all arguments of the layer at `index` except its input."""
        buffers = slice_layer(self.buffers, index)
        # The random stream depends only on the index, so that dropout is the same forward and backward.
        ctx = self.layer.stack.layer_context(self.ctx, index)
        constants = LayerConstants(weights.frozen, self.shared.frozen, buffers, ctx)
        return LayerArguments(weights.trainable, self.shared.trainable, constants)

    def goes_to_host(self, x: jax.Array) -> bool:
        """Return whether to offload a residual: it is worth it, and the remat policy has not already moved it."""
        if not self.offloads or not is_worth_offloading(x):
            return False
        return jax.typeof(x).memory_space != jax.memory.Space.Host


def add_outs(outs: Out, buffers: Nested) -> Out:
    """Return the sum of the losses and of the metrics of microbatches, which are stacked, with the last buffers."""
    loss, metrics = jax.tree.map(partial(jnp.sum, axis=0), (outs.loss, outs.metrics))
    return Out(loss, metrics, buffers)


def is_worth_offloading(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether an activation, or its shape, is a matrix large enough for memory.activations = pinned_host."""
    # Random keys, which have extended dtypes, are small.
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    return move_to_host(TensorSpec(x.shape, x.dtype), "pinned_host").memory_kind != "device"


def move_leaves(moves: PyTree, tree: PyTree, *, to_host: bool) -> PyTree:
    """Move some leaves of a tree to host memory, or back to the device.

    Args:
        moves: for each leaf, whether it is moved; a tree of bools.
        tree: the arrays.
        to_host: whether they are moved to host memory.
    """
    space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
    return jax.tree.map(lambda move, leaf: jax.device_put(leaf, space) if move else leaf, moves, tree)
