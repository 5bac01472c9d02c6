"""Selects the cases that `make test`, `make test-pairs` and `make test-all` run.

    @pytest.mark.first(2)      `make test` runs the first two cases of the test; the others are pairs
    @pytest.mark.once("int8")  `make test` runs the case with this id; the others are pairs
    @pytest.mark.pairs         the whole test is one of the pairs

`make test` shows every invariant once, in minutes. The pairs show it again in other settings: two axes that meet
nowhere else, real processes, compilers for other machines.

`--draw=6` runs a sixth of what -m selects. Consecutive commits draw different sixths, so any six of them run every
case. Tests that belong to a file that the last commit changed run in addition.
"""

import functools
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import durations

ROOT = Path(__file__).parents[2]
# Processor seconds that the tests of changed files may add to a drawn part: a rename changes nearly every file.
CHANGED_SECONDS = 300.0


class Selection:
    """The selection by -m, known before test modules are imported."""

    has_slow_tests = True


def slow(cases: Iterable[Any]) -> list[Any]:
    """Mark cases for `pytest.mark.parametrize` as slow.

    Returns no cases if -m selects no slow tests, since each case takes a millisecond to collect in every process.
    """
    if not Selection.has_slow_tests:
        return []
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag."""
    parser.addoption(
        "--draw", type=int, metavar="N", help="run one Nth of the tests, which the number of the last commit draws"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks. Raises UsageError if --draw is not positive."""
    count = config.getoption("--draw")
    if count is not None and count < 1:
        raise pytest.UsageError(f"--draw={count}: expected at least 1")
    Selection.has_slow_tests = "not slow" not in config.getoption("markexpr")
    config.addinivalue_line("markers", "first(count): `make test` runs this many cases of the test")
    config.addinivalue_line("markers", "once(*ids): the cases of this test that `make test` runs")
    config.addinivalue_line("markers", "pairs: `make test-pairs` runs this test")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Report which part runs."""
    count = config.getoption("--draw")
    if count is None:
        return None
    part = get_commit_number() % count
    return f"part {part + 1} of {count}, and the tests of {len(list_changed_files())} changed files"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the pairs before -m selects. Afterwards draw a part, and sort what is left."""
    mark_pairs(config, items)
    yield
    if config.getoption("--draw") is not None:
        select_part(config, items)
    durations.sort_longest_first(items)


def mark_pairs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that belong to the pairs, before -m selects.

    Raises:
        pytest.UsageError: a mark names a case that the test does not have, or the test has no cases.
    """
    named_ids: dict[str, set[str]] = defaultdict(set)
    all_ids: dict[str, list[str]] = defaultdict(list)
    for item in items:
        first = item.get_closest_marker("first")
        once = item.get_closest_marker("once")
        if first is None and once is None:
            continue
        if not hasattr(item, "callspec"):
            raise pytest.UsageError(f"{item.nodeid}: `first` and `once` are for tests with cases")
        case_id = item.callspec.id
        function = item.nodeid.removesuffix(f"[{case_id}]")
        all_ids[function].append(case_id)
        if first is not None and len(all_ids[function]) > first.args[0]:
            item.add_marker("pairs")
        if once is not None:
            named_ids[function].update(once.args)
            if case_id not in once.args:
                item.add_marker("pairs")
    if any("::" in argument for argument in config.args):
        # Single cases were requested by their ids, so the others are not among the items.
        return
    for function, ids in named_ids.items():
        unknown = ids.difference(all_ids[function])
        if unknown:
            raise pytest.UsageError(f"{function} has no cases {sorted(unknown)}; it has {sorted(all_ids[function])}")


def select_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the drawn part of the items, and items that belong to changed files."""
    count = config.getoption("--draw")
    part = get_commit_number() % count
    files = list_changed_files()
    seconds_left = CHANGED_SECONDS
    selected = []
    dropped = []
    for item in items:
        is_selected = zlib.crc32(item.nodeid.encode()) % count == part
        if not is_selected and seconds_left > 0 and belongs_to(item.nodeid, files):
            seconds_left -= durations.estimate_seconds(item.nodeid)
            is_selected = True
        (selected if is_selected else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = selected


def belongs_to(nodeid: str, files: Iterable[str]) -> bool:
    """Return whether a test is in one of the files, is named after one, or has one as its case.

    tests/plan/test_hlo_trips.py belongs to itself, to framework/plan/hlo.py and to framework/plan/trips.py; the case
    `[docs/plan.md]` of any test belongs to docs/plan.md.
    """
    path, _, test = nodeid.partition("::")
    for file in files:
        package, stem = Path(file).parent.name, Path(file).stem
        is_namesake = file.endswith(".py") and f"_{stem}_" in f"{Path(path).stem}_" and package in Path(path).parts
        if path == file or is_namesake or f"[{file}" in test:
            return True
    return False


@functools.cache
def get_commit_number() -> int:
    """Return a number that consecutive commits have consecutively.

    Raises:
        pytest.UsageError: the tests are not in a git checkout.
    """
    count = _git("rev-list", "--count", "--first-parent", "HEAD")
    if not count:
        raise pytest.UsageError(
            "--draw needs the number of the commit, but this is no git checkout; run all cases without it"
        )
    if _git("rev-parse", "--is-shallow-repository") == "true":
        # A shallow clone does not have the history to count.
        return int(_git("rev-parse", "HEAD"), 16)
    return int(count)


@functools.cache
def list_changed_files() -> list[str]:
    """Return the paths that the last commit changed, and the tracked paths with uncommitted changes."""
    return _git("diff", "--name-only", "HEAD^").splitlines()


def _git(*argv: str) -> str:
    """Return the output of a git command; "" if it fails."""
    done = subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
