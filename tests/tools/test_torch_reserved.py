"""The model of PyTorch's caching allocator, against segments and splits that its source prescribes."""

from tools.bench.torch_reserved import CachingAllocator

MIB = 1 << 20


def test_small_requests_share_a_segment_of_two_mib():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (1, 513, MIB)]
    assert [block.size for block in blocks] == [512, 1024, MIB]
    assert allocator.reserved == 2 * MIB
    # The rest of the segment is too small for another MiB.
    allocator.allocate(MIB)
    assert allocator.reserved == 4 * MIB


def test_large_requests_split_blocks_and_free_neighbors_are_merged():
    allocator = CachingAllocator()
    first, second = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    assert allocator.reserved == 20 * MIB
    # Of 11 MiB, a segment has the next multiple of 2 MiB, and a rest of at most 1 MiB stays part of the block.
    third = allocator.allocate(11 * MIB)
    assert (allocator.reserved, third.size) == (32 * MIB, 12 * MIB)
    for block in (first, third, second):
        allocator.release(block)
    assert sorted(block.size for block in allocator.free["large"]) == [12 * MIB, 20 * MIB]
    # The best fit is taken, and nothing new is reserved.
    assert allocator.allocate(19 * MIB).size == 20 * MIB
    assert allocator.reserved == 32 * MIB
    assert allocator.peak == 22 * MIB


def test_a_gap_between_blocks_cannot_hold_a_larger_one():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        allocator.release(block)
    allocator.allocate(8 * MIB)
    assert allocator.reserved == 40 * MIB
