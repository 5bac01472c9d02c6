"""Replica check: verifies that copies of the same state on different devices have the same bits.

Each device sums its shards (with the position-sensitive checksums of integrity.py), one small array is sent to every
process, and copies of a shard must have equal sums. A flipped bit in the memory of a device, a faulty link or a
nondeterministic kernel makes replicas diverge silently: the loss only looks noisier.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.checkpoint.integrity import LeafPart, count_chunks, leaf_sum
from plimsoll.framework.devices import executables
from plimsoll.framework.layout import PyTree, flatten

Device = TypeVar("Device")
# Maximum number of leaves to name in an error.
_MAX_LEAVES = 5


class ReplicaMismatchError(RuntimeError):
    """Copies of the same state differ."""


def check(state: PyTree, step: int) -> None:
    """Compare all copies of the same shard. Collective; waits for the state.

    Runs one program without temporaries of the size of a leaf. Does nothing if nothing is replicated.

    Raises:
        ReplicaMismatchError: copies differ. The message names the step, the leaf, and the devices and processes that
            disagree with the majority.
    """
    leaves: dict[str, Any] = {}
    for name, x in flatten(state).items():
        if x.size and _copies(x):
            leaves[name] = x
    if not leaves:
        return
    mesh = next(iter(leaves.values())).sharding.mesh
    specs = tuple(x.sharding.spec for x in leaves.values())
    counts = tuple(count_chunks(x) for x in leaves.values())
    program = _program(mesh, specs, counts)
    # sums is uint32 [D, N, 2]: devices in the order of the mesh, leaves, lanes.
    arrays = tuple(leaves.values())
    sums = np.asarray(executables.call(program, arrays))
    devices = list(mesh.devices.flat)
    problems: list[str] = []
    for index, (name, x) in enumerate(leaves.items()):
        for copies in _copies(x):
            sum_by_device = {}
            for device in copies:
                lanes = sums[devices.index(device), index]
                sum_by_device[device] = tuple(lanes.tolist())
            odd_devices = _minority(sum_by_device)
            if odd_devices:
                names = ", ".join(f"process {device.process_index} (device {device.id})" for device in odd_devices)
                problems.append(f"{name}: {names} of {len(copies)} copies")
    if problems:
        text = "; ".join(problems[:_MAX_LEAVES])
        num_hidden = len(problems) - _MAX_LEAVES
        if num_hidden > 0:
            text += f"; and {num_hidden} more"
        raise ReplicaMismatchError(f"replicas disagree after step {step}: {text}")


def _minority(sum_by_device: Mapping[Device, tuple[int, ...]]) -> list[Device]:
    """Return the devices whose sum differs from the most common one; all devices if all sums differ."""
    ranking = Counter(sum_by_device.values()).most_common()
    if len(ranking) == 1:
        return []
    most_common_sum, count = ranking[0]
    # If no two copies agree, for example with two copies, the correct one cannot be determined.
    if count == 1:
        return list(sum_by_device)
    return [device for device, device_sum in sum_by_device.items() if device_sum != most_common_sum]


def _copies(x: jax.Array) -> list[list[Any]]:
    """Group the devices that hold the same part of an array; only groups of several devices."""
    holders = defaultdict[tuple[object, ...], list[Any]](list)
    index_by_device = x.sharding.devices_indices_map(x.shape)
    for device, index in index_by_device.items():
        # Slices are not hashable before Python 3.12.
        bounds = tuple((part.start, part.stop) for part in index)
        holders[bounds].append(device)
    return [devices for devices in holders.values() if len(devices) > 1]


# Cached, so that the check at each save reuses the compiled program of the first one.
@functools.cache
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], counts: tuple[int, ...]) -> jax.stages.Wrapped:
    """Return the jitted function for the sums of all shards: uint32[D, N, 2], replicated, D in mesh order."""

    def sums(shards: tuple[jax.Array, ...]) -> jax.Array:
        rows: list[jax.Array] = []
        for x, count in zip(shards, counts, strict=True):
            lanes = leaf_sum(x, LeafPart(count, start=0, is_long=x.size > 1 << 32))
            rows.append(jnp.stack(lanes))
        return jnp.stack(rows)[None]

    by_device = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(sums, mesh=mesh, in_specs=(specs,), out_specs=by_device, check_vma=False)
    # Replicated, so that every process finds the same differences and raises the same error.
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(mapped, out_shardings=replicated)
