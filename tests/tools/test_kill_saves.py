"""tools/kill_saves.py with a small model and few kills."""

from pathlib import Path

import pytest

from tests.support import runs
from tools import kill_saves


@pytest.mark.pairs
def test_a_run_that_is_killed_within_saves_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """SIGKILL within three saves of a run: it resumes each time, with the same losses and the same last checkpoint."""
    runs.write_text(tmp_path / "text")
    monkeypatch.setenv("XLA_FLAGS", runs.xla_flags())
    # Saves of such a small model take milliseconds, so a busy machine delays some kills until after the commit.
    monkeypatch.setattr(kill_saves, "MIN_SHARE", 0.3)
    code = kill_saves.main([f"--folder={tmp_path / 'runs'}", "--kills=3", f"--config={runs.CONFIG}:tiny"])
    output = capsys.readouterr().out
    assert code == 0, output
    assert "losses: 13 steps compared, 0 differ" in output
