"""Memory in use, in bytes: on the devices and of this process.

On TPU and GPU, device bytes come from the allocator's statistics, whose peak includes the temporaries of programs.
On CPU, where `memory_stats()` is None, they are the sizes of the live jax arrays, which do not include temporaries.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from plimsoll.framework.devices.host import peak_rss_bytes, rss_bytes
from plimsoll.framework.metrics.goodput import Goodput


class MeasuredDevice(Protocol):
    """A jax device."""

    def memory_stats(self) -> Mapping[str, int] | None:
        """Return statistics of the device's allocator; None or {} if it has none."""


@dataclasses.dataclass(frozen=True)
class MemoryInUse:
    """Bytes in use. MeasuredDevice figures are maxima over the measured devices."""

    device_bytes: int  # device memory in use now
    device_peak_bytes: int | None  # highest value so far; None if the platform has no statistics
    host_bytes: int  # live jax arrays in host memory, sum over the measured devices
    rss_bytes: int  # resident memory of this process; on CPU it includes the device memory
    rss_peak_bytes: int  # highest value so far

    def metrics(self) -> dict[str, int]:
        """Return the known figures, by metric name.

        They are `memory/device_bytes`, `memory/device_peak_bytes`, `memory/host_bytes`, `memory/rss_bytes` and
        `memory/rss_peak_bytes`.
        """
        return {f"memory/{name}": value for name, value in vars(self).items() if value is not None}


def memory_in_use(devices: Sequence[MeasuredDevice]) -> MemoryInUse:
    """Measure the current memory use of this process on some of its devices."""
    device_sizes = []
    host_bytes = 0
    for (device, kind), size in live_array_bytes().items():
        if device not in devices:
            continue
        # All memory kinds except "device" are host memory.
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
        return MemoryInUse(max(device_sizes, default=0), None, host_bytes, rss_bytes(), peak_rss_bytes())
    in_use = max(statistics["bytes_in_use"] for statistics in device_statistics)
    peak = max(statistics["peak_bytes_in_use"] for statistics in device_statistics)
    return MemoryInUse(in_use, peak, host_bytes, rss_bytes(), peak_rss_bytes())


def live_array_bytes() -> dict[tuple[Hashable, str], int]:
    """Return the bytes of live jax arrays by (device, memory kind), with each buffer counted once.

    `jax.live_arrays()` lists an array and, once its shards have been accessed (as checkpointing does), the shards as
    well, so a sharded array would count twice. To avoid that, buffers are identified by address. The shards of an array
    are accessed only if a live array could be one of them, because accessing them creates new arrays.
    """
    import jax

    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    single_device_types = set()
    for array in arrays:
        if len(array.sharding.device_set) == 1:
            single_device_types.add((array.shape, array.dtype))
    # {(device, memory kind, address): bytes}
    buffers: dict[tuple[Hashable, str, int], int] = {}
    for array in arrays:
        sharding = array.sharding
        kind = sharding.memory_kind or "device"
        shard_shape = sharding.shard_shape(array.shape)
        is_sharded = len(sharding.device_set) > 1
        # No live array can be a shard of this one, so do not access its shards.
        if is_sharded and (shard_shape, array.dtype) not in single_device_types:
            size = math.prod(shard_shape) * array.dtype.itemsize
            for device in sharding.addressable_devices:
                buffers[device, kind, id(array)] = size
            continue
        shards = [shard.data for shard in array.addressable_shards] if is_sharded else [array]
        for shard in shards:
            (device,) = shard.sharding.device_set
            # Getting the pointer also waits for the array, but holds the GIL, so that no watchdog could run.
            if device.platform == "cpu":
                shard.block_until_ready()
            try:
                address = shard.unsafe_buffer_pointer()
            except jax.errors.JaxRuntimeError:
                # Not every plugin provides addresses. Without them, accessed shards count twice.
                address = id(shard)
            buffers[device, kind, address] = shard.nbytes
    sizes: Counter[tuple[Hashable, str]] = Counter()
    for (device, kind, _), size in buffers.items():
        sizes[device, kind] += size
    return dict(sizes)


# Seconds between two measurements of `ResidentMemory`. One takes 30 us.
_INTERVAL = 0.1


class ResidentMemory:
    """Records the highest resident memory of this process in each phase of a run. Use it as a context manager.

    Args:
        goodput: knows the current phase.

    Attributes:
        peaks: bytes by phase of `Goodput`, and "end" for the time after the last step.
    """

    def __init__(self, goodput: Goodput):
        self._goodput = goodput
        self.peaks: dict[str, int] = {}
        # The highest value of the process that was attributed to a phase.
        self._highest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resident-memory", daemon=True)

    def __enter__(self) -> ResidentMemory:
        self.record()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self.record()

    def record(self) -> None:
        """Measure now, for the current phase."""
        phase = self._goodput.phase
        # A run also spends the time between other phases in "start".
        if phase == "start" and "compile" in self.peaks:
            phase = "end" if "step" in self.peaks else "restore"
        # The evaluation is compiled next to the state.
        if phase == "compile" and "restore" in self.peaks:
            phase = "step"
        size = rss_bytes()
        # The kernel's own peak also has what happened between two measurements.
        highest = peak_rss_bytes()
        if highest > self._highest:
            self._highest = size = highest
        self.peaks[phase] = max(size, self.peaks.get(phase, 0))
