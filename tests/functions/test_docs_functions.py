"""The pages on functions: what they show runs, and prints what they say, in a process with one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.pages import python_block, text_lines
from tests.support.runs import ROOT

REVERSIBLE = "docs/functions_reversible.md"
CHECKPOINTS = "docs/functions_checkpoints.md"


def printed(folder: Path, source: str) -> list[str]:
    """The lines that a program prints in that folder, with one device."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def kibibytes(lines: list[str]) -> dict[str, int]:
    """{"reversible 16": KiB of temporaries, ...}."""
    rows = [re.fullmatch(r"(\w+ \d+) layers: (\d+) KiB", line) for line in lines]
    return {row[1]: int(row[2]) for row in rows if row}


def test_the_page_on_reversible_layers(tmp_path: Path) -> None:
    lines = printed(tmp_path, python_block(REVERSIBLE, "# reversible.py"))
    measured = kibibytes(lines)
    assert measured["reversible 256"] == measured["reversible 16"]
    assert measured["plain 256"] > 10 * measured["plain 16"]
    # Versions of the compiler differ by some buffers.
    documented = kibibytes(text_lines(REVERSIBLE))
    assert measured.keys() == documented.keys()
    assert all(0.5 < measured[name] / documented[name] < 2 for name in measured)
    assert re.fullmatch(r"there and back: \{'0': '\d\.\de-04', '1': '\d\.\de-04'\}", lines[-1])


def test_the_page_on_checkpoints(tmp_path: Path) -> None:
    source = python_block(CHECKPOINTS, "# checkpoints.py")
    (first,) = printed(tmp_path, source)
    assert first.startswith("[60, 80, 100] [")
    resumed, last = printed(tmp_path, source.replace("101", "121"))
    assert resumed == "went on from step 100 {'loader': [0, 800]}"
    assert last.startswith("[80, 100, 120] [")
