"""Memory in use on forced CPU devices, which have no allocator statistics, and on a fake device that has them."""

import dataclasses
import gc
import mmap

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plimsoll.framework.devices.host import rss_bytes
from plimsoll.framework.metrics import memory
from plimsoll.framework.metrics.memory import live_array_bytes, memory_in_use


@pytest.fixture(autouse=True)
def collect_garbage():
    """Collect reference cycles of earlier tests now, so that they are not freed during a measurement."""
    gc.collect()


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("x",))


def growth(before, device, kind):
    return live_array_bytes().get((device, kind), 0) - before.get((device, kind), 0)


@pytest.mark.pairs
def test_live_bytes_by_device_and_kind(mesh):
    before = live_array_bytes()
    count = len(jax.devices())
    ones = np.ones((count * 16, 64), np.float32)
    sharded = jax.device_put(ones, NamedSharding(mesh, PartitionSpec("x")))
    replicated = jax.device_put(ones[:8], NamedSharding(mesh, PartitionSpec()))
    offloaded = jax.device_put(ones, NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host"))
    one = jax.device_put(np.ones(1000, np.int8), jax.devices()[3])
    first, third = jax.devices()[0], jax.devices()[3]
    assert growth(before, first, "device") == 16 * 64 * 4 + 8 * 64 * 4
    assert growth(before, third, "device") == 16 * 64 * 4 + 8 * 64 * 4 + 1000
    assert growth(before, first, "pinned_host") == 16 * 64 * 4
    del sharded, replicated, offloaded, one


@pytest.mark.pairs
def test_inspected_shards_count_once(mesh):
    before = live_array_bytes()
    count = len(jax.devices())
    array = jax.device_put(np.ones((count * 16, 64), np.float32), NamedSharding(mesh, PartitionSpec("x")))
    lookalike = jax.device_put(np.ones((16, 64), np.float32), jax.devices()[0])  # a shard's shape, but another buffer
    looked = [shard.data for shard in array.addressable_shards]
    assert growth(before, jax.devices()[0], "device") == 2 * 16 * 64 * 4
    assert growth(before, jax.devices()[1], "device") == 16 * 64 * 4
    del looked
    assert growth(before, jax.devices()[1], "device") == 16 * 64 * 4
    del array, lookalike


@pytest.mark.pairs
def test_donated_arrays_are_not_counted():
    device = jax.devices()[0]
    array = jax.device_put(np.ones(5000, np.float32), device)
    before = live_array_bytes()
    out = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    assert growth(before, device, "device") == 0
    del out


@pytest.mark.pairs
def test_without_statistics_arrays_are_counted(mesh):
    count = len(jax.devices())
    kept = jax.device_put(np.ones((count, 1 << 16), np.float32), NamedSharding(mesh, PartitionSpec("x")))
    before = memory_in_use(jax.devices())
    on_host = jax.device_put(kept, NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host"))
    on_one = jax.device_put(np.ones(10 << 20, np.int8), jax.devices()[3])
    found = memory_in_use(jax.devices())
    assert found.host_bytes - before.host_bytes == kept.nbytes  # sum over all devices
    sizes = live_array_bytes()
    assert found.device_bytes == max(sizes.get((device, "device"), 0) for device in jax.devices())  # the fullest device
    assert found.device_bytes >= on_one.nbytes
    assert set(found.metrics()) == {f"memory/{name}_bytes" for name in ("device", "host", "rss", "rss_peak")}
    assert memory_in_use([jax.devices()[2]]).device_bytes < found.device_bytes
    del on_host


def test_allocator_statistics_win(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Device:
        in_use: int
        peak: int

        def memory_stats(self):
            return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak}

    devices, other = [Device(10, 99), Device(30, 50)], Device(1, 1)
    arrays = {
        (devices[0], "pinned_host"): 7,
        (devices[0], "device"): 8,
        (other, "device"): 5,
        (other, "pinned_host"): 9,
    }
    monkeypatch.setattr(memory, "live_array_bytes", lambda: arrays)
    metrics = memory_in_use(devices).metrics()
    assert 0 < metrics.pop("memory/rss_bytes") <= metrics.pop("memory/rss_peak_bytes")
    assert metrics == {"memory/device_bytes": 30, "memory/device_peak_bytes": 99, "memory/host_bytes": 7}


@pytest.mark.pairs
def test_resident_memory_grows_with_touched_pages():
    # This uses its own mapping, because memory from malloc may have been touched before.
    with mmap.mmap(-1, 64 << 20) as block:
        before = rss_bytes()
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert 48 << 20 < rss_bytes() - before < 96 << 20
