"""Memory in use: bytes on the devices, by memory kind, and of this process, and how they were found out.

Imports jax inside functions. Two sources, never mixed in one figure: the allocator's own statistics where the platform
has them (TPU, GPU), which include a program's temporaries in `peak`; else (CPU, where `memory_stats()` is None) the
sizes of the live jax arrays, which do not.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class MemoryInUse:
    """Bytes; device figures are those of the fullest addressable device.

    Attributes:
      source: "memory_stats" (the allocator) or "live_arrays" (the sizes of arrays, no temporaries).
      device_bytes: in use in device memory now.
      device_peak_bytes: highest so far; None from live arrays.
      device_limit_bytes: what the allocator may use; None if it does not say.
      array_bytes: live jax arrays per memory kind (device, pinned_host, ...), of the device that has most of that kind.
      host_rss_bytes: resident memory of this process; on CPU it contains the device's.
    """

    source: Literal["memory_stats", "live_arrays"]
    device_bytes: int
    device_peak_bytes: int | None
    device_limit_bytes: int | None
    array_bytes: dict[str, int]
    host_rss_bytes: int

    def metrics(self) -> dict[str, int]:
        """`memory/device_bytes`, `memory/device_peak_bytes` (if known), `memory/host_bytes`, `memory/rss_bytes`."""
        host = sum(size for kind, size in self.array_bytes.items() if kind.endswith("host"))
        values = {"memory/device_bytes": self.device_bytes, "memory/host_bytes": host}
        if self.device_peak_bytes is not None:
            values["memory/device_peak_bytes"] = self.device_peak_bytes
        return {**values, "memory/rss_bytes": self.host_rss_bytes}


def memory_in_use(devices: Sequence[Any] | None = None) -> MemoryInUse:
    """Measures now. `devices`: the local devices to look at; all of this process's if None."""
    import jax

    chosen = jax.local_devices() if devices is None else [d for d in devices if d.process_index == jax.process_index()]
    by_kind: dict[str, int] = {}
    for (device, kind), size in live_array_bytes().items():
        if device in chosen:
            by_kind[kind] = max(size, by_kind.get(kind, 0))
    stats = [found for device in chosen if (found := device.memory_stats())]
    if stats:
        fullest = max(stats, key=lambda found: found["bytes_in_use"])
        peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
        return MemoryInUse(
            source="memory_stats",
            device_bytes=fullest["bytes_in_use"],
            device_peak_bytes=max(peaks) if peaks else None,
            device_limit_bytes=fullest.get("bytes_limit"),
            array_bytes=by_kind,
            host_rss_bytes=host_rss_bytes(),
        )
    default_kind = chosen[0].default_memory().kind if chosen else "device"
    return MemoryInUse(
        source="live_arrays",
        device_bytes=by_kind.get(default_kind, 0),
        device_peak_bytes=None,
        device_limit_bytes=None,
        array_bytes=by_kind,
        host_rss_bytes=host_rss_bytes(),
    )


def live_array_bytes() -> dict[tuple[Any, str], int]:
    """Bytes of live jax arrays by (device, memory kind), each buffer counted once.

    `jax.live_arrays()` lists an array and, once somebody looked at its shards (checkpointing does), the shards as well,
    so a sharded array would count twice. Buffers are told apart by address; the shards of an array are looked at only
    when there is a live array that could be one of them, since looking creates new arrays.
    """
    import jax

    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    singles = [array for array in arrays if len(array.sharding.device_set) == 1]
    lookalikes = {_likeness(array, array.shape) for array in singles}
    sizes: dict[tuple[Any, str], int] = {}
    seen: set[tuple[Any, str, int]] = set()
    for array in arrays:
        kind = array.sharding.memory_kind or "device"
        shape = array.sharding.shard_shape(array.shape)
        many = len(array.sharding.device_set) > 1
        could_be_split = many and _likeness(array, shape) in lookalikes
        if many and not could_be_split:
            nbytes = array.dtype.itemsize
            for length in shape:
                nbytes *= length
            for device in array.sharding.addressable_devices:
                sizes[device, kind] = sizes.get((device, kind), 0) + nbytes
            continue
        for data in [shard.data for shard in array.addressable_shards] if many else [array]:
            (device,) = data.sharding.device_set
            address = _address(data)
            if address is None or (device, kind, address) not in seen:
                sizes[device, kind] = sizes.get((device, kind), 0) + data.nbytes
            if address is not None:
                seen.add((device, kind, address))
    return sizes


def host_rss_bytes() -> int:
    """Resident memory of this process; where there is no /proc, its highest value so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def _likeness(array: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Any, str | None]:
    return shape, array.dtype, array.sharding.memory_kind


def _address(array: Any) -> int | None:
    import jax

    try:
        return array.unsafe_buffer_pointer()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError):
        return None  # not every plugin tells addresses; then shards that were looked at count twice
