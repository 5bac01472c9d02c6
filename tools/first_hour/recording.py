"""What a command prints on a terminal, and when: how long until the first character, and the longest silence."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

from tools.first_hour.commands import Command

_COLUMNS = 120
_ROWS = 50
# ANSI escapes: erasing a whole line, erasing from the cursor on, and others (colours, a hidden cursor).
_ERASE_LINE = "\x1b[2K"
_ERASE_TO_END = re.compile(r"\x1b\[0?K")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_CHUNK_BYTES = 65536


@dataclasses.dataclass
class Recording:
    """One command on a terminal.

    Attributes:
        command: what was typed.
        output: all that the terminal was sent, with its carriage returns.
        code: exit code.
        seconds: from the start of the process to its end.
        first_character_seconds: from the start to the first character; None if there was none.
        longest_silence_seconds: between two characters, or the last one and the end.
        silent_after: the line on the terminal when that silence began.
    """

    command: Command
    output: str
    code: int
    seconds: float
    first_character_seconds: float | None
    longest_silence_seconds: float
    silent_after: str

    @property
    def lines(self) -> list[str]:
        """Output as a person sees it in the end: of a line that was rewritten, its last state."""
        return [shown(line) for line in self.output.replace("\r\n", "\n").split("\n")]

    def faults(self, max_silence_seconds: float, max_first_seconds: float) -> list[str]:
        """What is wrong with it, in words; [] if nothing is."""
        faults = []
        if self.code != self.command.code:
            faults.append(f"exit code {self.code}, expected {int(self.command.code)}")
        if "Traceback" in self.output:
            faults.append("a traceback")
        if self.first_character_seconds is None:
            faults.append("nothing printed")
        elif self.first_character_seconds > max_first_seconds:
            faults.append(f"first character after {self.first_character_seconds:.1f} s")
        if self.longest_silence_seconds > max_silence_seconds:
            faults.append(f"{self.longest_silence_seconds:.1f} s of silence after {self.silent_after!r}")
        return faults


def shown(line: str) -> str:
    """A terminal's line in the end: each carriage return begins it anew, over what is there, unless that is erased."""
    text = ""
    for part in line.rpartition(_ERASE_LINE)[2].split("\r"):
        erasing, *_ = _ERASE_TO_END.split(part, maxsplit=1)
        is_erased_behind = erasing != part
        visible = _ESCAPE.sub("", part)
        text = visible if is_erased_behind else visible + text[len(visible) :]
    return text.rstrip()


def record(command: Command, folder: Path, environment: dict[str, str], limit_seconds: float = 600) -> Recording:
    """Runs a command in a folder, on a terminal of its own.

    Raises:
        TimeoutError: it took longer than the limit, and was ended.
    """
    terminal, process_side = pty.openpty()
    os.set_inheritable(process_side, True)
    environment = {**environment, "COLUMNS": str(_COLUMNS), "LINES": str(_ROWS), "TERM": "xterm"}
    began = time.monotonic()
    process = subprocess.Popen(
        # `exec` has the signal reach the program, not a shell that waits for it; a pipe needs the shell.
        ["bash", "-c", command.line if "|" in command.line else f"exec {command.line}"],
        cwd=folder,
        env=environment,
        stdin=process_side,
        stdout=process_side,
        stderr=process_side,
        start_new_session=True,
    )
    os.close(process_side)
    try:
        chunks = _chunks_until_end(terminal, process, command, began, limit_seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        os.close(terminal)
    code = process.wait()
    return _recording(command, chunks, code, time.monotonic() - began)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """What came at once."""

    seconds: float  # since the start
    text: str


def _chunks_until_end(
    terminal: int,
    process: subprocess.Popen,
    command: Command,
    began: float,
    limit_seconds: float,
) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    interruption = command.interruption
    output = ""
    while True:
        elapsed_seconds = time.monotonic() - began
        if elapsed_seconds > limit_seconds:
            raise TimeoutError(f"{command.line}: over {limit_seconds:g} s; it printed\n{output[-2000:]}")
        readable, _, _ = select.select([terminal], [], [], 0.2)
        if not readable:
            continue
        try:
            text = os.read(terminal, _CHUNK_BYTES).decode(errors="replace")
        except OSError:
            # Linux says EIO once all processes of the terminal are gone.
            return chunks
        if not text:
            return chunks
        chunks.append(_Chunk(time.monotonic() - began, text))
        output += text
        if interruption is not None and interruption.text in output:
            os.killpg(process.pid, interruption.number)
            interruption = None


def _recording(command: Command, chunks: list[_Chunk], code: int, seconds: float) -> Recording:
    longest_seconds = 0.0
    silent_after = ""
    output = ""
    for chunk, next_seconds in zip(chunks, [*[chunk.seconds for chunk in chunks[1:]], seconds], strict=True):
        output += chunk.text
        silence_seconds = next_seconds - chunk.seconds
        if silence_seconds > longest_seconds:
            longest_seconds = silence_seconds
            silent_after = shown(output.replace("\r\n", "\n").rstrip("\n").split("\n")[-1])
    return Recording(
        command=command,
        output=output,
        # As a shell says it.
        code=128 - code if code < 0 else code,
        seconds=seconds,
        first_character_seconds=chunks[0].seconds if chunks else None,
        longest_silence_seconds=longest_seconds,
        silent_after=silent_after,
    )
