"""Which tests are every pair: the marks `once` and `pairs`.

    @pytest.mark.once("int8")   of this test's cases, `make test` runs the one with this id; the others are pairs
    @pytest.mark.pairs          `make test` does not run this test: it shows in another setting what a test there shows

`make test` shows every invariant once, in minutes. `make test-pairs` runs the rest: two axes that meet nowhere else,
real processes where threads show the same, compilers of machines that are not here.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest


class Selection:
    """What -m leaves, known before test modules are imported."""

    has_slow_tests = True


def slow(cases: Iterable[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize` that are slow; none where -m leaves no slow test, as each takes a millisecond
    to collect, in every process."""
    if not Selection.has_slow_tests:
        return []
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks."""
    Selection.has_slow_tests = "not slow" not in config.getoption("markexpr")
    config.addinivalue_line("markers", "once(*ids): of this test's cases, those that `make test` runs")
    config.addinivalue_line("markers", "pairs: shows once more, in another setting; `make test-pairs` runs it")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that `once` does not name with `pairs`, before -m selects.

    Raises:
        pytest.UsageError: `once` names a case that the test does not have.
    """
    names_by_function: dict[str, set[str]] = defaultdict(set)
    ids_by_function: dict[str, set[str]] = defaultdict(set)
    for item in items:
        mark = item.get_closest_marker("once")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        case_id = item.callspec.id
        function = item.nodeid.removesuffix(f"[{case_id}]")
        names_by_function[function].update(mark.args)
        ids_by_function[function].add(case_id)
        if case_id not in mark.args:
            item.add_marker("pairs")
    if any("::" in argument for argument in config.args):
        # Single cases were asked for by their ids, so the others are not among the items.
        return
    for function, names in names_by_function.items():
        unknown = names - ids_by_function[function]
        if unknown:
            raise pytest.UsageError(
                f"{function}: `once` names {sorted(unknown)}; its cases are {sorted(ids_by_function[function])}"
            )
