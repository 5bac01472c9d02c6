"""Runs one layer of a stack inside a larger program, and moves its weights and residuals.

The layer's weights are sliced out of the stacks just before the layer runs. Weights in host memory are fetched one
layer ahead. Large residuals are offloaded to host memory and brought back for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from plimsoll.framework.layers.base import Context, Out
from plimsoll.framework.layout import MeshAxes, Nested, fetch_leaf, flatten, unflatten
from plimsoll.framework.learner.update import slice_layer
from plimsoll.framework.schedules.backward_hooks import BackwardState
from plimsoll.framework.schedules.layer_computation import (
    Carry,
    Cotangent,
    LayerArguments,
    LayerBackward,
    LayerComputation,
    LayerConstants,
    LayerResiduals,
    is_worth_offloading,
)
from plimsoll.framework.schedules.stage_pass import StageWeights

Flat = dict[str, jax.Array]  # leaves by path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedResiduals:
    """Residuals of one or more layers, and the memory they are stored in.

    Args:
        content: the residuals, see `LayerResiduals`.
        offloaded: for each residual leaf, whether it was moved to host memory.
    """

    content: LayerResiduals
    offloaded: tuple[bool, ...] = field(metadata={"static": True})


class LayerOutput(NamedTuple):
    """The result of one layer's forward pass: its output, its `Out`, and its residuals."""

    output: Carry
    out: Out
    residuals: PlacedResiduals


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
    """

    layer: LayerComputation
    ctx: Context
    buffers: Nested
    shared: StageWeights
    specs: dict[str, Any]
    mesh: Mesh
    offloads: bool
    in_groups: bool

    @property
    def inverts(self) -> bool:
        """Return whether the backward pass computes a layer's input from its output."""
        return self.ctx.remat == "invert"

    # --- weights -----------------------------------------------------------------------------------------------------

    def prefetch(self, stacks: Nested, index: jax.Array) -> Flat:
        """Start fetching a layer's offloaded parameters to the device; return them by path."""
        layer_leaves = {}
        for stack in stacks.values():
            for path, leaf in flatten(stack).items():
                if self.specs[path].memory_kind != "device":
                    layer_leaves[path] = fetch_leaf(self.specs[path], slice_layer(leaf, index))
        return layer_leaves

    def take_weights(self, stacks: Nested, index: jax.Array, fetched: Flat, carry: Any) -> tuple[Nested, Any]:
        """Slice out a layer's parameters just before the layer runs: (parameters, carry).

        The optimization barrier keeps the compiler from slicing them earlier.

        Args:
            stacks: "parameter" and "frozen" of all layers, stacked.
            index: index of the layer.
            fetched: the layer's offloaded parameters, from `prefetch`.
            carry: values that are ready when the layer runs; the slices depend on them.
        """
        # Offloaded leaves arrived while the previous layer ran; the others are slices of their stacks.
        leaves_by_group = {}
        for group, stack in stacks.items():
            leaves_by_group[group] = {
                path: fetched[path] if path in fetched else slice_layer(leaf, index)
                for path, leaf in flatten(stack).items()
            }
        layer = {}
        for group, leaves in leaves_by_group.items():
            # The first axis of a stacked spec is the layer axis.
            row_major_leaves = {
                path: _row_major(leaf, self.specs[path].mesh_axes[1:], self.mesh) for path, leaf in leaves.items()
            }
            layer[group] = unflatten(row_major_leaves)
        return jax.lax.optimization_barrier((layer, carry))

    def _arguments(self, layer_params: Nested, index: jax.Array) -> LayerArguments:
        """Return all arguments of the layer at `index` except its input.

        Args:
            layer_params: the layer's parameters, by group: "parameter" and "frozen".
            index: index of the layer.
        """
        buffers = slice_layer(self.buffers, index)
        # The random stream depends only on the index, so that dropout is the same forward and backward.
        ctx = self.layer.stack.layer_context(self.ctx, index)
        constants = LayerConstants(layer_params["frozen"], self.shared.frozen, buffers, ctx)
        return LayerArguments(layer_params["parameter"], self.shared.trainable, constants)

    # --- forward and backward ----------------------------------------------------------------------------------------

    def forward(self, layer_params: Nested, index: jax.Array, x: Carry) -> LayerOutput:
        """Run the layer at `index` on its input `x`, with the `layer_params` that `take_weights` returned."""
        arguments = self._arguments(layer_params, index)
        if self.inverts:
            y, out, residuals = self.layer.forward(arguments, x)
            return LayerOutput(y, out, PlacedResiduals(residuals, ()))
        y, out, residuals = self.layer.forward_with_residuals(arguments, x)
        # Residuals within a group stay on the device: the group's own backward pass needs them right away.
        moves = not self.in_groups
        offloaded = [moves and self.goes_to_host(leaf) for leaf in residuals.leaves]
        residuals = residuals.with_leaves(move_leaves(offloaded, residuals.leaves, jax.memory.Space.Host))
        return LayerOutput(y, out, PlacedResiduals(residuals, tuple(offloaded)))

    def backward(
        self, layer_params: Nested, residuals: PlacedResiduals, index: jax.Array, y: Carry, ct: Cotangent
    ) -> LayerBackward:
        """Run the layer at `index` backward.

        Args:
            layer_params: the layer's parameters, from `take_weights`.
            residuals: the layer's residuals.
            index: index of the layer.
            y: the layer's output, where layers are inverted; else None.
            ct: the cotangent of the layer's output.
        """
        arguments = self._arguments(layer_params, index)
        if self.inverts:
            return self.layer.invert(arguments, y, residuals.content.loss, ct)
        leaves = move_leaves(list(residuals.offloaded), residuals.content.leaves, jax.memory.Space.Device)
        return self.layer.backward(arguments, residuals.content.with_leaves(leaves), ct)

    def goes_to_host(self, x: jax.Array) -> bool:
        """Return whether to offload a residual: it is worth it, and the remat policy has not already moved it."""
        if not self.offloads or not is_worth_offloading(x):
            return False
        return jax.typeof(x).memory_space != jax.memory.Space.Host


