"""Checks of a release: its tag, its notes, and the files that state its version."""

import json
import re
from pathlib import Path

import pytest

import plimsoll
from tests.support.runs import ROOT
from tools import release

VERSION = plimsoll.__version__
URL = "https://example.org/a/plimsoll"
CHANGELOG = f"""# Changelog

## 9.9.0 (unreleased)

- Next.

## {VERSION} (2026-12-01)

- One: [docs](docs/plan.md), [site](https://example.org/x).

### Data

- Two.

## 0.0.1 (2025-01-01)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text((ROOT / "CITATION.cff").read_text())
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "a"\nurls.Repository = "{URL}"\n')
    return tmp_path


def test_notes_are_the_section_of_one_version() -> None:
    date, notes = release.find_notes(CHANGELOG, VERSION)
    assert date == "2026-12-01"
    assert notes == "- One: [docs](docs/plan.md), [site](https://example.org/x).\n\n### Data\n\n- Two.\n"
    assert release.link_to_repository(notes, URL, "v1").startswith(
        f"- One: [docs]({URL}/blob/v1/docs/plan.md), [site](https://example.org/x)."
    )
    for version in ("0.0.1", "9.9", "1.0.0"):  # an empty section, the beginning of a version, none
        with pytest.raises(LookupError, match=version):
            release.find_notes(CHANGELOG, version)


def test_release_with_all_it_needs_is_accepted(checkout: Path) -> None:
    assert release.find_problems(f"v{VERSION}", URL, checkout) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("CHANGELOG.md", "(2026-12-01)", "(unreleased)", r"expected .*YEAR-MONTH-DAY"),
        ("CHANGELOG.md", f"## {VERSION}", "## 8.8.8", "has no section"),
        ("CITATION.cff", f"version: {VERSION}", "version: 8.8.8", "CITATION.cff: expected version"),
        ("pyproject.toml", "urls.Repository", "urls.Home", f"expected project.urls.Repository = {URL}, got None"),
        ("pyproject.toml", URL, "https://example.org/b", "got https://example.org/b"),
    ],
)
def test_release_that_lacks_something_is_refused(checkout: Path, file: str, old: str, new: str, problem: str) -> None:
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new))
    (found,) = release.find_problems(f"v{VERSION}", URL, checkout)
    assert re.search(problem, found)


def test_tag_of_another_version_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag in ("v8.8.8", VERSION, f"v{VERSION}rc1"):
        (found,) = release.find_problems(tag, None, checkout)
        assert found.startswith(f"the tag is {tag}, but ")
    assert release.main(["check", "--tag=v8.8.8"]) == 1
    assert "expected v" in capsys.readouterr().err


def test_this_checkout_has_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["notes"]) == 0
    assert capsys.readouterr().out.startswith("- ")


def test_bill_of_materials_has_the_version(tmp_path: Path) -> None:
    bill = {"metadata": {"component": {"name": "plimsoll-train"}}, "components": [{"name": "jax", "version": "0.10.2"}]}
    file = tmp_path / "base.cdx.json"
    file.write_text(json.dumps(bill))
    assert release.main(["stamp", str(file)]) == 0
    bill["metadata"]["component"]["version"] = VERSION
    assert json.loads(file.read_text()) == bill
