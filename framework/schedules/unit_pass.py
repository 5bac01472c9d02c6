"""One unit of a stack within one program: its weights are taken out of the stacks when its turn comes, those in host
memory a turn ahead, and what is kept of it goes to host memory and comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from framework.layers.base import Context, Out
from framework.layout import MeshAxes, Nested, fetch_leaf, flatten, unflatten
from framework.learner.units import unit_at
from framework.schedules.stage_pass import StageWeights
from framework.schedules.unit import (
    Carry,
    Cotangent,
    UnitArguments,
    UnitBackward,
    UnitConstants,
    UnitFunctions,
    UnitResiduals,
    is_worth_offloading,
)
from framework.schedules.visits import Work

Flat = dict[str, jax.Array]  # leaves by path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedResiduals:
    """What is kept of a unit, or of stacked units, where it is kept.

    Args:
        of_unit: see `UnitResiduals`.
        hosted: for each of their leaves, whether it was moved to host memory.
    """

    of_unit: UnitResiduals
    hosted: tuple[bool, ...] = field(metadata={"static": True})


class UnitOutput(NamedTuple):
    """What a unit's turn in the forward pass hands on."""

    output: Carry
    out: Out
    residuals: PlacedResiduals


@dataclass(frozen=True)
class UnitPass:
    """Any one unit of a stack.

    Attributes:
      unit: what it computes.
      ctx: the stack's context.
      buffers: of all units, stacked.
      shared: the parameters that all units share, on the device.
      specs: of the stacks, by path.
      mesh: of the layout.
      offloads: whether large activations that are kept go to host memory.
      in_groups: whether only inputs of groups of units are kept beyond the group's own turn.
    """

    unit: UnitFunctions
    ctx: Context
    buffers: Nested
    shared: StageWeights
    specs: dict[str, Any]
    mesh: Mesh
    offloads: bool
    in_groups: bool

    @property
    def inverts(self) -> bool:
        """Whether a unit's input is computed from its output in the backward pass."""
        return self.ctx.remat == "invert"

    # --- weights -----------------------------------------------------------------------------------------------------

    def prefetch(self, stacks: Nested, index: jax.Array) -> Flat:
        """A unit's parameters that live in host memory, on their way to the device, by path."""
        unit_leaves = {}
        for stack in stacks.values():
            for path, leaf in flatten(stack).items():
                if self.specs[path].memory_kind != "device":
                    unit_leaves[path] = fetch_leaf(self.specs[path], unit_at(leaf, index))
        return unit_leaves

    def take_weights(
        self,
        stacks: Nested,
        index: jax.Array,
        fetched: Flat,
        carry: Any,
    ) -> tuple[Nested, Any]:
        """Takes a unit's parameters when its turn comes, not before: (unit, carry).

        Args:
            stacks: "parameter" and "frozen" of all units, stacked.
            index: the unit's.
            fetched: its parameters of `prefetch`.
            carry: what is there when its turn comes.
        """
        # Hosted leaves have come during the turn before; the others are slices of their stacks.
        leaves_by_group = {}
        for group, stack in stacks.items():
            leaves_by_group[group] = {
                path: fetched[path] if path in fetched else unit_at(leaf, index)
                for path, leaf in flatten(stack).items()
            }
        unit = {}
        for group, leaves in leaves_by_group.items():
            # The first of a stacked spec's axes is that of the units.
            row_major_leaves = {
                path: _row_major(leaf, self.specs[path].mesh_axes[1:], self.mesh) for path, leaf in leaves.items()
            }
            unit[group] = unflatten(row_major_leaves)
        return jax.lax.optimization_barrier((unit, carry))

    def _arguments(self, unit_params: Nested, index: jax.Array) -> UnitArguments:
        """What the unit at `index` is a function of, given its parameters ("parameter" and "frozen")."""
        buffers = unit_at(self.buffers, index)
        # Its random stream depends on its index alone, so that dropout is the same forward and backward.
        ctx = self.unit.stack.unit_context(self.ctx, index)
        constants = UnitConstants(unit_params["frozen"], self.shared.frozen, buffers, ctx)
        return UnitArguments(unit_params["parameter"], self.shared.trainable, constants)

    # --- forward and backward ----------------------------------------------------------------------------------------

    def forward(
        self,
        unit_params: Nested,
        index: jax.Array,
        x: Carry,
    ) -> UnitOutput:
        """Runs the unit at `index` on its input `x`; `unit_params` are of `take_weights`."""
        arguments = self._arguments(unit_params, index)
        if self.inverts:
            y, out, residuals = self.unit.forward(arguments, x)
            return UnitOutput(y, out, PlacedResiduals(residuals, ()))
        y, out, residuals = self.unit.forward_with_residuals(arguments, x)
        # What is kept within a group is needed at once, by the group's own backward pass.
        moves = not self.in_groups
        hosted = [moves and self.goes_to_host(leaf) for leaf in residuals.leaves]
        residuals = residuals.with_leaves(moved(hosted, residuals.leaves, jax.memory.Space.Host))
        return UnitOutput(y, out, PlacedResiduals(residuals, tuple(hosted)))

    def backward(
        self,
        unit_params: Nested,
        residuals: PlacedResiduals,
        index: jax.Array,
        y: Carry,
        ct: Cotangent,
    ) -> UnitBackward:
        """Runs the unit at `index` backward.

        Args:
            unit_params: of `take_weights`.
            residuals: of the unit.
            index: the unit's.
            y: its output, where units are inverted; else None.
            ct: the cotangent of its output.
        """
        arguments = self._arguments(unit_params, index)
        if self.inverts:
            return self.unit.invert(arguments, y, residuals.of_unit.loss, ct)
        leaves = moved(list(residuals.hosted), residuals.of_unit.leaves, jax.memory.Space.Device)
        return self.unit.backward(arguments, residuals.of_unit.with_leaves(leaves), ct)

    def goes_to_host(self, x: jax.Array) -> bool:
        """Whether an activation that is kept goes to host memory, and the remat policy did not move it already."""
        if not self.offloads or not is_worth_offloading(x):
            return False
        return jax.typeof(x).memory_space != jax.memory.Space.Host


def stacks_of(work: Work, name: str) -> Nested:
    """A stack's parameters, by group; {} for a group that has none."""
    return {group: work[group].get(name, {}) for group in ("parameter", "frozen")}


def moved(moves: Any, tree: Any, space: Any) -> Any:
    """The tree with those leaves in that memory space that `moves`, a tree of bools, says."""
    return jax.tree.map(lambda move, leaf: jax.device_put(leaf, space) if move else leaf, moves, tree)


def _row_major(x: jax.Array, axes: MeshAxes, mesh: Mesh) -> jax.Array:
    """Lays one unit's weight out as stacks are: row-major. TPU likes some weights transposed, and would turn a whole
    stack around before the loop that reads it; so it turns one unit's, which the barrier keeps apart. Stacks of narrow
    matrices TPU stores otherwise itself, so as not to fill up tiles of 128.

    Args:
        x: the weight, without the stack's leading axis.
        axes: the mesh axes of its dimensions.
        mesh: of the layout.
    """
    if x.ndim < 2 or x.shape[-1] % 128:
        return x

    def row_major(shard: jax.Array) -> jax.Array:
        return with_layout_constraint(shard, Layout(tuple(range(shard.ndim))))

    if mesh.size == 1 or not any(axes):
        return row_major(x)
    # Of each device's shard: the partitioner cannot split the constraint, and would gather the whole weight for it.
    spec = PartitionSpec(*axes)
    return jax.shard_map(row_major, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
