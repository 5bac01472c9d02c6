"""Reports on disk, by everything that could change one: asking again is instant.

The key is a hash of the resolved config, the target, the code (of the framework and of whatever the config names), the
versions of the compilers and the flags in the environment. May import: the standard library, framework.config.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import framework
from framework.config import Config, target_of

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_PACKAGES = {"jax", "jaxlib", "libtpu", "optax", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cudnn-cu12"}


def directory() -> Path:
    """$XDG_CACHE_HOME/plimsoll/plans, or ~/.cache/plimsoll/plans."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plimsoll" / "plans"


def key(config: Config, **about: Any) -> str:
    """The name of a report: of a resolved config, and of anything else that JSON can hold."""
    parts = {
        "config": config.to_dict(),
        "about": about,
        "code": _code(config),
        "versions": sorted(f"{d.name} {d.version}" for d in distributions() if d.name in _PACKAGES),
        "python": sys.version,
        "flags": {flag: os.environ.get(flag) for flag in _FLAGS},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load(name: str) -> dict[str, Any] | None:
    """The report of that name, None if there is none (or half of one: it is made again)."""
    try:
        return json.loads((directory() / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None


def store(name: str, report: dict[str, Any]) -> None:
    """Keeps a report. A disk that is full or read-only costs the cache, not the plan."""
    path = directory() / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(report))
        new.replace(path)
    except OSError as error:
        print(f"plan not cached: {error}", file=sys.stderr)


def _code(config: Config) -> str:
    files = set(Path(framework.__file__ or framework.__path__[0]).parent.rglob("*.py"))
    for _, node in config.walk():
        module = sys.modules.get(getattr(target_of(node), "__module__", "")) if isinstance(node, Config) else None
        if module is not None and module.__file__:
            files.add(Path(module.__file__))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
