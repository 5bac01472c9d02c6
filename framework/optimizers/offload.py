"""Optimizer offloading: `offload_optimizer` keeps optimizer state in host memory, selected by a regex on state paths.

In the learner, the layout decides which leaves are moved, and when. It takes the partition from here and leaves out the
transfers (`without_transfers`), so that nothing is moved twice. The transfers serve callers of `update` without a
learner. `partitioned_chain` chains such optimizers. Follows apple/axlearn#867.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from plimsoll.framework.config.components import component
from plimsoll.framework.layout import MemoryKind, Nested, TensorSpec, copy_partition, flatten, move_to_host
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
    inner = add_partition(optimizer)
    inner_without_transfers = inner.without_transfers or inner
    fit_to_specs = None
    if inner.fit_to_specs is not None:
        fit_to_specs = _make_offloaded_factory(inner.fit_to_specs, pattern, offload_src, offload_dst)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        device_state = _move_state(state, pattern, offload_src)
        updates, new_state = inner.update(updates, device_state, params, **extra)
        return updates, _move_state(new_state, pattern, offload_dst)

    def partition(specs: Nested) -> Any:
        return tag_large_matches(inner.partition(specs), pattern, offload_dst)

    def partition_layer(specs: Nested) -> Any:
        return _tag_if_matching(inner_without_transfers.partition(specs), pattern, offload_dst)

    without_transfers = inner_without_transfers._replace(
        partition=partition_layer, without_transfers=None, fit_to_specs=None
    )
    return PartitionedGradientTransformation(
        inner.init, update, partition, without_transfers, fit_to_specs, inner.draws
    )


def _make_offloaded_factory(
    fit_inner: Callable[[Nested], PartitionedGradientTransformation],
    pattern: str,
    offload_src: MemoryKind,
    offload_dst: MemoryKind,
) -> Callable[[Nested], PartitionedGradientTransformation]:
    """Return `fit_to_specs` of an offloaded optimizer: fits the inner one to a layer's parameters, then offloads it."""

    def fit_to_specs(specs: Nested) -> PartitionedGradientTransformation:
        return offload_optimizer(fit_inner(specs), pattern, offload_src, offload_dst)

    return fit_to_specs


def _tag_if_matching(specs: Any, pattern: str, kind: MemoryKind) -> Any:
    """Apply `tag_large_matches` to one layer, which need not contain every leaf that matches in the whole model."""
    if any(re.search(pattern, path) for path in flatten(specs)):
        return tag_large_matches(specs, pattern, kind)
    return specs


def tag_large_matches(specs: Any, pattern: str, kind: MemoryKind) -> Any:
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

    def tag(spec: TensorSpec, matching_spec: TensorSpec, large_spec: TensorSpec) -> TensorSpec:
        # A leaf that is only large, or only matches, differs between the two trees and keeps its spec.
        return matching_spec if matching_spec == large_spec else spec

    return jax.tree.map(tag, specs, matching_specs, large_specs)


def _move_state(state: Any, pattern: str, kind: MemoryKind) -> Any:
    """Return the state with its offloaded leaves in the memory kind `kind`."""
    # Transfers are explicit, because arithmetic on a host array does not compile (mixed memory spaces).
    # They are derived from paths and shapes, like the partition. A tracer does not know its sharding, so a transfer
    # derived from that would silently do nothing.
    state_specs = jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), state)
    host_specs = tag_large_matches(state_specs, pattern, "pinned_host")

    def move(spec: TensorSpec, x: jax.Array) -> jax.Array:
        return x if spec.memory_kind == "device" else jax.device_put(x, _SPACES[kind])

    return jax.tree.map(move, host_specs, state)


@component
def partitioned_chain(transformations: Sequence[Transformation]) -> PartitionedGradientTransformation:
    """`optax.chain` for a list, as a config can give it, whose parts keep their partitions."""

    parts = [add_partition(transformation) for transformation in transformations]

    def chain(parts: list[Any]) -> PartitionedGradientTransformation:
        # Only this type passes the parts' extra arguments (`seed`) through optax's chain.
        optax_parts = [optax.GradientTransformationExtraArgs(part.init, part.update) for part in parts]
        init, update = optax.chain(*optax_parts)

        def partition(specs: Nested) -> tuple[Any, ...]:
            return tuple(part.partition(specs) for part in parts)

        draws = any(part.draws for part in parts)
        return PartitionedGradientTransformation(init, update, partition, draws=draws)

    def fit_to_specs(specs: Nested) -> PartitionedGradientTransformation:
        return partitioned_chain([part.fit_to_specs(specs) if part.fit_to_specs else part for part in parts])

    without_transfers = chain([part.without_transfers or part for part in parts])
    has_roles = any(part.fit_to_specs for part in parts)
    return chain(parts)._replace(without_transfers=without_transfers, fit_to_specs=fit_to_specs if has_roles else None)
