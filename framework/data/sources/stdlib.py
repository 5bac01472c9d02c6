"""The source text of the Python standard library that runs this program: real text that every machine already has.

Test packages are left out (they repeat themselves), and so is what an installation adds (site-packages, build records).
May import: framework.data.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from framework.data.sources.base import Contents, TextSource
from framework.data.storage import FileHashes

VALIDATION_PERCENT = 5
_LEFT_OUT_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)


class StdlibSource(TextSource):
    """The `.py` files of the standard library of the base interpreter, one document per file, sorted by name.

    A file belongs to "validation" when the sha256 of its relative path falls into 5 of 100 buckets, otherwise to
    "train": the split depends on names alone, so it is the same on every machine, and no file is in both.

    Args:
        split: which part to read.
    """

    def __init__(self, *, split: Literal["train", "validation"] = "train"):
        self.split = split
        self.root = Path(sysconfig.get_path("stdlib"))  # in a virtual environment too, this is the base interpreter's
        self._texts: list[tuple[str, bytes]] = []

    def _load(self) -> list[tuple[str, bytes]]:
        if not self._texts:  # some 12 MB: hashing and yielding read the disk once
            names = [name for name in library_files(self.root) if split_of(name) == self.split]
            files = [(name, (self.root / name).read_bytes()) for name in names]
            self._texts = [(name, data) for name, data in files if data.strip() and _is_utf8(data)]
            if not self._texts:
                raise FileNotFoundError(
                    f"the standard library at {self.root} holds no {self.split} source files (is it zipped or "
                    "stripped?)"
                )
        return self._texts

    def contents(self, hashes: FileHashes) -> Contents:
        files = [(name, hashlib.sha256(data).hexdigest()) for name, data in self._load()]
        return Contents(
            settings={"kind": "StdlibSource", "split": self.split},
            files=files,
            notes={"python": platform.python_version(), "implementation": platform.python_implementation()},
        )

    def documents(self) -> Iterator[str]:
        for _, data in self._load():
            yield data.decode("utf-8")


def library_files(root: Path) -> list[str]:
    """Relative paths (with /) of the library's own modules below `root`, sorted."""
    names: list[str] = []
    for folder, children, files in os.walk(root):
        # Changing the list in place keeps os.walk out of those folders (site-packages may be large).
        children[:] = [child for child in children if not _left_out(child)]
        inside = Path(folder).relative_to(root)
        names += [(inside / name).as_posix() for name in files if name.endswith(".py") and not _one_build(name)]
    return sorted(names)


def split_of(name: str) -> Literal["train", "validation"]:
    """The part to which the file of that relative path belongs."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    return "validation" if bucket < VALIDATION_PERCENT else "train"


def _left_out(folder: str) -> bool:
    """Tests, what is installed beside the library, and what describes one build of it (config-3.x-*/)."""
    return folder in _LEFT_OUT_FOLDERS or folder.endswith(("_test", "_tests")) or folder.startswith("config-")


def _one_build(name: str) -> bool:
    return name.startswith("_sysconfigdata")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
