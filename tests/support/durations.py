"""Records the processor time of every test, sorts tests by it, and reports the slowest ones.

`pytest --record-durations` writes tests/durations: for each test function that ran, the number of its cases and their
processor time in seconds. Processor time includes all threads of the test's process and the child processes that it
waited for, so it is nearly the same on a busy machine.
"""

from __future__ import annotations

import functools
import json
import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[1] / "durations"
SLOWEST = 20
# Files whose cases start processes and share nothing, so several workers may run them at the same time.
SEPARATE_CASES = (
    "tests/house/test_docs_commands.py",
    "tests/faults/test_processes.py",
    "tests/trainer/test_processes.py",
)
MIB = 1 << 20
# Keys of a report's `user_properties`, with which workers send their measurements to the main process.
SECONDS = "processor_seconds"
PEAK = "peak_bytes"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations from this run")


def sort_longest_first(items: list[pytest.Item]) -> None:
    """Sort the longest work first, so that no worker starts a long file when the others have finished."""
    seconds_by_unit: dict[str, float] = defaultdict(float)
    for item in items:
        seconds_by_unit[work_unit(item.nodeid)] += estimate_seconds(item.nodeid)
    # Sorting is stable, so the tests of a file keep their order.
    items.sort(key=lambda item: -seconds_by_unit[work_unit(item.nodeid)])


def work_unit(nodeid: str) -> str:
    """Return the scope that one worker runs as a whole: the test's file, or the test itself in SEPARATE_CASES."""
    path = nodeid.partition("::")[0]
    return nodeid if path in SEPARATE_CASES else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute units of work over the workers, in the order of the items."""
    from xdist.scheduler import LoadScopeScheduling

    class UnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid)

    return UnitScheduling(config, log)


@functools.cache
def load_durations() -> dict[str, tuple[int, float]]:
    """Return tests/durations: {test function: (number of its cases, their processor time in seconds)}."""
    if not FILE.exists():
        return {}
    return json.loads(FILE.read_text())


def estimate_seconds(nodeid: str) -> float:
    """Return the recorded processor time of a test, as the mean over the cases of its function; 0 if there is none."""
    cases, seconds = load_durations().get(nodeid.partition("[")[0], (1, 0.0))
    return seconds / cases


def processor_seconds() -> float:
    """Return the processor time of this process and of the child processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure setup, call and teardown together; a module's fixture counts for the first test that requests it."""
    item.stash[_began] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the measurements to the teardown report, the last one of a test."""
    if call.when == "teardown":
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        item.user_properties.append((SECONDS, processor_seconds() - item.stash[_began]))
        item.user_properties.append((PEAK, peak_bytes))
    return (yield)


_began = pytest.StashKey[float]()


class Durations:
    """Durations and peak memory of a run's tests, collected in the main process."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)
        self._cases: dict[str, int] = defaultdict(int)
        self._peaks: dict[str, int] = defaultdict(int)
        self._growth: dict[str, int] = {}  # bytes by which each test raised the peak of its worker

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the measurements of one test."""
        if report.when != "teardown":
            return
        measures: dict[str, Any] = dict(report.user_properties)
        function = report.nodeid.split("[")[0]
        self._seconds[function] += measures[SECONDS]
        self._cases[function] += 1
        worker = getattr(report, "worker_id", "this process")
        self._growth[report.nodeid] = measures[PEAK] - self._peaks[worker]
        self._peaks[worker] = measures[PEAK]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the slowest test functions (all cases together) and the peak memory of each worker."""
        if not self._seconds:
            return
        slowest = sorted(self._seconds.items(), key=lambda entry: -entry[1])[:SLOWEST]
        total = sum(self._seconds.values())
        terminalreporter.section(f"processor time: {total:.0f} s; the slowest {len(slowest)} tests with their cases")
        for function, seconds in slowest:
            terminalreporter.write_line(f"{seconds:7.1f} s {self._cases[function]:4d} {function}")
        peaks = ", ".join(f"{worker} {peak / MIB:,.0f} MiB" for worker, peak in sorted(self._peaks.items()))
        terminalreporter.write_line(f"largest resident memory: {peaks}; raised most by")
        largest = sorted(self._growth.items(), key=lambda entry: -entry[1])[:5]
        for test, growth in largest:
            terminalreporter.write_line(f"{growth / MIB:9,.0f} MiB {test}")

    def pytest_sessionfinish(self) -> None:
        """Write the file if the flag is set. Functions that did not run keep their recorded durations."""
        if not self._config.getoption("--record-durations"):
            return
        durations = dict(load_durations())
        for function, seconds in self._seconds.items():
            durations[function] = (self._cases[function], round(seconds, 1))
        lines = [f"{json.dumps(function)}: {json.dumps(entry)}" for function, entry in sorted(durations.items())]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register `Durations` in the main process, which receives the reports of all workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config))
