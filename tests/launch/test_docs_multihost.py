"""Every command of docs/multihost.md is one that its verb accepts."""

import importlib
import re
import shlex

import pytest

from tests.support.runs import ROOT

PAGE = (ROOT / "docs" / "multihost.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line.startswith("plimsoll ")]


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()[1:3]))
def test_commands_of_the_page(capsys, monkeypatch, line: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # what --gpus=all finds
    verb, *flags = shlex.split(line)[1:]
    assert importlib.import_module(f"launch.{verb}").main([*flags, "--dry_run"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_the_page_shows_every_launcher_and_its_flags() -> None:
    assert {line.split()[1] for line in LINES} == {"local", "slurm", "gke", "tpu_vm"}
    for flag in ("--grace", "--backoff", "--max_restarts", "--dry_run", "--save_seconds", "--secret"):
        assert f"{flag}`" in PAGE or f"{flag}=" in PAGE, flag
