"""Where the programs of layers leave their results: on the device or the host, and sharded how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from framework.layers.base import BATCH_AXES
from framework.layout import MemoryKind, Nested, StateLayout, TensorSpec, flatten, unflatten
from framework.schedules.layerwise.keeping import Keeping
from framework.schedules.unit import UnitResiduals


@dataclass(frozen=True)
class ResultSpecs:
    """The specs of results, by their shapes.

    Attributes:
      layout: its stacks are in parts.
    """

    layout: StateLayout

    def carry(self, tree: Any, kind: MemoryKind = "device") -> Any:
        """The specs of what flows between units: rows over data and fsdp, positions over seq."""

        def spec(x: Any) -> TensorSpec:
            if x.ndim > 2:
                feature_axes = (None,) * (x.ndim - 2)
                return TensorSpec(x.shape, x.dtype, (BATCH_AXES, "seq", *feature_axes), kind)
            axes = (BATCH_AXES,) * (x.ndim > 0)
            return TensorSpec(x.shape, x.dtype, axes, kind)

        return jax.tree.map(spec, tree)

    def residuals(self, residuals: UnitResiduals, keeping: Keeping, carry: Any) -> UnitResiduals:
        """The specs of what is kept of a unit: as inputs, where the policy keeps nothing else; else as the compiler
        likes.

        Args:
            residuals: what is kept.
            keeping: the policy, and where it is kept.
            carry: what flows between units, [B, S, ...].
        """
        leaves = residuals.leaves
        kinds: list[MemoryKind] = ["pinned_host" if keeping.goes_to_host(x) else "device" for x in leaves]
        # With other policies the leaves are whatever a pull-back holds, of which nobody knows the axes.
        if keeping.policy != "full" and not keeping.policy.startswith("sqrt"):
            return residuals.with_leaves(kinds)
        rows = {x.shape[:2] for x in jax.tree.leaves(carry)}
        specs = []
        for x, kind in zip(leaves, kinds, strict=True):
            if x.ndim > 2 and x.shape[:2] in rows:
                specs.append(self.carry(x, kind))
            else:
                # What has no rows is a constant of the unit (rotary frequencies), which all devices have.
                specs.append(TensorSpec(x.shape, x.dtype, memory_kind=kind))
        return residuals.with_leaves(specs)

    def everywhere(self, tree: Any) -> Any:
        """The specs of scalars, which all devices have."""
        return jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), tree)

    def gradients(self, stage: str, grads: Nested) -> Nested:
        """The specs of some of a stage's gradients: those of their parameters."""
        spec_by_path = flatten(self.part("parameter", stage))
        return unflatten({path: spec_by_path[path] for path in flatten(grads)})

    def part(self, group: str, stage: str) -> Nested:
        """The specs of a stage's leaves in a group, of the first unit for the stack, as they are on the device."""
        specs = self.layout.specs[group].get(stage, {})
        # All units are alike but for where they live.
        part = specs[0] if isinstance(specs, list) else specs
        return jax.tree.map(lambda spec: replace(spec, memory_kind="device"), part)
