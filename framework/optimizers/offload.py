"""offload_optimizer: an optimizer whose state lives on the host, by regex on the state's paths; and chains of such.

In the learner the layout decides what is moved, and when: it takes the partition from here and leaves the moves out
(`at_rest`), so that nothing is moved twice. The moves are for whoever calls `update` without a learner.
Follows apple/axlearn#867.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

from framework.config.components import component
from framework.layout import MemoryKind, Nested, TensorSpec, copy_partition, flatten, move_to_host
from framework.optimizers.partition import PartitionedGradientTransformation, partitioned

Transformation = optax.GradientTransformation | PartitionedGradientTransformation
_SPACES = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}


@component
def offload_optimizer(
    optimizer: Transformation,
    pattern: str = ".*",
    offload_src: MemoryKind = "device",
    offload_dst: MemoryKind = "pinned_host",
) -> PartitionedGradientTransformation:
    """Keeps the state whose path matches in `offload_dst`; vectors, scalars and leaves under 1 MiB stay where they are.

    Args:
        optimizer: any transformation: one that is wrapped already, or a part of a `partitioned_chain`, too.
        pattern: a regex, searched in paths such as "0/mu/attention/query/weight". In the learner paths and sizes are
            those of one layer.
        offload_src: where the state is for the update; "device", as XLA computes nowhere else.
        offload_dst: where it lives between updates.

    Raises:
        ValueError: another `offload_src`. By `partition` and `update`: the pattern matches nothing.
    """
    if offload_src != "device":
        raise ValueError(f"offload_src: expected 'device', where updates are computed, given {offload_src!r}")
    inner = partitioned(optimizer)
    rest = inner.at_rest or inner

    def tag(specs: Any, kind: MemoryKind) -> Any:
        matching, large = copy_partition(specs, pattern=pattern, memory_kind=kind), move_to_host(specs, kind)
        return jax.tree.map(lambda spec, one, two: one if one == two else spec, specs, matching, large)

    def move(state: Any, kind: MemoryKind) -> Any:
        # Explicit, as arithmetic on a host array does not compile (mixed memory spaces). From paths and shapes, as the
        # partition: a tracer does not know its sharding, so a move that is decided from that silently does nothing.
        specs = tag(jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), state), "pinned_host")
        put = lambda spec, x: x if spec.memory_kind == "device" else jax.device_put(x, _SPACES[kind])  # noqa: E731
        return jax.tree.map(put, specs, state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(updates, move(state, offload_src), params, **extra)
        return updates, move(state, offload_dst)

    def of_one_unit(specs: Nested) -> Any:  # which need not hold what matches
        state = rest.partition(specs)
        return tag(state, offload_dst) if any(re.search(pattern, path) for path in flatten(state)) else state

    def of_specs(specs: Nested) -> PartitionedGradientTransformation:
        assert inner.of_specs is not None
        return offload_optimizer(inner.of_specs(specs), pattern, offload_src, offload_dst)

    return PartitionedGradientTransformation(
        inner.init,
        update,
        lambda specs: tag(inner.partition(specs), offload_dst),
        rest._replace(partition=of_one_unit, at_rest=None, of_specs=None),
        of_specs if inner.of_specs is not None else None,
        inner.draws,
    )


@component
def partitioned_chain(transformations: Sequence[Transformation]) -> PartitionedGradientTransformation:
    """`optax.chain` of a list, as a config can give it, whose parts keep their partitions."""

    parts = [partitioned(one) for one in transformations]

    def chain(parts: list[Any]) -> PartitionedGradientTransformation:
        init, update = optax.chain(*(optax.GradientTransformationExtraArgs(*part[:2]) for part in parts))
        partition = lambda specs: tuple(part.partition(specs) for part in parts)  # noqa: E731
        return PartitionedGradientTransformation(init, update, partition, draws=any(part.draws for part in parts))

    def of_specs(specs: Nested) -> PartitionedGradientTransformation:
        return partitioned_chain([part.of_specs(specs) if part.of_specs else part for part in parts])

    at_rest = chain([part.at_rest or part for part in parts])
    return chain(parts)._replace(at_rest=at_rest, of_specs=of_specs if any(part.of_specs for part in parts) else None)
