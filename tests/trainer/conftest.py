"""Text for the runs of these tests, and one uninterrupted run to compare with."""

from pathlib import Path

import pytest

from tests.support import runs


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text for one test; $TINY_TEXT is restored afterwards."""
    monkeypatch.setenv("TINY_TEXT", "")
    return runs.write_text(tmp_path / "text")


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of an uninterrupted run of 120 steps, made in a process with one device."""
    root = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TEXT", "")
        runs.write_text(root / "text")
        process = runs.start(root / "run", *runs.LONG)
        assert process.wait(timeout=300) == 0, (root / "run.out").read_text()
    return root / "run"
