"""Output of a command on a terminal, its timing, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path

from tests.support.timed_output import TimedOutput, run_timed
from tools.first_hour.commands import RecordedCommand

MAX_SILENCE_SECONDS = 2.0
MAX_FIRST_SECONDS = 1.0
# ANSI escapes: erasing a whole line, erasing from the cursor on, and others (colors, a hidden cursor).
_ERASE_LINE = "\x1b[2K"
_ERASE_TO_END = re.compile(r"\x1b\[0?K")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclasses.dataclass(frozen=True)
class Recording:
    """One command on a terminal.

    Attributes:
        command: the command that was typed.
        output: its output, with the times.
    """

    command: RecordedCommand
    output: TimedOutput

    @property
    def code(self) -> int:
        """The exit code as a shell reports it."""
        return 128 - self.output.code if self.output.code < 0 else self.output.code

    @property
    def lines(self) -> list[str]:
        """The lines as finally visible on screen; a rewritten line has its last state."""
        lines = [render_line(line) for line in self.output.text.replace("\r\n", "\n").split("\n")]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def faults(self) -> list[str]:
        """Descriptions of everything that is wrong; [] if nothing is."""
        faults = []
        if self.code != self.command.code:
            faults.append(f"exit code {self.code}, expected {int(self.command.code)}")
        if "Traceback" in self.output.text:
            faults.append("a traceback")
        if self.output.first > MAX_FIRST_SECONDS:
            faults.append(f"first character after {self.output.first:.1f} s")
        silence_seconds, line_before = self.output.longest()
        if silence_seconds > MAX_SILENCE_SECONDS:
            faults.append(f"{silence_seconds:.1f} s of silence after {line_before!r}")
        return faults

    @property
    def verdict(self) -> str:
        """The times, and what is wrong."""
        silence_seconds, _ = self.output.longest()
        times = f"{self.output.seconds:.1f} s; first {self.output.first:.1f} s, silent {silence_seconds:.1f} s"
        return "; ".join([times, *self.faults] if self.faults else [times, "well"])


def render_line(line: str) -> str:
    """Return the final state of a terminal line.

    Each carriage return restarts the line and overwrites its old text, which stays visible where it is not erased.
    """
    text = ""
    for part in line.rpartition(_ERASE_LINE)[2].split("\r"):
        erasing, *_ = _ERASE_TO_END.split(part, maxsplit=1)
        is_erased_behind = erasing != part
        visible = _ESCAPE.sub("", part)
        text = visible if is_erased_behind else visible + text[len(visible) :]
    return text.rstrip()


def record(command: RecordedCommand, folder: Path, environment: dict[str, str]) -> Recording:
    """Run a command in a folder, on its own terminal."""
    interruption = command.interruption
    is_interrupted = False

    def interrupt(process: subprocess.Popen, text: str) -> None:
        nonlocal is_interrupted
        if interruption is not None and not is_interrupted and interruption.text in text:
            is_interrupted = True
            os.killpg(process.pid, interruption.number)

    # `exec` makes the exit code the program's own, instead of that of a shell that reports why it ended; a pipe
    # needs the shell.
    line = command.line if "|" in command.line else f"exec {command.line}"
    output = run_timed(["bash", "-c", line], environment, folder=folder, terminal=True, react=interrupt)
    return Recording(command, output)
