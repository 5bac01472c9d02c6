"""Optimizer offloading: `offload_optimizer` keeps optimizer state in host memory, selected by a regex on state paths.

In the learner, the layout decides which leaves are moved, and when. It takes the partition from here and leaves out the
transfers (`without_transfers`), so that nothing is moved twice. The transfers serve callers of `update` without a
learner. `partitioned_chain` chains such optimizers. Follows apple/axlearn#867.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import optax

from plimsoll.framework.config.components import component
from plimsoll.framework.layout import MemoryKind, Nested, PyTree, TensorSpec, copy_partition, flatten, move_to_host
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, add_partition

Transformation = optax.GradientTransformation | PartitionedGradientTransformation
# Transfers inside jit use JAX's memory spaces, while specs use the platform's memory kinds.
_SPACES = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}


@component
def offload_optimizer(
    optimizer: Transformation,
    pattern: str = ".*",
    offload_src: MemoryKind = "device",
    offload_dst: MemoryKind = "pinned_host",
) -> PartitionedGradientTransformation:
    """Keep matching state in `offload_dst`; vectors, scalars and leaves under 1 MiB stay where they are.

    Args:
        optimizer: any transformation, including one that is wrapped already or is part of a `partitioned_chain`.
        pattern: a regex, searched in paths such as "0/mu/attention/query/weight". In the learner, paths and sizes are
            those of one layer.
        offload_src: memory kind of the state during the update; must be "device", because XLA computes only there.
        offload_dst: memory kind of the state between updates.

    Raises:
        ValueError: `offload_src` is not "device". From `partition` and `update`: the pattern matches nothing.
    """
    if offload_src != "device":
        raise ValueError(f"offload_src: expected 'device', where updates are computed, given {offload_src!r}")
    return _OffloadedOptimizer(add_partition(optimizer), pattern, offload_src, offload_dst).build()


@dataclass(frozen=True)
class _OffloadedOptimizer:
    """An optimizer whose state is in another memory kind between updates; the attributes are `offload_optimizer`'s."""

    inner: PartitionedGradientTransformation
    pattern: str
    offload_src: MemoryKind
    offload_dst: MemoryKind

    def build(self) -> PartitionedGradientTransformation:
        """Return the transformation."""
        inner = self.inner
        without_transfers = replace(
            inner.without_transfers or inner, partition=self.partition_layer, without_transfers=None, fit_to_specs=None
        )
        fit_inner = inner.fit_to_specs
        return PartitionedGradientTransformation(
            inner.init,
            self.update,
            self.partition,
            without_transfers,
            fit_to_specs=None if fit_inner is None else lambda specs: replace(self, inner=fit_inner(specs)).build(),
            draws=inner.draws,
        )

    def update(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
        """Return (updates, new state), with transfers before and after the inner update."""
        device_state = _move_state(state, self.pattern, self.offload_src)
        updates, new_state = self.inner.update(updates, device_state, params, **extra)
        return updates, _move_state(new_state, self.pattern, self.offload_dst)

    def partition(self, specs: Nested) -> PyTree:
        """Return the specs of the state of a whole model. Raise ValueError if the pattern matches nothing."""
        return tag_large_matches(self.inner.partition(specs), self.pattern, self.offload_dst)

    def partition_layer(self, specs: Nested) -> PyTree:
        """Return the specs of the state of one layer, which need not have every leaf that matches in the model."""
        inner = self.inner.without_transfers or self.inner
        state_specs = inner.partition(specs)
        if any(re.search(self.pattern, path) for path in flatten(state_specs)):
            return tag_large_matches(state_specs, self.pattern, self.offload_dst)
        return state_specs


def tag_large_matches(specs: PyTree, pattern: str, kind: MemoryKind) -> PyTree:
    """Return state specs with another memory kind for large leaves whose path matches.

    Args:
        specs: specs of the optimizer state.
        pattern: a regex, searched in the paths of the leaves.
        kind: the memory kind to set.

    Raises:
        ValueError: the pattern matches nothing.
    """
    matching_specs = copy_partition(specs, pattern=pattern, memory_kind=kind)
    large_specs = move_to_host(specs, kind)

    # A leaf that is only large, or only matches, differs between the two trees and keeps its spec.
    return jax.tree.map(
        lambda spec, matching, large: matching if matching == large else spec, specs, matching_specs, large_specs
    )


def _move_state(state: PyTree, pattern: str, kind: MemoryKind) -> PyTree:
    """Return the state with its offloaded leaves in the memory kind `kind`."""
    # Transfers are explicit, because arithmetic on a host array does not compile (mixed memory spaces).
    # They are derived from paths and shapes, like the partition. A tracer does not know its sharding, so a transfer
    # derived from that would silently do nothing.
    state_specs = jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), state)
    host_specs = tag_large_matches(state_specs, pattern, "pinned_host")
    return jax.tree.map(
        lambda spec, x: x if not spec.is_offloaded else jax.device_put(x, _SPACES[kind]), host_specs, state
    )


@component
def partitioned_chain(transformations: Sequence[Transformation]) -> PartitionedGradientTransformation:
    """`optax.chain` for a list, as a config can give it, whose parts keep their partitions."""
    parts = [add_partition(transformation) for transformation in transformations]
    without_transfers = _chain([part.without_transfers or part for part in parts])
    chain = replace(_chain(parts), without_transfers=without_transfers)
    if not any(part.fit_to_specs for part in parts):
        return chain
    return replace(
        chain,
        fit_to_specs=lambda specs: partitioned_chain(
            [part.fit_to_specs(specs) if part.fit_to_specs else part for part in parts]
        ),
    )


def _chain(parts: list[PartitionedGradientTransformation]) -> PartitionedGradientTransformation:
    """Return `optax.chain` of transformations, with their partitions."""
    # Only this type passes the parts' extra arguments (`seed`) through optax's chain.
    optax_parts = [
        optax.GradientTransformationExtraArgs(part.init, part.update)  # pyright: ignore[reportArgumentType]
        for part in parts
    ]
    init, update = optax.chain(*optax_parts)
    return PartitionedGradientTransformation(
        init,
        update,
        partition=lambda specs: tuple(part.partition(specs) for part in parts),
        draws=any(part.draws for part in parts),
    )
