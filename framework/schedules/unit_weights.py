"""The weights of one unit, taken out of their stacks when its turn comes: from host memory a turn ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from framework.layout import MeshAxes, Nested, fetch_leaf, flatten, unflatten
from framework.learner.units import unit_at
from framework.schedules.visits import Work

Flat = dict[str, jax.Array]  # leaves by path


def stacks_of(work: Work, name: str) -> Nested:
    """A stack's parameters, by group; {} for a group that has none."""
    return {group: work[group].get(name, {}) for group in ("parameter", "frozen")}


@dataclass(frozen=True)
class UnitWeights:
    """Where the weights of a stack's units are, and how they come.

    Attributes:
      specs: of the stacks, by path.
      mesh: of the layout.
    """

    specs: dict[str, Any]
    mesh: Mesh

    def fetched(self, stacks: Nested, index: jax.Array) -> Flat:
        """A unit's parameters that live in host memory, on their way to the device, by path."""
        unit_leaves = {}
        for stack in stacks.values():
            for path, leaf in flatten(stack).items():
                if self.specs[path].memory_kind != "device":
                    unit_leaves[path] = fetch_leaf(self.specs[path], unit_at(leaf, index))
        return unit_leaves

    def taken(
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
            fetched: its parameters of `fetched`.
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
