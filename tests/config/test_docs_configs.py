"""docs/configs.md: its Python blocks run in order as written, and the config that it saves builds."""

import re
from pathlib import Path
from typing import Any

import pytest

from plimsoll import configs

TEXT = (Path(__file__).parents[2] / "docs" / "configs.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def page_files(tmp_path, monkeypatch) -> Path:
    """A working directory with the files that the page asks readers to save (their first line names them)."""
    for kind, block in BLOCKS:
        if kind == "python" and (name := re.match(r"# (\w+\.py)\n", block)):
            (tmp_path / name[1]).write_text(block)
    assert (tmp_path / "my_configs.py").is_file()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run_in_order(monkeypatch):
    space: dict[str, Any] = {"__name__": "docs_configs"}
    monkeypatch.setitem(__import__("sys").modules, "docs_configs", type(pytest)("docs_configs"))
    ran = 0
    for kind, block in BLOCKS:
        if kind == "python" and not block.startswith("# "):
            exec(compile(block, f"docs/configs.md, block {ran}", "exec"), space)
            ran += 1
    assert ran >= 5


def test_the_users_config_builds(page_files):
    experiment = configs.load("my_configs.py:small").instantiate()
    assert experiment.model is not None
