"""Replica agreement: copies of the same state on different devices must have the same bits; here they are compared.

Each device sums the shards that it holds (integrity.py's position-sensitive checksums), one small array goes to
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

# An error about many leaves names the first of them.
_MAX_LEAVES = 5


class ReplicaMismatchError(RuntimeError):
    """Copies of the same state differ."""


def check(state: Any, step: int) -> None:
    """Compares what devices hold of the same part of the same leaf. Collective; waits for the state. One program, no
    temporaries of a leaf's size. Nothing to do where nothing is replicated.

    Raises:
        ReplicaMismatchError: names step, leaf, and the devices and processes whose bits are not those of most.
    """
    leaves: dict[str, Any] = {}
    for name, x in flatten(state).items():
        if x.size and _copies(x):
            leaves[name] = x
    if not leaves:
        return
    mesh = next(iter(leaves.values())).sharding.mesh
    specs = tuple(x.sharding.spec for x in leaves.values())
    counts = tuple(pieces(x) for x in leaves.values())
    program = _program(mesh, specs, counts)
    # sums is uint32 [D, N, 2]: devices in the order of the mesh, leaves, lanes.
    arrays = tuple(leaves.values())
    sums = np.asarray(executables.call(program, arrays))
    devices = list(mesh.devices.flat)
    problems: list[str] = []
    for index, (name, x) in enumerate(leaves.items()):
        for copies in _copies(x):
            sum_by_device: dict[Any, tuple[Any, ...]] = {}
            for device in copies:
                lanes = sums[devices.index(device), index]
                sum_by_device[device] = tuple(lanes)
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


def _minority(sum_by_device: dict[Any, tuple[Any, ...]]) -> list[Any]:
    """The devices whose sum is not that of most; all of them where each sum is another."""
    ranking = Counter(sum_by_device.values()).most_common()
    if len(ranking) == 1:
        return []
    most_common_sum, count = ranking[0]
    # Where no two agree, as with two copies, none can be told to be the right one.
    if count == 1:
        return list(sum_by_device)
    return [device for device, device_sum in sum_by_device.items() if device_sum != most_common_sum]


def _copies(x: jax.Array) -> list[list[Any]]:
    """The devices that hold the same part of an array, where there are several."""
    holders: dict[Any, list[Any]] = defaultdict(list)
    index_by_device = x.sharding.devices_indices_map(x.shape)
    for device, index in index_by_device.items():
        # Slices cannot be keys of a dict before Python 3.12.
        bounds = tuple((part.start, part.stop) for part in index)
        holders[bounds].append(device)
    return [devices for devices in holders.values() if len(devices) > 1]


# Cached, so that a check at every save finds the compiled program of the first.
@functools.cache
def _program(
    mesh: Mesh,
    specs: tuple[PartitionSpec, ...],
    counts: tuple[int, ...],
) -> Any:
    """The jitted sums of all leaves' shards: uint32[D, N, 2], device by device in the order of the mesh, replicated."""

    def sums(shards: tuple[jax.Array, ...]) -> jax.Array:
        rows: list[jax.Array] = []
        for x, count in zip(shards, counts, strict=True):
            lanes = leaf_sum(x, count)
            rows.append(jnp.stack(lanes))
        return jnp.stack(rows)[None]

    by_device = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(
        sums,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=by_device,
        check_vma=False,
    )
    # Replicated, so that every process finds the same disagreements, and raises the same error.
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(mapped, out_shardings=replicated)