def select_stacks(backward_state: BackwardState, name: str) -> Nested:
    """Return a stack's parameters by group; {} for a group that has none."""
    return {group: backward_state[group].get(name, {}) for group in ("parameter", "frozen")}


def move_leaves(moves: Any, tree: Any, space: Any) -> Any:
    """Move some leaves of a tree to another memory.

    Args:
        moves: for each leaf, whether it is moved; a tree of bools.
        tree: the arrays.
        space: a jax.memory.Space.
    """
    return jax.tree.map(lambda move, leaf: jax.device_put(leaf, space) if move else leaf, moves, tree)


def _row_major(x: jax.Array, axes: MeshAxes, mesh: Mesh) -> jax.Array:
    """Constrain one layer's weight to the row-major layout of the stacks.

    XLA for TPU prefers some weights transposed, and would transpose the whole stack before the loop that reads it.
    With this constraint it transposes only one layer's slice, which the barrier keeps separate. Stacks of narrow
    matrices are exempt: TPU stores them in another layout itself, to avoid padding to tiles of 128.

    Args:
        x: the weight, without the stack's leading axis.
        axes: the mesh axes of its dimensions.
        mesh: the device mesh of the layout.
    """
    if x.ndim < 2 or x.shape[-1] % 128:
        return x

    def row_major(shard: jax.Array) -> jax.Array:
        return with_layout_constraint(shard, Layout(tuple(range(shard.ndim))))

    if mesh.size == 1 or not any(axes):
        return row_major(x)
    # Applied per shard: the partitioner cannot split the constraint, and would all-gather the weight for it.
    spec = PartitionSpec(*axes)
    return jax.shard_map(row_major, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
