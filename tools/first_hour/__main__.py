"""Records a newcomer's first hour: 40 commands on a terminal, with their output, times, and a verdict on each.

python -m tools.first_hour --out=docs/benchmarks/first_hour.txt
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import pydoc_data.topics
import re
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

from tools.first_hour.commands import COMMANDS, FILES
from tools.first_hour.recording import MAX_FIRST_SECONDS, MAX_SILENCE_SECONDS, Recording, record

# Only the beginning and the end of a long output are written.
_LINES_AT_EACH_END = 12
_RULE_CHARACTERS = 120


def main() -> int:
    """Record the commands; return 0 if nothing is wrong with any of them."""
    parser = argparse.ArgumentParser(prog="python -m tools.first_hour", description="Record a newcomer's first hour.")
    parser.add_argument("--out", help="text file for the recording; default: print only the verdicts")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the commands to run, in the folder of --folder")
    parser.add_argument("--folder", help="folder to work in; default: a new one")
    args = parser.parse_args()
    # A shell makes its background jobs ignore Ctrl-C, and their children inherit that; restore the default handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="first_hour_"))
    write_files(folder)
    recordings = []
    for number, command in enumerate(COMMANDS, 1):
        if args.only and number not in args.only:
            continue
        recording = record(command, folder, environment(folder))
        recordings.append(recording)
        print(f"{number:2}  {recording.verdict:<60}  {command.line}", flush=True)
    if args.out:
        Path(args.out).write_text(transcript(recordings, folder))
    return int(any(recording.faults for recording in recordings))


def write_files(folder: Path) -> None:
    """Write the newcomer's folder: user modules, and notes/ with Python's help topics as 80 text files."""
    texts = {f"notes/{name}.txt": text for name, text in pydoc_data.topics.topics.items()}
    for name, text in {**FILES, **texts}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def environment(folder: Path) -> dict[str, str]:
    """Return a newcomer's environment: empty caches, one CPU device, the virtual environment's programs first."""
    programs = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        # Caches of compiled programs and tokenizers start empty.
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "HOME": str(folder),
        "XLA_FLAGS": "",
    }


def transcript(recordings: list[Recording], folder: Path) -> str:
    """Return the recording as text: a description, a line for each command, and the output of each."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    python = ".".join(map(str, sys.version_info[:3]))
    num_well = sum(not recording.faults for recording in recordings)
    minutes = sum(recording.output.seconds for recording in recordings) / 60
    about = (
        f"{len(recordings)} commands as a newcomer types them, in a folder with text files and modules of its own, "
        f"with what a terminal shows. {num_well} of {len(recordings)} are well: they end as they should, without a "
        f"traceback, the first character comes within {MAX_FIRST_SECONDS:g} s, and no silence is longer than "
        f"{MAX_SILENCE_SECONDS:g} s. The machine works for {minutes:.0f} minutes of that hour."
    )
    origin = (
        f"Run on {datetime.date.today()}, {os.cpu_count()} CPU cores, Python {python}, {versions}. Caches are empty at "
        "first. Long outputs are cut in the middle."
    )
    lines = [
        "A FIRST HOUR",
        "",
        *textwrap.wrap(about, _RULE_CHARACTERS),
        "",
        "    python -m tools.first_hour --out=docs/benchmarks/first_hour.txt",
        "",
        *textwrap.wrap(origin, _RULE_CHARACTERS),
        "",
        "      first character  longest silence     all  exit code",
    ]
    for number, recording in enumerate(recordings, 1):
        silence_seconds, _ = recording.output.longest()
        times = f"{recording.output.first:13.1f} s{silence_seconds:15.1f} s{recording.output.seconds:6.1f} s"
        lines.append(f"{number:4}  {times}{recording.code:11}  {recording.command.purpose}")
    for number, recording in enumerate(recordings, 1):
        interruption = recording.command.interruption
        signal_text = f"; {interruption.number.name} after {interruption.text!r}" if interruption else ""
        lines += [
            "",
            "-" * _RULE_CHARACTERS,
            f"{number}. {recording.command.purpose}: {recording.verdict}{signal_text}",
            "",
            f"$ {recording.command.line}",
            *_excerpt(recording, folder),
        ]
    return "\n".join(lines) + "\n"


def _excerpt(recording: Recording, folder: Path) -> list[str]:
    """Return the beginning and the end of the terminal's text."""
    lines = [_anonymous(line, folder) for line in recording.lines]
    left_out = len(lines) - 2 * _LINES_AT_EACH_END
    if left_out <= 1:
        return lines
    return [*lines[:_LINES_AT_EACH_END], f"[{left_out} lines]", *lines[-_LINES_AT_EACH_END:]]


def _anonymous(line: str, folder: Path) -> str:
    """Remove the machine's paths."""
    line = line.replace(str(folder), "~").replace(f"{sys.prefix}/bin/", "")
    return re.sub(rf"{re.escape(sys.prefix)}/\S*?/(?=[\w.]+\.py)", ".../", line)


if __name__ == "__main__":
    sys.exit(main())
