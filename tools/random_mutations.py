"""Mutation test at random places of framework/: makes one change at a time, and reports which test suite notices.

    pip install coverage
    python -m tools.random_mutations --trace                  which tests of `make test` run which line (15 minutes)
    python -m tools.random_mutations --count=30 --seed=0      breaks 30 lines that some test runs

A mutation changes an operator or a constant, negates a condition, or drops a statement. The tests of `make test` that
run the line in their own process (not in a subprocess) are tried first. If none notices, the cases of `make test-pairs`
in the files of those tests are tried. A mutation that no test notices is either a gap in the tests or an equivalent
program, so look at each one.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.mutate import copy_checkout

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "build" / "lines_of_tests"
ONCE = "not pairs and not slow and not peers"
PAIRS = "pairs and not slow and not peers"
# Maximum number of tests to try for one line. A sample of this size is assumed to notice a mutation if any test does.
MAX_TESTS = 150
TIME_LIMIT = 900
OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class RandomMutation(NamedTuple):
    """One change of one file: the text `old` at a line (from 1) and a column (from 0) becomes `new`."""

    file: str
    line: int
    column: int
    kind: str
    old: str
    new: str


class SuiteResult(NamedTuple):
    """Result of a suite for a mutation: whether a test failed, and which one, or how many passed."""

    noticed: bool
    summary: str


# --- drawing ---------------------------------------------------------------------------------------------------------


def list_mutations(file: str) -> list[RandomMutation]:
    """Return all single changes of a file's statements, ordered by line."""
    source = (ROOT / file).read_text()
    mutations = []
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.stmt):
            mutations += _mutate_statement(file, source, statement)
    return sorted(mutations)


