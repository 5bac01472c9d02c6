"""framework.metrics.goodput: every second is counted in exactly one phase."""

import pytest

from plimsoll.framework.metrics.goodput import Goodput


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_nest_and_sum_to_the_time() -> None:
    clock = Clock()
    goodput = Goodput(clock, since=90.0)
    goodput.enter("step")
    clock.now = 130.0
    with goodput.during("save"):
        clock.now = 133.0
        with goodput.during("input"):
            clock.now = 134.0
        clock.now = 136.0
    clock.now = 140.0
    assert goodput.totals() == {"step": 34.0, "start": 10.0, "input": 1.0, "save": 5.0}
    assert goodput.fraction() == pytest.approx(34 / 50)
    assert goodput.phase == "step"
    assert (
        goodput.line()
        == "goodput 68.0%: steps that count 34 s, starting processes 10 s, waiting for input 1 s, saving 5 s"
    )
    with pytest.raises(AssertionError):
        goodput.enter("sleep")


def test_the_phase_comes_back_after_an_error() -> None:
    goodput = Goodput(Clock())
    with pytest.raises(ZeroDivisionError), goodput.during("save"):
        _ = 1 / 0
    assert goodput.phase == "start"


def test_restart_counts_the_lost_time() -> None:
    clock = Clock()
    goodput = Goodput(clock)
    goodput.carry_over({"step": 50.0, "start": 10.0, "down": 1.0}, down=5.0)
    clock.now += 4.0  # the time of the restart
    goodput.go_back({"step": 30.0, "save": 2.0})
    assert goodput.totals() == {"step": 30.0, "start": 14.0, "lost": 20.0, "down": 6.0}
    assert sum(goodput.totals().values()) == 50.0 + 10.0 + 1.0 + 5.0 + 4.0
    goodput.go_back({})  # back to initialization
    assert goodput.totals()["lost"] == 50.0
    assert goodput.fraction() == 0.0


def test_a_clock_that_was_set_back_takes_no_time_away() -> None:
    goodput = Goodput(Clock())
    goodput.carry_over({}, down=-3600.0)
    assert goodput.totals() == {}
