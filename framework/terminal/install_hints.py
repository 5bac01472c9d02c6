"""Commands that install an optional part of Plimsoll, as they fit the way in which Plimsoll was installed."""

import shlex
import sys
from importlib import util
from pathlib import Path

import plimsoll

_NAME = "plimsoll-train"


def install_extra(extra: str) -> str:
    """Return the command that installs the packages of an extra of pyproject.toml: `pip install -e '.[plan-tpu]'`."""
    checkout = find_checkout()
    if checkout is not None:
        here = "." if checkout == Path.cwd() else str(checkout)
        return f"{_find_pip()} install -e {_quote(f'{here}[{extra}]')}"
    requirement = _quote(f"{_NAME}[{extra}]")
    match _find_tool():
        case "uv":
            return f"uv tool install {requirement}"
        case "pipx":
            # Without --force, pipx does nothing if the application is installed.
            return f"pipx install --force {requirement}"
    return f"{_find_pip()} install {requirement}"


def install_package(package: str) -> str:
    """Return the command that installs another package next to Plimsoll: `pip install zstandard`."""
    match _find_tool():
        case "uv":
            return f"uv tool install --with {package} {_NAME}"
        case "pipx":
            return f"pipx inject {_NAME} {package}"
    return f"{_find_pip()} install {package}"


def find_checkout() -> Path | None:
    """Return the checkout that this code runs from, or None if it runs from an installed wheel."""
    folder = Path(plimsoll.__file__).resolve().parents[1]
    file = folder / "pyproject.toml"
    return folder if file.exists() and f'name = "{_NAME}"' in file.read_text(encoding="utf-8") else None


def _find_tool() -> str:
    """Return the tool that made this environment for one application: uv, pipx, or "" if it was neither."""
    environment = Path(sys.prefix)
    if (environment / "uv-receipt.toml").exists():
        return "uv"
    if (environment / "pipx_metadata.json").exists():
        return "pipx"
    return ""


def _find_pip() -> str:
    """Return the command that acts as pip in this environment: environments made by uv lack pip."""
    settings = Path(sys.prefix, "pyvenv.cfg")
    by_uv = settings.exists() and "\nuv = " in f"\n{settings.read_text(encoding='utf-8')}"
    return "uv pip" if by_uv and util.find_spec("pip") is None else "pip"


def _quote(requirement: str) -> str:
    """Quote the brackets of an extra, which shells would expand."""
    return shlex.quote(requirement)
