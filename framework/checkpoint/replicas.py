"""Replica agreement: copies of the same state on different devices must have the same bits; here they are compared.

Each device sums the shards that it holds (checkpoint_integrity's position-sensitive checksums), one small array goes to
every process, and equal shards must have equal sums. A bit that flipped in one device's memory, a link that corrupts or
a kernel that is not deterministic makes replicas drift apart without a word: the loss only looks noisier.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from framework.checkpoint.integrity import leaf_sum, pieces
from framework.devices import executables
from framework.layout import flatten


class ReplicaMismatchError(RuntimeError):
    """Copies of the same state differ."""


def check(state: Any, step: int) -> None:
    """Compares what devices hold of the same part of the same leaf. Collective; waits for the state. One program, no
    temporaries of a leaf's size. Nothing to do where nothing is replicated.

    Raises:
        ReplicaMismatchError: names step, leaf, and the devices and processes whose bits are not those of most.
    """
    leaves = {name: x for name, x in flatten(state).items() if x.size and _copies(x)}
    if not leaves:
        return
    mesh = next(iter(leaves.values())).sharding.mesh
    specs, counts = zip(*((x.sharding.spec, pieces(x)) for x in leaves.values()), strict=True)
    sums = np.asarray(executables.call(_program(mesh, specs, counts), tuple(leaves.values())))  # [D, N, 2]
    devices = list(mesh.devices.flat)
    problems = []
    for index, (name, x) in enumerate(leaves.items()):
        for copies in _copies(x):
            of = {device: tuple(sums[devices.index(device), index]) for device in copies}
            (most, count), *others = Counter(of.values()).most_common()
            if others:
                odd = [device for device in copies if of[device] != most or count == 1]
                names = ", ".join(f"process {device.process_index} (device {device.id})" for device in odd)
                problems.append(f"{name}: {names} of {len(copies)} copies")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ReplicaMismatchError(f"replicas disagree after step {step}: {'; '.join(problems[:5])}{more}")


def _copies(x: jax.Array) -> list[list[Any]]:
    """The devices that hold the same part of an array, where there are several."""
    holders: dict[Any, list[Any]] = defaultdict(list)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        holders[tuple((part.start, part.stop) for part in index)].append(device)
    return [devices for devices in holders.values() if len(devices) > 1]


@functools.cache
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], counts: tuple[int, ...]) -> Any:
    """The jitted sums of all leaves' shards: uint32[D, N, 2], device by device in the order of the mesh, replicated."""

    def sums(shards: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([jnp.stack(leaf_sum(x, n)) for x, n in zip(shards, counts, strict=True)])[None]

    by_device = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(sums, mesh=mesh, in_specs=(specs,), out_specs=by_device, check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))
