"""The recording of a user's first hour: each command's output as a terminal shows it, and its faults."""

import signal
from pathlib import Path

import pytest

from tests.support.silences import Chunk, Heard
from tools.first_hour.__main__ import transcript
from tools.first_hour.commands import Command, Interruption
from tools.first_hour.recording import Recording, shown


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
def test_a_line_is_what_a_terminal_shows_in_the_end(written: str, seen: str) -> None:
    assert shown(written) == seen


def recording(*chunks: Chunk, seconds: float, code: int = 0, expected_code: int = 0) -> Recording:
    command = Command("try it", "plimsoll try", expected_code, Interruption("tok/s", signal.SIGINT))
    return Recording(command, Heard(list(chunks), seconds, code))


@pytest.mark.parametrize(
    ("command_run", "faults"),
    [
        (recording(Chunk(0.5, "a\n"), Chunk(2.4, "b\n"), seconds=4.3), []),
        (recording(Chunk(1.2, "a\n"), seconds=1.5), ["first character after 1.2 s"]),
        (recording(Chunk(0.1, "a\nb\n"), Chunk(2.6, "c\n"), seconds=2.7), ["2.5 s of silence after 'b'"]),
        (recording(Chunk(0.1, "Traceback (most\n"), seconds=0.2), ["a traceback"]),
        (recording(Chunk(0.1, "a\n"), seconds=0.2, code=1), ["exit code 1, expected 0"]),
        # A shell reports 137 for a process that was killed by signal 9.
        (recording(Chunk(0.1, "a\n"), seconds=0.2, code=-9, expected_code=137), []),
    ],
)
def test_what_is_wrong_is_said(command_run: Recording, faults: list[str]) -> None:
    assert command_run.faults == faults
    assert command_run.verdict.endswith("; ".join(faults) or "well")


def test_the_transcript_counts_cuts_and_names_no_folder(tmp_path: Path) -> None:
    long_text = "".join(f"line {number} of {tmp_path}/notes\n" for number in range(100))
    well = recording(Chunk(0.1, long_text), seconds=0.2)
    unwell = recording(Chunk(0.1, "short\n"), seconds=0.2, code=1)
    text = transcript([well, unwell], tmp_path)
    assert "1 of 2 are well" in text.replace("\n", " ")
    assert "line 0 of ~/notes\n" in text
    assert "[76 lines]\nline 88 of ~/notes\n" in text
    assert "SIGINT after 'tok/s'" in text
    assert str(tmp_path) not in text
