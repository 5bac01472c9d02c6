"""Runs a command in a separate process, with a pipe or a terminal, and records the time of every chunk of output."""

from __future__ import annotations

import itertools
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# Width of the terminal in characters, enough not to cut the lines of a spinner.
_COLUMNS = 160


class OutputChunk(NamedTuple):
    """A chunk of output."""

    seconds: float  # since the command started
    text: str


class TimedOutput(NamedTuple):
    """Output of a command: stdout and stderr together."""

    chunks: list[OutputChunk]
    seconds: float  # until it ended
    code: int

    @property
    def text(self) -> str:
        """All of the output."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def first(self) -> float:
        """Seconds until the first character."""
        return self.chunks[0].seconds if self.chunks else self.seconds

    def longest(self) -> tuple[float, str]:
        """Return (seconds, the line before it) of the longest silence between two chunks, or before the end."""
        times = [chunk.seconds for chunk in self.chunks] + [self.seconds]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        longest = max(range(len(gaps)), key=gaps.__getitem__)
        text_before = "".join(chunk.text for chunk in self.chunks[: longest + 1])
        lines = [line for line in text_before.replace("\r", "\n").replace("\033[K", "").split("\n") if line.strip()]
        return gaps[longest], lines[-1] if lines else ""


def run_module_timed(
    argv: Sequence[str],
    *,
    terminal: bool = False,
    environment: dict[str, str] | None = None,
    limit: float = 540.0,
    until_first: bool = False,
) -> TimedOutput:
    """Run `python -m WORDS` and record its output until it ends.

    Args:
        argv: the module and its arguments.
        terminal: connect its output to a terminal instead of a pipe.
        environment: environment variables to add.
        limit: seconds after which it is killed.
        until_first: kill it after the first chunk of output.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}

    def kill(process: subprocess.Popen, _: str) -> None:
        process.kill()

    react = kill if until_first else None
    return run_timed([sys.executable, "-m", *argv], variables, terminal=terminal, limit=limit, react=react)


def run_timed(
    program: Sequence[str],
    environment: dict[str, str],
    *,
    folder: Path | None = None,
    terminal: bool = False,
    limit: float = 540.0,
    react: Callable[[subprocess.Popen, str], None] | None = None,
) -> TimedOutput:
    """Run a program in its own session and process group, and record its output until it ends.

    Args:
        program: file and arguments of the program.
        environment: all of its environment variables; TERM and COLUMNS are added.
        folder: working directory; the current one by default.
        terminal: connect its output to a terminal instead of a pipe.
        limit: seconds after which the process group is killed.
        react: called after each chunk of output, with the process and all text so far.
    """
    reader, writer = pty.openpty() if terminal else os.pipe()
    start = time.monotonic()
    process = subprocess.Popen(
        program,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        cwd=folder,
        env={**environment, "TERM": "xterm", "COLUMNS": str(_COLUMNS)},
        start_new_session=True,
    )
    os.close(writer)
    chunks: list[OutputChunk] = []
    while time.monotonic() - start < limit:
        ready, _, _ = select.select([reader], [], [], 1.0)
        try:
            data = os.read(reader, 1 << 16) if ready else None
        except OSError:
            # Linux raises this when no process has the other end of the terminal open.
            data = b""
        if data == b"":
            break
        if data:
            chunks.append(OutputChunk(time.monotonic() - start, data.decode(errors="replace")))
            if react is not None:
                react(process, "".join(chunk.text for chunk in chunks))
    else:
        os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - start
    os.close(reader)
    return TimedOutput(chunks, seconds, process.wait())
