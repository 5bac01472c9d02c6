"""Text for the runs of these tests."""

from pathlib import Path

import pytest

from tests.support import runs


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text for one test; $TINY_TEXT is restored afterwards."""
    monkeypatch.setenv("TINY_TEXT", "")
    return runs.write_text(tmp_path / "text")
