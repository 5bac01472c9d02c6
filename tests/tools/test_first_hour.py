"""The recording of a user's first hour: each command's output as a terminal shows it, and its faults."""

import signal
from pathlib import Path

import pytest

from tests.support.timed_output import OutputChunk, TimedOutput
from tools.first_hour.__main__ import transcript
from tools.first_hour.commands import Interruption, RecordedCommand
from tools.first_hour.recording import Recording, render_line


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("plain", "plain"),
        ("first\rlast!", "last!"),
        ("longer\rnew", "newger"),
        ("longer\r\x1b[Knew", "new"),
        ("bar 1/2\x1b[2K\rdone", "done"),
        ("\x1b[1mbold\x1b[0m\x1b[?25l", "bold"),
        ("trailing   ", "trailing"),
    ],
)
def test_line_is_the_final_terminal_text(written: str, seen: str) -> None:
    assert render_line(written) == seen


def recording(*chunks: OutputChunk, seconds: float, code: int = 0, expected_code: int = 0) -> Recording:
    command = RecordedCommand("try it", "plimsoll try", expected_code, Interruption("tok/s", signal.SIGINT))
    return Recording(command, TimedOutput(list(chunks), seconds, code))


@pytest.mark.parametrize(
    ("command_run", "faults"),
    [
        (recording(OutputChunk(0.5, "a\n"), OutputChunk(2.4, "b\n"), seconds=4.3), []),
        (recording(OutputChunk(1.2, "a\n"), seconds=1.5), ["first character after 1.2 s"]),
        (recording(OutputChunk(0.1, "a\nb\n"), OutputChunk(2.6, "c\n"), seconds=2.7), ["2.5 s of silence after 'b'"]),
        (recording(OutputChunk(0.1, "Traceback (most\n"), seconds=0.2), ["a traceback"]),
        (recording(OutputChunk(0.1, "a\n"), seconds=0.2, code=1), ["exit code 1, expected 0"]),
        # A shell reports 137 for a process that was killed by signal 9.
        (recording(OutputChunk(0.1, "a\n"), seconds=0.2, code=-9, expected_code=137), []),
    ],
)
def test_problems_are_reported(command_run: Recording, faults: list[str]) -> None:
    assert command_run.faults == faults
    assert command_run.verdict.endswith("; ".join(faults) or "well")


def test_the_transcript_counts_cuts_and_names_no_folder(tmp_path: Path) -> None:
    long_text = "".join(f"line {number} of {tmp_path}/notes\n" for number in range(100))
    well = recording(OutputChunk(0.1, long_text), seconds=0.2)
    unwell = recording(OutputChunk(0.1, "short\n"), seconds=0.2, code=1)
    text = transcript([well, unwell], tmp_path)
    assert "1 of 2 are well" in text.replace("\n", " ")
    assert "line 0 of ~/notes\n" in text
    assert "[76 lines]\nline 88 of ~/notes\n" in text
    assert "SIGINT after 'tok/s'" in text
    assert str(tmp_path) not in text
