"""The cases that `make test` and `make test-pairs` select: tests/support/selection.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import durations, selection

IDS = [f"tests/plan/test_page.py::test_it[{number}]" for number in range(300)]


class Git:
    """A fake git with its own history."""

    count = "7"
    shallow = "false"
    head = "ab12"
    changed = ""

    def __call__(self, *argv: str) -> str:
        answers = {"--count": self.count, "--is-shallow-repository": self.shallow, "HEAD^": self.changed}
        return next((answer for argument, answer in answers.items() if argument in argv), self.head)


@pytest.fixture
def git(monkeypatch: pytest.MonkeyPatch) -> Iterator[Git]:
    fake = Git()
    monkeypatch.setattr(selection, "_git", fake)
    forget()
    yield fake
    forget()


def forget() -> None:
    selection.get_commit_number.cache_clear()
    selection.list_changed_files.cache_clear()


def draw(ids: list[str], count: int = 3) -> list[str]:
    """Return the ids that --draw=COUNT keeps."""
    items: list[Any] = [SimpleNamespace(nodeid=nodeid) for nodeid in ids]
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(hook=hook, getoption={"--draw": count}.__getitem__)
    forget()
    selection.select_part(config, items)
    selected = [item.nodeid for item in items]
    assert sorted(selected + [item.nodeid for item in deselected]) == sorted(ids)
    return selected


@pytest.mark.parametrize("count", [1, 3, 6])
def test_consecutive_commits_run_every_case_once(git: Git, count: int) -> None:
    drawn = []
    for number in range(7, 7 + count):
        git.count = str(number)
        drawn.append(draw(IDS, count))
    assert sorted(nodeid for ids in drawn for nodeid in ids) == sorted(IDS)
    mean = len(IDS) / count
    assert all(0.65 * mean < len(ids) < 1.35 * mean for ids in drawn)


def test_tests_for_changed_files_are_added(git: Git) -> None:
    part = draw(IDS)
    git.changed = "framework/plan/page/page.py\nframework/data/page.py"
    assert draw(IDS) == part, "neither is framework/plan/page.py"
    git.changed = "framework/plan/page.py"
    assert draw(IDS) == IDS


def test_rename_touching_everything_stays_bounded(git: Git, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "estimate_seconds", lambda nodeid: selection.CHANGED_SECONDS / 10)
    part = draw(IDS)
    git.changed = "tests/plan/test_page.py"
    assert len(draw(IDS)) == len(part) + 10


def test_shallow_clone_selects_by_the_commit_hash(git: Git) -> None:
    git.count, git.shallow = "1", "true"
    drawn = set()
    for git.head in ("a1", "a2", "a3"):
        drawn.update(draw(IDS))
    assert drawn == set(IDS)


def test_without_git_it_is_refused(git: Git) -> None:
    git.count = ""
    with pytest.raises(pytest.UsageError, match="no git checkout"):
        draw(IDS)


@pytest.mark.parametrize(
    ("file", "nodeid", "belongs"),
    [
        ("tests/plan/test_hlo.py", "tests/plan/test_hlo.py::test_types", True),
        ("framework/plan/hlo.py", "tests/plan/test_hlo.py::test_types", True),
        ("framework/plan/hlo.py", "tests/plan/test_hlo_trips.py::test_it", True),
        ("framework/plan/in_backward.py", "tests/plan/test_in_backward_bytes.py::test_it", True),
        ("framework/plan/hl.py", "tests/plan/test_hlo.py::test_types", False),
        ("framework/data/hlo.py", "tests/plan/test_hlo.py::test_types", False),
        ("docs/plan.md", "tests/house/test_docs_commands.py::test_commands_run[docs/plan.md1]", True),
        ("docs/plan.md", "tests/house/test_docs_commands.py::test_commands_run[docs/data.md]", False),
    ],
)
def test_file_to_test_mapping(file: str, nodeid: str, belongs: bool) -> None:
    assert selection.belongs_to(nodeid, [file]) == belongs


MARKED = """
import pytest

@pytest.mark.first(2)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_first(number): pass

@pytest.mark.once("b")
@pytest.mark.parametrize("name", ["a", "b"])
def test_once(name): pass

@pytest.mark.pairs
def test_pairs(): pass

def test_plain(): pass
"""


def collect(folder: Path, text: str, marks: str) -> tuple[list[str], str]:
    """Return the names of the tests that pytest selects from a file, and what it prints."""
    (folder / "test_marked.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    command += ["-p", "tests.support.selection", "-m", marks, "test_marked.py"]
    environment = {**os.environ, "PYTHONPATH": str(selection.ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    return [line.partition("::")[2] for line in printed.splitlines() if "::" in line], printed


def test_marks_select_each_suites_cases(tmp_path: Path) -> None:
    once, _ = collect(tmp_path, MARKED, "not pairs")
    assert once == ["test_first[1]", "test_first[2]", "test_once[b]", "test_plain"]
    pairs, _ = collect(tmp_path, MARKED, "pairs")
    assert pairs == ["test_first[3]", "test_once[a]", "test_pairs"]


def test_a_mark_that_names_no_case_is_an_error(tmp_path: Path) -> None:
    _, printed = collect(tmp_path, MARKED.replace('once("b")', 'once("c")'), "not pairs")
    assert "test_once has no cases ['c']; it has ['a', 'b']" in printed
