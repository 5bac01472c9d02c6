"""Records what every test takes, runs the longest files first, and tells the slowest tests and the largest worker.

`pytest --record-durations` writes tests/durations: the cases of each test function and their seconds of processor time,
as far as this run had them. Processor time counts all threads of the test's process and the processes that it waited
for, so that it is nearly the same on a busy machine.
"""

from __future__ import annotations

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
MIB = 1 << 20
# Key of a report's `user_properties` under which a worker tells the process that began the run what a test took.
SECONDS = "processor_seconds"
PEAK = "peak_bytes"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the flag."""
    parser.addoption("--record-durations", action="store_true", help="write tests/durations from this run")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first, so that no worker begins a long one when the other has finished."""
    durations = recorded()
    seconds_by_file: dict[str, float] = defaultdict(float)
    for item in items:
        cases, seconds = durations.get(item.nodeid.split("[")[0], (1, 0.0))
        seconds_by_file[item.nodeid.split("::")[0]] += seconds / cases
    # The order of a file's own tests stays: sorting is stable.
    items.sort(key=lambda item: -seconds_by_file[item.nodeid.split("::")[0]])


def recorded() -> dict[str, tuple[int, float]]:
    """{test function: (number of its cases, their seconds of processor time)} of tests/durations."""
    if not FILE.exists():
        return {}
    return json.loads(FILE.read_text())


def processor_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measures set-up, test and clean-up together: a fixture of a file counts for the first test that asks for it."""
    item.stash[_began] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Adds the measures to the report of the clean-up, the last of a test."""
    if call.when == "teardown":
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        item.user_properties.append((SECONDS, processor_seconds() - item.stash[_began]))
        item.user_properties.append((PEAK, peak_bytes))
    return (yield)


_began = pytest.StashKey[float]()


class Durations:
    """What the tests of a run took, gathered in the process that began the run."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)
        self._cases: dict[str, int] = defaultdict(int)
        self._peaks: dict[str, int] = defaultdict(int)
        self._growth: dict[str, int] = {}  # bytes by which each test raised the peak of its worker

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the measures of one test."""
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
        """Prints the slowest test functions, with all of their cases, and the largest worker."""
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
        """Writes the file, where that was asked for. Functions that did not run keep what was recorded of them."""
        if not self._config.getoption("--record-durations"):
            return
        durations = recorded()
        for function, seconds in self._seconds.items():
            durations[function] = (self._cases[function], round(seconds, 1))
        lines = [f"{json.dumps(function)}: {json.dumps(entry)}" for function, entry in sorted(durations.items())]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the gathering where reports of all workers arrive."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config))
