"""docs/configs.md, run as written: its Python blocks in order, its files saved, its commands executed or checked."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import configs
import launch
from framework.config import ConfigError
from launch import cli
from launch import configs as verb

TEXT = (Path(launch.__path__[0]).parent / "docs" / "configs.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def saved_files(tmp_path, monkeypatch) -> Path:
    """A working directory with the files that the page says to save (their first line names them)."""
    for kind, block in BLOCKS:
        if kind == "python" and (name := re.match(r"# (\w+\.py)\n", block)):
            (tmp_path / name[1]).write_text(block)
    assert (tmp_path / "my_configs.py").is_file()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[list[str]]:
    lines = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
    return [shlex.split(line) for line in lines]


def test_python_blocks_run_in_order(monkeypatch):
    space: dict[str, Any] = {"__name__": "docs_configs"}
    monkeypatch.setitem(__import__("sys").modules, "docs_configs", type(pytest)("docs_configs"))
    ran = 0
    for kind, block in BLOCKS:
        if kind == "python" and not block.startswith("# "):
            exec(compile(block, f"docs/configs.md, block {ran}", "exec"), space)
            ran += 1
    assert ran >= 5


def test_commands_work(saved_files, capsys):
    for words in commands():
        assert words[0] == "plimsoll"
        if words[1] == "configs":
            assert verb.main(words[2:]) == 0, (words, capsys.readouterr().err)
        else:
            spec, overrides, _ = cli.split(words[2:])
            assert spec is not None
            config = configs.load(spec)
            cli.apply_overrides(config, overrides)
            cli.apply_accelerator_rules(config, None)
    assert len(commands()) >= 8


def test_the_users_config_builds(saved_files):
    experiment = configs.load("my_configs.py:small").instantiate()
    assert experiment.model is not None


def test_printed_lines_are_what_is_printed(saved_files, capsys):
    for words in commands():
        if words[1] == "configs":
            verb.main(words[2:])
    printed = re.sub(r" +", " ", capsys.readouterr().out)
    quoted = [line for kind, block in BLOCKS if kind == "text" for line in block.splitlines()]
    for line in quoted:
        if not line.startswith(("$", "error: ")):
            assert re.sub(r" +", " ", line).split("; ...")[0] in printed


def test_printed_errors_are_what_is_printed(saved_files):
    errors = re.findall(r"^\$ (.*)\nerror: (.*)$", TEXT, flags=re.MULTILINE)
    assert len(errors) == 3
    for command, message in errors:
        spec, overrides, _ = cli.split(shlex.split(command)[2:])
        assert spec is not None
        with pytest.raises(ConfigError) as caught:
            cli.apply_overrides(configs.load(spec), overrides)
        assert str(caught.value) == message
