"""Placement of the results of layer programs: on the device or the host, and their sharding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from plimsoll.framework.layers.base import BATCH_AXES
from plimsoll.framework.layout import MemoryKind, Nested, StateLayout, TensorSpec, flatten, unflatten
from plimsoll.framework.schedules.layer_vjp import LayerResiduals
from plimsoll.framework.schedules.layerwise.save_policy import SavePolicy


@dataclass(frozen=True)
class ResultSpecs:
    """The specs of results, given their shapes.

    Attributes:
        layout: a layout whose stacks are in parts.
    """

    layout: StateLayout

    def carry(self, tree: Any, kind: MemoryKind = "device") -> Any:
        """Return the specs of activations between layers: rows are sharded over data and fsdp, positions over seq."""

        def spec(x: Any) -> TensorSpec:
            if x.ndim > 2:
                feature_axes = (None,) * (x.ndim - 2)
                return TensorSpec(x.shape, x.dtype, (BATCH_AXES, "seq", *feature_axes), kind)
            axes = (BATCH_AXES,) * (x.ndim > 0)
            return TensorSpec(x.shape, x.dtype, axes, kind)

        return jax.tree.map(spec, tree)

    def residuals(self, residuals: LayerResiduals, save_policy: SavePolicy, carry: Any) -> LayerResiduals:
        """Return the specs of a layer's residuals.

        If the policy saves only inputs, residuals are sharded like them. Otherwise the compiler chooses the sharding.

        Args:
            residuals: the layer's residuals.
            save_policy: the remat policy, and the memory of the residuals.
            carry: the activations between layers, [B, S, ...].
        """
        leaves = residuals.leaves
        kinds: list[MemoryKind] = ["pinned_host" if save_policy.goes_to_host(x) else "device" for x in leaves]
        # With other policies the leaves are whatever a pull-back holds, and their axes are unknown.
        if save_policy.policy != "full" and not save_policy.policy.startswith("sqrt"):
            return residuals.with_leaves(kinds)
        rows = {x.shape[:2] for x in jax.tree.leaves(carry)}
        specs = []
        for x, kind in zip(leaves, kinds, strict=True):
            if x.ndim > 2 and x.shape[:2] in rows:
                specs.append(self.carry(x, kind))
            else:
                # A leaf without rows is a constant of the layer (rotary frequencies), and is replicated.
                specs.append(TensorSpec(x.shape, x.dtype, memory_kind=kind))
        return residuals.with_leaves(specs)

    def everywhere(self, tree: Any) -> Any:
        """Return the specs of scalars, which are replicated on all devices."""
        return jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), tree)

    def gradients(self, stage: str, grads: Nested) -> Nested:
        """Return the specs of some of a stage's gradients: those of their parameters."""
        spec_by_path = flatten(self.part("parameter", stage))
        return unflatten({path: spec_by_path[path] for path in flatten(grads)})

    def part(self, group: str, stage: str) -> Nested:
        """Return the specs, on the device, of a stage's leaves in a group; for the stack, those of its first layer."""
        specs = self.layout.specs[group].get(stage, {})
        # All layers have the same specs except for the memory kind.
        part = specs[0] if isinstance(specs, list) else specs
        return jax.tree.map(lambda spec: replace(spec, memory_kind="device"), part)
