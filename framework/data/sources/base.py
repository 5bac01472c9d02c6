"""What a source of text is: two methods. Nothing else in the pipeline knows where documents come from.

May import: framework.data.storage.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from framework.data.storage import DataFile, FileHashes, find


@dataclass(frozen=True)
class Contents:
    """What a source will yield, told without yielding it.

    Args:
        settings: JSON data that decides the documents beside the files' content (a column's name, a query).
        files: (name, sha256) of each file, in the order in which they are read.
        notes: JSON data that is recorded beside the tokens but decides nothing.
    """

    settings: dict[str, Any]
    files: list[tuple[str, str]]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """sha256 over settings and file contents; names are left out, so that a moved corpus is the same corpus."""
        return digest_of({"settings": self.settings, "files": [digest for _, digest in self.files]})

    def record(self) -> dict[str, Any]:
        """The JSON that is written beside the tokens."""
        files = [{"name": name, "sha256": digest} for name, digest in self.files]
        return {"sha256": self.digest, "settings": self.settings, **self.notes, "files": files}


class TextSource(abc.ABC):
    """Documents of text. A subclass says what it holds (`contents`) and yields it (`documents`).

    Its constructor only keeps its arguments: disks and networks are touched by the two methods, which run once, before
    anything is compiled, and never in a training step.
    """

    @abc.abstractmethod
    def contents(self, hashes: FileHashes) -> Contents:
        """What `documents` will yield; two sources with equal digests yield the same documents in the same order."""

    @abc.abstractmethod
    def documents(self) -> Iterator[str]:
        """The documents in a fixed order. A document that cannot be read is an error that says where it stands."""

    def progress(self) -> tuple[int, int]:
        """(bytes read so far, bytes in all) of the stored files, for a progress bar; (0, 0) where it is not known."""
        return 0, 0


class FileSource(TextSource):
    """A source of text that reads `paths` one after the other.

    Args:
        paths: local paths, globs or fsspec URLs.
        compression: "infer" decompresses .gz, .bz2, .xz and .zip by their names; None reads them as they are.
    """

    def __init__(self, *, paths: list[str], compression: str | None):
        self.paths = paths
        self.compression = compression
        self._files: list[DataFile] = []
        self._sizes: list[int] = []

    def files(self) -> list[DataFile]:
        """The files, found once."""
        if not self._files:
            self._files = find(self.paths)
            self._sizes = [file.size() for file in self._files]
        return self._files

    def settings(self) -> dict[str, Any]:
        """What decides the documents beside the files."""
        return {"compression": self.compression}

    def contents(self, hashes: FileHashes) -> Contents:
        files = [(file.name, hashes.sha256(file)) for file in self.files()]
        return Contents(settings={"kind": type(self).__name__, **self.settings()}, files=files)

    def progress(self) -> tuple[int, int]:
        return sum(file.bytes_read for file in self._files), sum(self._sizes)


def digest_of(data: Any) -> str:
    """sha256 of JSON data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def decode(data: bytes, file: DataFile, offset: int) -> str:
    """UTF-8 text.

    Raises:
        ValueError: naming the file and the byte, where `data` (which begins at byte `offset`) is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise ValueError(f"{file}: not UTF-8 at byte {offset + error.start} (0x{bad:02x}: {error.reason})") from error


@contextlib.contextmanager
def damage_located(file: DataFile, where: Callable[[], str]) -> Iterator[None]:
    """Turns what decompressors raise on damaged or truncated data into a ValueError with file and place."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: damaged or truncated after {where()}: {error}") from error
