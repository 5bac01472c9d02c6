"""On-disk cache of plan reports, keyed by everything that could change one, so planning again is instant.

The key is a hash of the resolved config, the target, the code (of the framework and of the classes that the config
names), the compiler versions, the flags in the environment, and the measured device rates.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plimsoll.framework.config import Config, get_target

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cudnn-cu12")


def versions(*packages: str) -> dict[str, str]:
    """Return {package: version} of the given packages, without those that are not installed."""
    installed = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def cache_path(config: Config, **about: object) -> Path:
    """Return the cache file of a report, under $XDG_CACHE_HOME.

    Args:
        config: resolved config.
        about: further JSON-serializable values that the report depends on.
    """
    framework_folder = Path(__file__).parents[1]
    files = {path for path in framework_folder.rglob("*") if path.suffix in (".py", ".toml", ".textproto")}
    # A config may name user-defined classes, whose code also affects the report.
    for _, node in config.walk():
        if not isinstance(node, Config):
            continue
        module_name = getattr(get_target(node), "__module__", "")
        module = sys.modules.get(module_name)
        if module is not None and module.__file__:
            files.add(Path(module.__file__))
    flags = {flag: os.environ.get(flag) for flag in _FLAGS}
    parts = [config.to_dict(), about, versions(*_PACKAGES), sys.version, flags]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    # The estimated times depend on the rates measured on this machine.
    files |= set(rates_folder().glob("*.json"))
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return cache_folder() / "plans" / f"{digest.hexdigest()[:32]}.json"


def times_folder() -> Path:
    """Return the folder that stores the compile times of each target."""
    return cache_folder() / "compile-times"


def rates_folder() -> Path:
    """Return the folder that stores the measured rates of devices."""
    return cache_folder() / "rates"


def cache_folder() -> Path:
    """Return the folder of everything that is cached between plans."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "plimsoll"


def load(path: Path) -> dict[str, Any] | None:
    """Return the report in a file; None if it is missing or incomplete, so that it is made again."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def store(path: Path, report: Mapping[str, object]) -> None:
    """Write a report to the cache. On a full or read-only disk the plan still works, only without the cache."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write to a temporary file and rename it, because another process may read the cache at the same time.
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(report))
        temporary.replace(path)
    except OSError as error:
        print(f"plan not cached: {error}", file=sys.stderr)
