"""CONTRIBUTING.md: every file that it names exists, so that a newcomer who follows it finds the example to copy."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = sorted(set(re.findall(r"(?:framework|configs|launch|tests|tools|docs)/[\w./]*\w", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_named_files_exist(path: str):
    assert (ROOT / path).exists()


def test_names_in_tables_are_in_the_stated_modules():
    assert "class JsonLines" in (ROOT / "framework/data/sources.py").read_text()
    assert "class Hook" in (ROOT / "framework/run/hooks.py").read_text()
    for name, file in [
        ("SCHEDULES", "framework/program/jit_step.py"),
        ("OPTIMIZERS", "framework/optimizers/named.py"),
        ("MEMORY", "tests/support/exact.py"),
        ("SMALL", "tests/support/exact.py"),
    ]:
        assert re.search(rf"^{name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"
