"""The global order is a pure function of (index, seed); the prefetcher respects its bound and hides no error."""

import threading
import time
from collections import Counter

import numpy as np
import pytest

from plimsoll.framework.data.order import GlobalOrder, Prefetcher


@pytest.mark.pairs
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 1000, 1 << 14, (1 << 14) + 1])
def test_an_epoch_has_each_window_once(count: int):
    order = GlobalOrder([count], [1.0], seed=3)
    for epoch in range(3 if count < 10_000 else 1):
        windows = [order.locate(epoch * count + i)[1] for i in range(count)]
        assert sorted(windows) == list(range(count))


def test_epochs_seeds_and_sources_have_different_orders():
    def epoch(order: GlobalOrder, number: int) -> tuple[int, ...]:
        return tuple(order.locate(number * 100 + i)[1] for i in range(100))

    zero, one = GlobalOrder([100], [1.0], seed=0), GlobalOrder([100], [1.0], seed=1)
    orders = {epoch(order, number) for order in (zero, one) for number in range(2)}
    places = [GlobalOrder([100, 100], [0.5, 0.5], seed=0).locate(i) for i in range(200)]
    orders |= {tuple(window for source, window in places if source == number) for number in range(2)}
    assert len(orders) == 5  # of 6: a mixture shuffles its first source like a single one
    assert tuple(range(100)) not in orders


def test_the_order_is_pinned():
    """Any other way to shuffle or mix would silently change the data of a resumed run."""
    single = GlobalOrder([1000], [1.0], seed=0)
    assert [single.locate(i)[1] for i in (0, 1, 2, 999, 1000, 123456)] == [869, 178, 342, 274, 428, 953]
    mixed = GlobalOrder([10, 20], [0.25, 0.75], seed=0)
    assert [mixed.locate(i) for i in range(8)] == [
        (0, 3), (1, 18), (1, 15), (1, 9), (0, 4), (1, 8), (1, 6), (1, 13),
    ]  # fmt: skip


def test_an_epoch_is_shuffled_evenly():
    """Over many epochs each window is at each position about equally often, and neighbors do not stay together."""
    count, epochs = 6, 3000
    order = GlobalOrder([count], [1.0], seed=5)
    windows = np.array([[order.locate(e * count + i)[1] for i in range(count)] for e in range(epochs)])
    for place in range(count):
        shares = np.bincount(windows[:, place], minlength=count) / epochs
        np.testing.assert_allclose(shares, 1 / count, atol=0.035)
    assert abs(np.mean(np.diff(windows, axis=1) == 1) - 1 / count) < 0.03


def test_a_long_source_costs_no_memory_and_no_start_up():
    order = GlobalOrder([10**12], [1.0], seed=2**63)
    windows = [order.locate(i)[1] for i in range(2000)]
    assert len(set(windows)) == 2000
    assert 0.45 < np.mean(windows) / 10**12 < 0.55


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.9, 0.1], [0.6, 0.3, 0.1]])
def test_a_mixture_keeps_to_its_weights_in_every_stretch(weights: list[float]):
    counts = [50, 80, 20][: len(weights)]
    order = GlobalOrder(counts, weights, seed=1)
    places = [order.locate(i) for i in range(1500)]
    for start in (0, 500):
        shares = Counter(source for source, _ in places[start : start + 1000])
        for source, weight in enumerate(weights):
            assert abs(shares[source] / 1000 - weight) < 0.011
    for source, count in enumerate(counts):  # each source runs through its windows epoch by epoch
        seen = [window for at, window in places if at == source]
        assert sorted(seen[:count]) == list(range(count))


# ---- the prefetcher


def test_results_come_in_order_from_any_start_and_end():
    with Prefetcher(lambda i: i * i, 3, 8, depth=2) as squares:
        assert list(squares) == [9, 16, 25, 36, 49]
        assert next(squares, "end") == "end"


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_is_bounded(depth: int):
    made, lock = [], threading.Lock()

    def make(index: int) -> int:
        with lock:
            made.append(index)
        return index

    with Prefetcher(make, 0, 1 << 60, depth=depth) as results:
        for taken in range(1, 6):
            next(results)
            deadline = time.monotonic() + 5
            while len(made) < taken + depth and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.05)  # enough time for one too many to show
            assert sorted(made) == list(range(taken + depth))


def test_error_is_raised_in_order_and_ends_the_stream():
    def make(index: int) -> int:
        if index == 3:
            raise ValueError("shard x: truncated")
        return index

    results = Prefetcher(make, 0, 10, depth=4)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"shard x: truncated"):
        next(results)
    with pytest.raises(ValueError, match=r"closed iterator"):  # another call does not skip the bad batch
        next(results)


def test_closing_stops_the_threads_and_may_be_repeated():
    results = Prefetcher(lambda i: i, 0, 1 << 60, depth=3)
    next(results)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")}
    assert before
    results.close()
    results.close()
    for thread in before:
        thread.join(5)
    assert not any(thread.is_alive() for thread in before)
