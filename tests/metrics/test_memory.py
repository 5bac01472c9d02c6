"""Memory in use on forced CPU devices, where there are no allocator statistics, and with a stand-in that has them."""

import dataclasses
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from framework.metrics import memory
from framework.metrics.memory import host_rss_bytes, live_array_bytes, memory_in_use


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("x",))


def growth(before, device, kind):
    return live_array_bytes().get((device, kind), 0) - before.get((device, kind), 0)


def test_live_bytes_by_device_and_kind(mesh):
    before = live_array_bytes()
    count = len(jax.devices())
    ones = np.ones((count * 16, 64), np.float32)
    sharded = jax.device_put(ones, NamedSharding(mesh, PartitionSpec("x")))
    replicated = jax.device_put(ones[:8], NamedSharding(mesh, PartitionSpec()))
    hosted = jax.device_put(ones, NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host"))
    one = jax.device_put(np.ones(1000, np.int8), jax.devices()[3])
    first, third = jax.devices()[0], jax.devices()[3]
    assert growth(before, first, "device") == 16 * 64 * 4 + 8 * 64 * 4
    assert growth(before, third, "device") == 16 * 64 * 4 + 8 * 64 * 4 + 1000
    assert growth(before, first, "pinned_host") == 16 * 64 * 4
    del sharded, replicated, hosted, one


def test_shards_that_were_looked_at_count_once(mesh):
    before = live_array_bytes()
    count = len(jax.devices())
    array = jax.device_put(np.ones((count * 16, 64), np.float32), NamedSharding(mesh, PartitionSpec("x")))
    lookalike = jax.device_put(np.ones((16, 64), np.float32), jax.devices()[0])  # the shape of a shard, another buffer
    looked = [shard.data for shard in array.addressable_shards]
    assert growth(before, jax.devices()[0], "device") == 2 * 16 * 64 * 4
    assert growth(before, jax.devices()[1], "device") == 16 * 64 * 4
    del looked
    assert growth(before, jax.devices()[1], "device") == 16 * 64 * 4
    del array, lookalike


def test_donated_arrays_are_gone():
    device = jax.devices()[0]
    array = jax.device_put(np.ones(5000, np.float32), device)
    before = live_array_bytes()
    out = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    assert growth(before, device, "device") == 0
    del out


def test_memory_in_use_says_where_it_comes_from(mesh):
    kept = jax.device_put(np.ones((len(jax.devices()), 1 << 16)), NamedSharding(mesh, PartitionSpec("x")))
    kept_on_host = jax.device_put(kept, NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host"))
    found = memory_in_use()
    assert found.source == "live_arrays"
    assert found.device_peak_bytes is None
    assert found.device_bytes == found.array_bytes["device"] >= (1 << 16) * kept.dtype.itemsize
    metrics = found.metrics()
    assert metrics["memory/host_bytes"] >= (1 << 16) * kept.dtype.itemsize
    assert set(metrics) == {"memory/device_bytes", "memory/host_bytes", "memory/rss_bytes"}
    assert memory_in_use([jax.devices()[2]]).device_bytes <= found.device_bytes
    del kept_on_host


def test_allocator_statistics_win(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Device:
        stats: tuple
        process_index: int = 0

        def memory_stats(self):
            return dict(self.stats)

    devices = [
        Device((("bytes_in_use", 10), ("peak_bytes_in_use", 99), ("bytes_limit", 200))),
        Device((("bytes_in_use", 30), ("peak_bytes_in_use", 50), ("bytes_limit", 200))),
        Device((("bytes_in_use", 900),), process_index=1),  # another process's: not addressable
    ]
    monkeypatch.setattr(memory, "live_array_bytes", lambda: {(devices[0], "pinned_host"): 7, (devices[2], "device"): 5})
    found = memory_in_use(devices)
    assert (found.source, found.device_bytes, found.device_peak_bytes) == ("memory_stats", 30, 99)
    assert found.device_limit_bytes == 200
    assert found.array_bytes == {"pinned_host": 7}
    assert found.metrics()["memory/device_peak_bytes"] == 99


def test_resident_memory_grows_with_what_is_touched():
    before = host_rss_bytes()
    block = np.ones(64 << 20, np.uint8)
    grown = host_rss_bytes() - before
    assert 48 << 20 < grown < 96 << 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert host_rss_bytes() <= peak + (16 << 20)  # the kernel adds the pages of threads up now and then only
    del block


def test_resident_memory_without_proc(monkeypatch):
    def no_proc(*args, **kwargs):
        raise FileNotFoundError(args[0])

    monkeypatch.setattr("builtins.open", no_proc)
    assert host_rss_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_bytes_follow_dtype():
    before = live_array_bytes()
    array = jnp.ones(4096, jnp.bfloat16)
    assert growth(before, jax.devices()[0], "device") == 8192
    del array
