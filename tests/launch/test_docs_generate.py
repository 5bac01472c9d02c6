"""docs/generate.md: its commands and its code run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT


@pytest.mark.slow
def test_commands_and_code(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "generate.md").read_text().replace("runs/", f"{tmp_path}/")
    (commands,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    script = f"{commands}\npython - <<'CODE'\n{code}CODE\n"
    done = subprocess.run(
        ["bash", "-e"], input=script, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "def main():" in done.stdout
    assert re.search(r"README.md: \d+ tokens, loss [\d.]+, perplexity [\d.]+, [\d.]+ bits per byte\n", done.stdout)
    assert re.search(r"questions 2, accuracy [\d.]+, accuracy_per_character [\d.]+\n", done.stdout)
    assert re.search(r"\n\[\[(\d+, ){4}\d+\], \[(\d+, ){4}\d+\]\]\n", done.stdout)
