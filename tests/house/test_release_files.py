"""Files that a release is made of: versions, pinned actions and packages. Nothing is published from here."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import plimsoll
from tests.support.runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def test_version_has_one_source_and_the_others_agree() -> None:
    assert "version" in PROJECT["dynamic"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == plimsoll.__version__
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == plimsoll.__version__


def test_badges_of_the_readme_agree_with_the_metadata() -> None:
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    (oldest, next_minor) = next(
        re.fullmatch(r"jax>=([\d.]+),<0\.(\d+)", one).groups()  # pyright: ignore
        for one in PROJECT["dependencies"]
        if one.startswith("jax>")
    )
    badges = {
        "license": f"license: {PROJECT['license']}",
        "python": f"Python: {' | '.join(versions)}",
        "jax": f"jax: {oldest} to 0.{int(next_minor) - 1}",
    }
    for name, text in badges.items():
        image = (ROOT / f"docs/images/badge_{name}.svg").read_text()
        assert f"<title>{text}</title>" in image
        # What is drawn is what is said.
        assert ": ".join(re.findall(r"<text [^>]*>([^<]+)<", image)) == text


def test_version_is_printed_without_slow_imports() -> None:
    code = (
        "import sys; sys.argv = ['plimsoll', '--version']; from plimsoll.__main__ import main; assert main() == 0; "
        "print(*sorted({'absl', 'jax', 'ml_collections', 'numpy', 'plimsoll.launch'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == f"plimsoll {plimsoll.__version__}\n\n"


def test_tested_versions_of_python_are_those_of_the_metadata() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert tested == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_are_few(path: Path) -> None:
    text = path.read_text()
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    for use in re.findall(r"uses: (.*)", text):
        assert pinned.fullmatch(use) or use.startswith("./.github/workflows/"), use
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    # A called workflow has limits of its own.
    assert all("timeout-minutes" in job or "uses" in job for job in workflow["jobs"].values())


def find_steps(workflow: dict[str, Any], action: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of the job, step) for each step that uses an action."""
    for name, job in workflow["jobs"].items():
        for step in job.get("steps", ()):
            if step.get("uses", "").startswith(f"{action}@"):
                yield name, step


def test_release_publishes_only_what_was_checked_and_without_a_token() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    ((publisher, step),) = find_steps(workflow, "pypa/gh-action-pypi-publish")
    assert "with" not in step  # no password, and no other index
    assert jobs[publisher]["permissions"] == {"id-token": "write"}
    assert jobs[publisher]["environment"] == "pypi"
    assert jobs["check"]["steps"][-1]["run"].startswith('python -m tools.release check --tag="$GITHUB_REF_NAME"')
    assert {"ci", "build"} <= set(jobs[publisher]["needs"])
    assert jobs["ci"]["needs"] == jobs["build"]["needs"] == "check"
    assert jobs["github"]["needs"] == jobs["images"]["needs"] == publisher
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"


def read_pins(path: Path) -> dict[str, set[str]]:
    """Return {normalized name: versions} of a file of requirements or constraints."""
    pins: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", path.read_text(), re.M):
        pins.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return pins


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_locked_packages_have_hashes_and_the_versions_of_the_tests(path: Path) -> None:
    text = path.read_text()
    packages = [entry for entry in re.split(r"\n(?=\S)", text) if not entry.startswith("#")]
    for entry in packages:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+( ; .*)? \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n?)+$", entry), (
            entry
        )
    assert "://" not in text
    tested = read_pins(ROOT / "constraints.txt")
    for name, versions in read_pins(path).items():
        assert versions <= tested.get(name, versions), name


@pytest.mark.parametrize("extra", ["base", "cuda", "tpu"])
def test_locks_have_all_packages_of_pyproject(extra: str) -> None:
    """`make lock` was run after a package was added."""
    locked = read_pins(ROOT / "requirements" / f"{extra}.txt")
    needed = PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, [])
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", one)[0]).lower() for one in needed}  # pyright: ignore
    assert names <= set(locked)
    assert len(names) >= 20
