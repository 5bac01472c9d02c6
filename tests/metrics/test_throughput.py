"""Rates with a clock that the test advances by hand."""

import pytest

from plimsoll.framework.metrics.throughput import Throughput


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps(throughput, clock, seconds, count):
    for _ in range(count):
        clock.now += seconds
        throughput.step()


def test_compiling_step_is_left_out():
    clock = Clock()
    throughput = Throughput(100, 6.0, None, clock=clock)
    assert throughput.metrics() == {}
    steps(throughput, clock, 60.0, 1)
    assert throughput.metrics() == {}
    steps(throughput, clock, 0.5, 10)
    assert throughput.metrics() == {"train/steps_per_second": 2.0, "train/tokens_per_second": 200.0}


def test_window_forgets():
    clock = Clock()
    throughput = Throughput(100, 6.0, None, window=4, clock=clock)
    steps(throughput, clock, 1.0, 10)
    steps(throughput, clock, 0.25, 2)
    assert throughput.metrics()["train/steps_per_second"] == 4 / 2.5
    steps(throughput, clock, 0.25, 2)
    assert throughput.metrics()["train/steps_per_second"] == 4.0


def test_pauses_do_not_count():
    clock = Clock()
    throughput = Throughput(100, 6.0, None, clock=clock)
    steps(throughput, clock, 1.0, 3)
    with throughput.pause():
        clock.now += 500
    steps(throughput, clock, 1.0, 3)
    assert throughput.metrics()["train/steps_per_second"] == pytest.approx(1.0)

    def evaluation_that_fails():
        clock.now += 77
        raise KeyError

    with pytest.raises(KeyError), throughput.pause():
        evaluation_that_fails()
    steps(throughput, clock, 1.0, 1)  # the clock runs again
    assert throughput.metrics()["train/steps_per_second"] == pytest.approx(1.0)


def test_mfu_needs_a_peak():
    clock = Clock()
    throughput = Throughput(1000, flops_per_token=6e9, peak_flops_total=8 * 197e12, clock=clock)
    steps(throughput, clock, 0.01, 5)
    assert throughput.metrics()["train/mfu"] == pytest.approx(1000 / 0.01 * 6e9 / (8 * 197e12))
    unknown = Throughput(1000, 6e9, None, clock=clock)
    steps(unknown, clock, 0.01, 5)
    assert "train/mfu" not in unknown.metrics()


def test_constant_clock_gives_no_rate():
    clock = Clock()
    throughput = Throughput(100, 6.0, None, clock=clock)
    steps(throughput, clock, 0.0, 3)
    assert throughput.metrics() == {}
