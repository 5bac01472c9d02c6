"""The code in docs/architecture.md runs as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**_environment()}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_user_loop(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(BLOCKS[0])
    out = run(tmp_path, "loop.py")
    losses = [float(line.split()[1]) for line in out.splitlines() if re.fullmatch(r"\d+ [\d.]+", line)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "bytes of state on 1 devices" in out
