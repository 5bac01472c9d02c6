"""Memory in use: bytes on the devices and of this process.

Device bytes come from the allocator's own statistics where the platform has them (TPU, GPU), and its peak includes the
temporaries of programs; else (CPU, where `memory_stats()` is None) from the sizes of the live jax arrays, which do not.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class MemoryInUse:
    """Bytes; device figures are those of the fullest addressable device."""

    device_bytes: int  # in use in device memory now
    device_peak_bytes: int | None  # highest so far; None where the platform has no statistics
    host_bytes: int  # live jax arrays in host memory, of all those devices together
    rss_bytes: int  # resident memory of this process; on CPU it contains the device's

    def metrics(self) -> dict[str, int]:
        """`memory/device_bytes`, `memory/device_peak_bytes` (if known), `memory/host_bytes`, `memory/rss_bytes`."""
        return {f"memory/{name}": value for name, value in vars(self).items() if value is not None}


def memory_in_use(devices: Sequence[Any]) -> MemoryInUse:
    """Measures now, on these devices of this process."""
    sizes = {key: size for key, size in live_array_bytes().items() if key[0] in devices}
    on_device = [size for (_, kind), size in sizes.items() if kind == "device"]
    on_host = sum(sizes.values()) - sum(on_device)
    statistics = [found for device in devices if (found := device.memory_stats())]
    if not statistics:
        return MemoryInUse(max(on_device, default=0), None, on_host, rss_bytes())
    in_use, peak = (max(found[name] for found in statistics) for name in ("bytes_in_use", "peak_bytes_in_use"))
    return MemoryInUse(in_use, peak, on_host, rss_bytes())


def live_array_bytes() -> dict[tuple[Any, str], int]:
    """Bytes of live jax arrays by (device, memory kind), each buffer counted once.

    `jax.live_arrays()` lists an array and, once somebody looked at its shards (checkpointing does), the shards as well,
    so a sharded array would count twice. Buffers are told apart by address; the shards of an array are looked at only
    when there is a live array that could be one of them, since looking creates new arrays.
    """
    import jax

    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    on_one_device = {(array.shape, array.dtype) for array in arrays if len(array.sharding.device_set) == 1}
    buffers: dict[tuple[Any, str, int], int] = {}
    for array in arrays:
        kind, shard_shape = array.sharding.memory_kind or "device", array.sharding.shard_shape(array.shape)
        pieces = [array]
        if len(array.sharding.device_set) > 1:
            if (shard_shape, array.dtype) not in on_one_device:
                size = math.prod(shard_shape) * array.dtype.itemsize
                buffers |= {(device, kind, id(array)): size for device in array.sharding.addressable_devices}
                continue
            pieces = [shard.data for shard in array.addressable_shards]
        for piece in pieces:
            (device,) = piece.sharding.device_set
            buffers[device, kind, _address(piece)] = piece.nbytes
    sizes: Counter[tuple[Any, str]] = Counter()
    for (device, kind, _), size in buffers.items():
        sizes[device, kind] += size
    return dict(sizes)


def _address(array: Any) -> int:
    import jax

    if next(iter(array.devices())).platform == "cpu":
        array.block_until_ready()  # as the pointer does, which holds the GIL meanwhile: no watchdog could run
    try:
        return array.unsafe_buffer_pointer()
    except jax.errors.JaxRuntimeError:
        return id(array)  # not every plugin tells addresses; then shards that were looked at count twice


def rss_bytes() -> int:
    """Resident memory of this process; where there is no /proc (macOS), its highest value so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
