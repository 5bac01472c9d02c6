"""Reports on disk, by everything that could change one: asking again is instant.

The key is a hash of the resolved config, the target, the code (of the framework and of whatever the config names), the
versions of the compilers and the flags in the environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from framework.config import Config, target_of

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cudnn-cu12")


def versions(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    installed = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def path_of(config: Config, **about: Any) -> Path:
    """The file of a report, of a resolved config and of anything else that JSON can hold: under $XDG_CACHE_HOME."""
    framework_folder = Path(__file__).parents[1]
    files = {path for path in framework_folder.rglob("*") if path.suffix in (".py", ".toml", ".textproto")}
    # A config may name classes of the user's own, whose code decides too.
    for _, node in config.walk():
        if not isinstance(node, Config):
            continue
        module_name = getattr(target_of(node), "__module__", "")
        module = sys.modules.get(module_name)
        if module is not None and module.__file__:
            files.add(Path(module.__file__))
    flags = {flag: os.environ.get(flag) for flag in _FLAGS}
    parts = [config.to_dict(), about, versions(*_PACKAGES), sys.version, flags]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    # What was measured on this machine decides the estimated times.
    files |= set(rates_folder().glob("*.json"))
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return home() / "plans" / f"{digest.hexdigest()[:32]}.json"


def times_folder() -> Path:
    """Where it is kept how long a target's compiler took."""
    return home() / "compile-times"


def rates_folder() -> Path:
    """Where the measured rates of devices are kept."""
    return home() / "rates"


def home() -> Path:
    """The folder of everything that is kept between plans."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "plimsoll"


def load(path: Path) -> dict[str, Any] | None:
    """The report in that file, None if there is none (or half of one: it is made again)."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def store(path: Path, report: dict[str, Any]) -> None:
    """Keeps a report. A disk that is full or read-only costs the cache, not the plan."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file is renamed when it is complete, as another process may read it meanwhile.
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(report))
        temporary.replace(path)
    except OSError as error:
        print(f"plan not cached: {error}", file=sys.stderr)
