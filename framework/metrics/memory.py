"""Memory in use: bytes on the devices and of this process.

Device bytes come from the allocator's own statistics where the platform has them (TPU, GPU), and
its peak includes the temporaries of programs. Else (CPU, where `memory_stats()` is None) they come
from the sizes of the live jax arrays, which do not include them.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class MemoryInUse:
    """Bytes in use; device figures are those of the fullest addressable device."""

    device_bytes: int  # in use in device memory now
    device_peak_bytes: int | None  # highest so far; None where the platform has no statistics
    host_bytes: int  # live jax arrays in host memory, of all those devices together
    rss_bytes: int  # resident memory of this process; on CPU it contains the device's

    def metrics(self) -> dict[str, int]:
        """Returns the figures that are known, by metric name.

        They are `memory/device_bytes`, `memory/device_peak_bytes`, `memory/host_bytes` and
        `memory/rss_bytes`.
        """
        return {f"memory/{name}": value for name, value in vars(self).items() if value is not None}


def memory_in_use(devices: Sequence[Any]) -> MemoryInUse:
    """Measures the memory in use now, on these devices of this process."""
    device_sizes = []
    host_bytes = 0
    for (device, kind), size in live_array_bytes().items():
        if device not in devices:
            continue
        # Each memory kind but "device" is some memory of the host.
        if kind == "device":
            device_sizes.append(size)
        else:
            host_bytes += size
    device_statistics = []
    for device in devices:
        statistics = device.memory_stats()
        if statistics:
            device_statistics.append(statistics)
    if not device_statistics:
        return MemoryInUse(max(device_sizes, default=0), None, host_bytes, rss_bytes())
    in_use = max(statistics["bytes_in_use"] for statistics in device_statistics)
    peak = max(statistics["peak_bytes_in_use"] for statistics in device_statistics)
    return MemoryInUse(in_use, peak, host_bytes, rss_bytes())


def live_array_bytes() -> dict[tuple[Any, str], int]:
    """Returns the bytes of live jax arrays by (device, memory kind), with each buffer counted once.

    `jax.live_arrays()` lists an array and, once somebody looked at its shards (checkpointing does),
    the shards as well, so a sharded array would count twice. Buffers are told apart by address; the
    shards of an array are looked at only when there is a live array that could be one of them,
    since looking creates new arrays.
    """
    import jax

    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    single_device_types = set()
    for array in arrays:
        if len(array.sharding.device_set) == 1:
            single_device_types.add((array.shape, array.dtype))
    # By device, memory kind and address.
    buffers: dict[tuple[Any, str, int], int] = {}
    for array in arrays:
        sharding = array.sharding
        kind = sharding.memory_kind or "device"
        shard_shape = sharding.shard_shape(array.shape)
        is_sharded = len(sharding.device_set) > 1
        # No live array could be a shard of this one, so its shards are not looked at.
        if is_sharded and (shard_shape, array.dtype) not in single_device_types:
            size = math.prod(shard_shape) * array.dtype.itemsize
            for device in sharding.addressable_devices:
                buffers[device, kind, id(array)] = size
            continue
        shards = [shard.data for shard in array.addressable_shards] if is_sharded else [array]
        for shard in shards:
            (device,) = shard.sharding.device_set
            buffers[device, kind, _address(shard)] = shard.nbytes
    sizes: Counter[tuple[Any, str]] = Counter()
    for (device, kind, _), size in buffers.items():
        sizes[device, kind] += size
    return dict(sizes)


def _address(array: Any) -> int:
    """Returns a number that tells the buffer of an array on one device from others."""
    import jax

    # The pointer waits for the array too, but holds the GIL meanwhile: no watchdog could run.
    if next(iter(array.devices())).platform == "cpu":
        array.block_until_ready()
    try:
        return array.unsafe_buffer_pointer()
    except jax.errors.JaxRuntimeError:
        # Not every plugin tells addresses; then shards that were looked at count twice.
        return id(array)


def rss_bytes() -> int:
    """Returns the resident memory of this process in bytes.

    Where there is no /proc (macOS), it is its highest value so far.
    """
    try:
        with open("/proc/self/statm") as file:
            num_pages = int(file.read().split()[1])
            return num_pages * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
