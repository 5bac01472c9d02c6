"""The simulated pool of a GPU's memory: what it leaves empty, and that a dry run uses it."""

import random

import jax
import jax.numpy as jnp
import pytest

from plimsoll.framework.devices.bfc_pool import BfcPool, is_default_allocator
from plimsoll.framework.schedules.layerwise.programs import AbstractArray, ArrayPlacement, MemoryTracker

MIB = 1 << 20


def test_block_is_split_only_if_enough_is_left() -> None:
    pool = BfcPool()
    first = pool.allocate(100 * MIB)
    # Keeps the freed blocks apart.
    pool.allocate(256)
    second = pool.allocate(300 * MIB)
    pool.allocate(256)
    end = pool.end
    assert end == 400 * MIB + 512
    pool.free(first)
    pool.free(second)
    # 40 MiB would be left of 100, less than half and less than 128: the block is not split, so 20 MiB go to the other.
    assert pool.allocate(60 * MIB) == first
    # 140 MiB are left of 300, at least 128: it is split.
    assert pool.allocate(160 * MIB) == second
    assert pool.allocate(20 * MIB) == second + 160 * MIB
    # Of 120 MiB, more than half are left.
    assert pool.allocate(30 * MIB) == second + 180 * MIB
    assert pool.end == end


def test_free_neighbors_are_merged() -> None:
    pool = BfcPool()
    blocks = [pool.allocate(10 * MIB) for _ in range(4)]
    end = pool.end
    for number in (0, 2, 1, 3):
        pool.free(blocks[number])
    assert pool.allocate(40 * MIB) == 0
    assert pool.end == end == 40 * MIB


def test_sizes_are_rounded_to_256_bytes() -> None:
    pool = BfcPool()
    assert pool.allocate(0) is None
    pool.free(None)
    assert pool.allocate(1) == 0
    assert pool.allocate(257) == 256
    assert pool.end == 256 + 512


def test_random_blocks_never_overlap() -> None:
    rng = random.Random(0)
    pool = BfcPool()
    used: dict[int, int] = {}
    most = 0
    for _ in range(3000):
        if used and rng.random() < 0.5:
            address = rng.choice([*used])
            del used[address]
            pool.free(address)
        else:
            size = rng.choice([256, 4096, MIB, 33 * MIB, 235 * MIB, 1002 * MIB])
            address = pool.allocate(size)
            assert address is not None
            assert all(address + size <= other or other + n <= address for other, n in used.items())
            used[address] = size
        most = max(most, sum(used.values()))
        assert max((address + size for address, size in used.items()), default=0) <= pool.end
    assert most <= pool.end < 1.5 * most
    for address in used:
        pool.free(address)
    assert pool.allocate(most) == 0


def test_dry_run_counts_what_stays_empty() -> None:
    tracker = MemoryTracker(BfcPool())
    placement = ArrayPlacement(jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    def array(mib: int) -> AbstractArray:
        return AbstractArray(jax.ShapeDtypeStruct((mib * MIB,), jnp.uint8), placement, tracker, "x")

    freed = array(100)
    kept = array(1)
    freed.delete()
    # It takes the 100 MiB of the freed array.
    small = array(60)
    assert tracker.live["device"] == 61 * MIB
    assert tracker.allocated == 101 * MIB
    # A result takes over the block of a donated argument; temporaries come after the results.
    small.delete(is_donated=True)
    result = array(60)
    tracker.end_call(50 * MIB)
    assert tracker.allocated == 151 * MIB
    # A donated argument that no result reuses is free after the call.
    kept.delete(is_donated=True)
    tracker.end_call(0)
    assert tracker.allocate(1 * MIB) == 100 * MIB
    del result


@pytest.mark.parametrize(
    ("value", "expected"), [(None, True), ("bfc", True), ("cuda_async", False), ("platform", False)]
)
def test_other_allocators_are_not_simulated(value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    else:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", value)
    assert is_default_allocator() is expected
