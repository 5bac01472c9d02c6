"""Optimizer offloading: `offload_optimizer` keeps optimizer state in host memory, selected by a regex on state paths.

In the learner, the layout decides which leaves are moved, and when. It takes the partition from here and leaves out the
transfers (`at_rest`), so that nothing is moved twice. The transfers serve callers of `update` without a learner.
`partitioned_chain` chains such optimizers. Follows apple/axlearn#867.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from plimsoll.framework.config.components import component
from plimsoll.framework.layout import (
    MemoryKind,
    Nested,
    TensorSpec,
    copy_partition,
    flatten,
    move_to_host,
)
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation, partitioned

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
    inner = partitioned(optimizer)
    inner_at_rest = inner.at_rest or inner
    of_specs = None
    if inner.of_specs is not None:
        of_specs = _make_offloaded_factory(inner.of_specs, pattern, offload_src, offload_dst)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        device_state = _moved(state, pattern, offload_src)
        updates, new_state = inner.update(updates, device_state, params, **extra)
        return updates, _moved(new_state, pattern, offload_dst)

    def partition(specs: Nested) -> Any:
        return tagged(inner.partition(specs), pattern, offload_dst)

    def partition_layer(specs: Nested) -> Any:
        return _tag_if_matching(inner_at_rest.partition(specs), pattern, offload_dst)

    at_rest = inner_at_rest._replace(partition=partition_layer, at_rest=None, of_specs=None)
    return PartitionedGradientTransformation(
        inner.init,
        update,
        partition,
        at_rest,
        of_specs,
        inner.draws,
    )


def _make_offloaded_factory(
    inner_of_specs: Callable[[Nested], PartitionedGradientTransformation],
    pattern: str,
    offload_src: MemoryKind,
    offload_dst: MemoryKind,
) -> Callable[[Nested], PartitionedGradientTransformation]:
    """Return `of_specs` for an offloaded optimizer: the inner one fitted to a layer's parameters, then offloaded."""

    def of_specs(specs: Nested) -> PartitionedGradientTransformation:
        return offload_optimizer(
            inner_of_specs(specs),
            pattern,
            offload_src,
            offload_dst,
        )

    return of_specs


def _tag_if_matching(specs: Any, pattern: str, kind: MemoryKind) -> Any:
    """Apply `tagged` to one layer, which need not contain every leaf that matches in the whole model."""
    if any(re.search(pattern, path) for path in flatten(specs)):
        return tagged(specs, pattern, kind)
    return specs


def tagged(specs: Any, pattern: str, kind: MemoryKind) -> Any:
    """Return state specs with the memory kind `kind` for large leaves whose path matches.

    Raises:
        ValueError: the pattern matches nothing.
    """
    specs_of_matching = copy_partition(specs, pattern=pattern, memory_kind=kind)
    specs_of_large = move_to_host(specs, kind)

    def tag(spec: TensorSpec, of_matching: TensorSpec, of_large: TensorSpec) -> TensorSpec:
        # A leaf that is only large, or only matches, differs between the two trees and keeps its spec.
        return of_matching if of_matching == of_large else spec

    return jax.tree.map(tag, specs, specs_of_matching, specs_of_large)


def _moved(state: Any, pattern: str, kind: MemoryKind) -> Any:
    """Return the state with its offloaded leaves in the memory kind `kind`."""
    # Transfers are explicit, because arithmetic on a host array does not compile (mixed memory spaces).
    # They are derived from paths and shapes, like the partition. A tracer does not know its sharding, so a transfer
    # derived from that would silently do nothing.
    state_specs = jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), state)
    host_specs = tagged(state_specs, pattern, "pinned_host")

    def move(spec: TensorSpec, x: jax.Array) -> jax.Array:
        return x if spec.memory_kind == "device" else jax.device_put(x, _SPACES[kind])

    return jax.tree.map(move, host_specs, state)


@component
def partitioned_chain(transformations: Sequence[Transformation]) -> PartitionedGradientTransformation:
    """`optax.chain` for a list, as a config can give it, whose parts keep their partitions."""

    parts = [partitioned(transformation) for transformation in transformations]

    def chain(parts: list[Any]) -> PartitionedGradientTransformation:
        # Only this type passes the parts' extra arguments (`seed`) through optax's chain.
        optax_parts = [optax.GradientTransformationExtraArgs(part.init, part.update) for part in parts]
        init, update = optax.chain(*optax_parts)

        def partition(specs: Nested) -> tuple[Any, ...]:
            return tuple(part.partition(specs) for part in parts)

        draws = any(part.draws for part in parts)
        return PartitionedGradientTransformation(init, update, partition, draws=draws)

    def of_specs(specs: Nested) -> PartitionedGradientTransformation:
        return partitioned_chain([part.of_specs(specs) if part.of_specs else part for part in parts])

    at_rest = chain([part.at_rest or part for part in parts])
    has_roles = any(part.of_specs for part in parts)
    return chain(parts)._replace(at_rest=at_rest, of_specs=of_specs if has_roles else None)
