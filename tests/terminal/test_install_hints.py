"""Hints in error messages: the command that installs an optional part, as Plimsoll was installed."""

import shlex
import sys
from importlib import util
from pathlib import Path

import pytest

import plimsoll
from plimsoll.framework.terminal.install_hints import install_extra, install_package
from tests.support.runs import ROOT

WHEEL = ("pip install 'plimsoll-train[hub]'", "pip install lz4")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with an installed wheel, as far as the hints look."""
    monkeypatch.setattr(plimsoll, "__file__", str(tmp_path / "lib/site-packages/plimsoll/__init__.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def test_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_extra("hub") == "pip install -e '.[hub]'"
    assert install_package("lz4") == "pip install lz4"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_extra("hub")) == ["pip", "install", "-e", f"{ROOT}[hub]"]


def test_wheel(environment: Path) -> None:
    assert (install_extra("hub"), install_package("lz4")) == WHEEL


def test_user_project_around_the_environment_is_no_checkout(environment: Path) -> None:
    (environment / "lib/site-packages").mkdir(parents=True)
    (environment / "lib/site-packages/pyproject.toml").write_text('[project]\nname = "theirs"\n')
    assert install_extra("hub") == WHEEL[0]


def test_environment_of_uv(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")
    assert install_extra("hub") == WHEEL[0]  # pip is there
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert (install_extra("hub"), install_package("lz4")) == tuple(f"uv {command}" for command in WHEEL)


@pytest.mark.parametrize(
    ("file", "extra", "package"),
    [
        ("uv-receipt.toml", "uv tool install 'plimsoll-train[hub]'", "uv tool install --with lz4 plimsoll-train"),
        ("pipx_metadata.json", "pipx install --force 'plimsoll-train[hub]'", "pipx inject plimsoll-train lz4"),
    ],
)
def test_tools_that_install_applications(environment: Path, file: str, extra: str, package: str) -> None:
    (environment / file).write_text("")
    assert (install_extra("hub"), install_package("lz4")) == (extra, package)