def _mutate_statement(file: str, source: str, statement: ast.stmt) -> Iterator[RandomMutation]:
    """Yield the changes of a simple statement, or of the condition of a compound one."""
    expression: ast.AST
    if isinstance(statement, ast.If | ast.While):
        expression = statement.test
        text = ast.get_source_segment(source, expression)
        yield _mutation(file, source, expression, "condition turned", f"(not ({text}))")
    elif isinstance(statement, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
        expression = statement
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_docstring:
            return
        if isinstance(statement, ast.Expr | ast.AugAssign):
            yield _mutation(file, source, statement, "statement dropped", "pass")
    else:
        return
    # Python 3.11 reports wrong positions for nodes inside f-strings.
    texts = [node for node in ast.walk(expression) if isinstance(node, ast.JoinedStr)]
    inside_texts = {id(node) for text in texts for node in ast.walk(text)}
    for node in ast.walk(expression):
        changed_node = _change_node(node)
        if changed_node is not None and id(node) not in inside_texts:
            yield _mutation(file, source, node, f"another {type(node).__name__}", f"({ast.unparse(changed_node)})")


def _change_node(node: ast.AST) -> ast.AST | None:
    """Return the node with another operator or constant, or None if there is nothing to change."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        return ast.Compare(node.left, [OPERATORS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(OPERATORS[type(node.op)](), node.values)
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            return ast.Constant(not node.value)
        if isinstance(node.value, int | float):
            return ast.Constant(node.value + 1)
    return None


def _mutation(file: str, source: str, node: ast.AST, kind: str, new: str) -> RandomMutation:
    assert isinstance(node, ast.stmt | ast.expr)
    old = ast.get_source_segment(source, node)
    assert old is not None
    # Column offsets of ast count bytes.
    line = source.splitlines()[node.lineno - 1]
    column = len(line.encode()[: node.col_offset].decode())
    return RandomMutation(file, node.lineno, column, kind, old, new)


def sample_mutations(count: int, seed: int) -> list[tuple[RandomMutation, list[str]]]:
    """Draw mutations of lines that tests run, each with these tests. Longer files are drawn more often."""
    candidates = []
    for path in sorted((ROOT / "framework").rglob("*.py")):
        candidates += list_mutations(str(path.relative_to(ROOT)))
    random.Random(seed).shuffle(candidates)
    tests_by_line = _tests_by_line()
    chosen: list[tuple[RandomMutation, list[str]]] = []
    for mutation in candidates:
        tests = sorted(tests_by_line.get((mutation.file, mutation.line), ()))
        if tests:
            chosen.append((mutation, tests))
        if len(chosen) == count:
            break
    return chosen


# --- which tests run which line --------------------------------------------------------------------------------------


class LineTracer:
    """A pytest plugin that records with coverage.py which test runs which line of framework/."""

    def __init__(self) -> None:
        import coverage

        TRACE.mkdir(parents=True, exist_ok=True)
        self._coverage = coverage.Coverage(
            data_file=str(TRACE / f"{os.getpid()}.db"), include=[f"{ROOT}/plimsoll/framework/*"], config_file=False
        )
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Attribute lines that run from now on to this test."""
        self._coverage.switch_context(nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the file of this process."""
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: object) -> None:
    """Register the plugin in the processes that run tests."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(LineTracer())  # type: ignore[attr-defined]


def trace() -> int:
    """Run `make test` under coverage.py."""
    shutil.rmtree(TRACE, ignore_errors=True)
    options = ["-q", "-n", "2", "--dist", "loadfile", "-m", ONCE, "-p", "tools.random_mutations"]
    return subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False).returncode


def _tests_by_line() -> dict[tuple[str, int], set[str]]:
    """Return {(file, line): tests that run it}; lines that only run when a module is imported have no tests."""
    from coverage import CoverageData

    tests_by_line: dict[tuple[str, int], set[str]] = {}
    files = sorted(TRACE.glob("*.db"))
    if not files:
        raise SystemExit(f"error: {TRACE} has no trace; create it with python -m tools.random_mutations --trace")
    for file in files:
        data = CoverageData(str(file))
        data.read()
        for path in data.measured_files():
            name = str(Path(path).relative_to(ROOT / "plimsoll"))
            for line, contexts in data.contexts_by_lineno(path).items():
                tests = {context for context in contexts if context}
                tests_by_line.setdefault((name, line), set()).update(tests)
    return tests_by_line


# --- trying ----------------------------------------------------------------------------------------------------------


def apply(mutation: RandomMutation, folder: Path) -> None:
    """Change the file in a copy of the checkout. Raises ValueError if the text is not at its position."""
    path = folder / mutation.file
    lines = path.read_text().splitlines(keepends=True)
    start = sum(map(len, lines[: mutation.line - 1])) + mutation.column
    source = "".join(lines)
    if not source.startswith(mutation.old, start):
        raise ValueError(f"{mutation.file}:{mutation.line} has no {mutation.old!r}")
    end = start + len(mutation.old)
    path.write_text(source[:start] + mutation.new + source[end:])


def run_tests(folder: Path, arguments: list[str], marks: str) -> SuiteResult:
    """Run tests on a copy of the checkout and return the verdict."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-summary", "-m", marks]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        # An endless loop, or many tests on a slow machine; in either case no test has failed.
        return SuiteResult(False, f"no end after {TIME_LIMIT} s")
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    last_line = lines[-1] if lines else done.stderr[-200:]
    # 5: no test was selected. Any other nonzero code is a failure of a test or of an import.
    return SuiteResult(done.returncode not in (0, 5), last_line)


def judge_mutation(mutation: RandomMutation, tests: list[str]) -> tuple[SuiteResult, SuiteResult]:
    """Return the verdicts of `make test` and, if that notices nothing, of `make test-pairs`."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as parent:
        folder = Path(parent) / "checkout"
        copy_checkout(folder)
        apply(mutation, folder)
        once = run_tests(folder, random.Random(0).sample(tests, min(MAX_TESTS, len(tests))), ONCE)
        if once.noticed:
            return once, once
        files = sorted({test.split("::")[0] for test in tests})
        return once, run_tests(folder, files, PAIRS)


def main() -> int:
    """Draw and try mutations, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="record which tests run which line, and stop")
    parser.add_argument("--count", type=int, default=30, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the mutations")
    args = parser.parse_args()
    if args.trace:
        return trace()
    noticed_once = 0
    noticed_by_pairs = 0
    for mutation, tests in sample_mutations(args.count, args.seed):
        began = time.perf_counter()
        once, pairs = judge_mutation(mutation, tests)
        noticed_once += once.noticed
        noticed_by_pairs += pairs.noticed
        suite = "test" if once.noticed else "test-pairs" if pairs.noticed else "NONE"
        seconds = time.perf_counter() - began
        print(f"{suite:10} {seconds:4.0f} s  {mutation.file}:{mutation.line}  {mutation.kind}")
        print(f"    {mutation.old!r} -> {mutation.new!r}")
        print(f"    {len(tests)} tests run the line; {pairs.summary}", flush=True)
    print(f"make test notices {noticed_once} of {args.count}, with make test-pairs {noticed_by_pairs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
