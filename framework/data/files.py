"""Files of data, local or behind any fsspec URL: finding them, reading them, and hashes that are computed only once.

A path is a local path, a glob, or a URL that fsspec understands (memory://, s3://, gs:// ...). What cannot be read is
an error that names it, before any model is built.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import lzma
import os
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from framework.config import did_you_mean
from framework.files.remote import connect, explained, is_url
from framework.files.workdir import write_json

BLOCK_BYTES = 4 << 20  # content is hashed in blocks, so that damage can be located to one of them


class DataFile:
    """The file at `path` of an fsspec filesystem."""

    def __init__(self, fs: Any, path: str):
        from fsspec.implementations.local import LocalFileSystem

        self.fs, self.path = fs, path
        self.is_local = isinstance(fs, LocalFileSystem)
        self.name: str = path if self.is_local else fs.unstrip_protocol(path)
        self.position = 0  # stored bytes that were gone through: what a progress bar shows

    def __str__(self) -> str:
        return self.name

    def size(self) -> int:
        """Bytes as stored (compressed, where it is)."""
        with readable(self.name):
            return int(self.fs.info(self.path)["size"])

    def state(self) -> str | None:
        """What changes with the content: size and time, or all that a remote filesystem tells. None for a file that was
        changed so recently that it could change again within the clock's grain."""
        with readable(self.name):
            if not self.is_local:
                return str(sorted(self.fs.info(self.path).items()))
            facts = os.stat(self.path)  # of what a link points to
        return None if time.time() - facts.st_mtime < 2 else f"{facts.st_size} {facts.st_mtime_ns}"

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop), or all from `start` on; fewer when the file ends before `stop` (where a memory map of a
        file that was truncated meanwhile would kill the process with SIGBUS)."""
        with readable(self.name):
            if not self.is_local:
                return bytes(self.fs.cat_file(self.path, start=start, end=stop))
            with open(self.path, "rb") as stream:  # microseconds
                stream.seek(start)
                return stream.read(-1 if stop is None else stop - start)

    def chunks(self, size: int, *, decompress: bool = False) -> Iterator[bytes]:
        """The content in pieces of `size` bytes, the last one shorter; decompressed, if asked for, by the name's ending
        (.gz, .bz2, .xz, .zip; .zst and .lz4 where their packages are installed).

        Raises:
            ValueError: what is compressed is damaged or truncated; says after which byte of its text.
        """
        import fsspec.utils
        from fsspec.core import OpenFile

        compression = fsspec.utils.infer_compression(self.path) if decompress else None
        if decompress and compression is None and self.path.endswith((".zst", ".lz4")):
            raise ValueError(f"{self.name}: to read it, `pip install {'zstandard' if self.path[-1] == 't' else 'lz4'}`")
        opened, count = OpenFile(self.fs, self.path, compression=compression), 0
        try:
            with readable(self.name), opened as stream:
                while chunk := stream.read(size):
                    count += len(chunk)
                    self.position = opened.fobjects[0].tell()
                    yield chunk
        except (FileNotFoundError, PermissionError):
            raise
        except (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.name}: damaged or truncated after byte {count} of its text: {error}") from error


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns a filesystem's refusals into errors that say what was refused."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name} does not exist") from error
    except PermissionError as error:
        raise PermissionError(f"no permission to read {name}") from error


def find(paths: str | Iterable[str]) -> list[DataFile]:
    """The files that `paths` name, in that order; a glob (`*`, `?`, `[..]`) stands for its matches, sorted by name.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError: naming the path (and the nearest name in its folder).
        ValueError: no path at all, or a URL whose protocol fsspec cannot open here.
    """
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not patterns:
        raise ValueError("expected at least one path, given none")
    return [file for pattern in patterns for file in _match(pattern)]


def _match(pattern: str) -> list[DataFile]:
    fs, path = connect(os.path.expanduser(pattern))
    with explained(pattern) if is_url(pattern) else readable(pattern):
        is_folder, exists = fs.isdir(path), fs.exists(path)
    if is_folder:
        raise IsADirectoryError(f"{pattern} is a folder; name its files, for instance {pattern.rstrip('/')}/*")
    if exists:  # before globs: a name may hold their letters
        return [DataFile(fs, path)]
    fixed = re.split(r"[*?[]", path)[0]
    folder, _, name = fixed.rpartition("/")
    with readable(f"the folder {folder or '/'} of {pattern}"):  # a glob does not tell a forbidden one from an empty one
        names = [entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(folder or "/", detail=False)]
    if fixed == path:
        raise FileNotFoundError(f"{pattern} does not exist{did_you_mean(name, names)}")
    matches = sorted(match for match, info in fs.glob(path, detail=True).items() if info["type"] != "directory")
    if not matches:
        raise FileNotFoundError(f"no file matches {pattern} ({len(names)} entries in {folder or '/'})")
    return [DataFile(fs, match) for match in matches]


def fetched(file: DataFile, folder: str | None, beside: str) -> DataFile:
    """The file, or of a remote one a copy in `folder` (None: ~/.cache/plimsoll), with what is `beside` it, if that is
    there: made once, and again when size, time or tag there have changed. Raises as `explained`."""
    if file.is_local:
        return file
    cache = folder or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/plimsoll"
    states = [file.name, file.state()]
    with explained(file.name):
        if beside != file.path and file.fs.exists(beside):
            states.append(DataFile(file.fs, beside).state())
    place = Path(cache).expanduser() / "fetched" / digest_of(states)[:16]
    place.mkdir(parents=True, exist_ok=True)
    with open(place / ".lock", "w") as lock, explained(file.name):
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a host fetch it once
        for path in [beside, file.path][3 - len(states) :]:
            target = place / path.rpartition("/")[2]
            if not target.exists():
                file.fs.get_file(path, f"{target}.tmp")
                os.replace(f"{target}.tmp", target)
    (copy,) = find(str(place / file.path.rpartition("/")[2]))
    copy.name = file.name  # what messages call it
    return copy


class FileHashes:
    """What was computed from files' contents, kept at `path` until they change: a terabyte is read only once."""

    def __init__(self, path: Path | None = None):
        self._path, self._known = path, dict[str, Any]()
        if path is not None:
            with contextlib.suppress(FileNotFoundError, ValueError):  # without it, everything is hashed anew
                self._known = json.loads(path.read_text())

    def of(self, file: DataFile, kind: str, compute: Callable[[], Any]) -> Any:
        """`compute()` (JSON data of that kind), unless it is known for the file as it is now."""
        state, key = file.state(), f"{kind} {file}"
        known = self._known.get(key)
        if known is None or known[0] != state:
            known = [state, compute()]
            if state is not None:
                self._known[key] = known
        return known[1]

    def sha256(self, file: DataFile) -> str:
        """Of the stored bytes."""

        def compute() -> str:
            digest = hashlib.sha256()
            for block in file.chunks(BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()

        return self.of(file, "sha256", compute)

    def save(self) -> None:
        """Writes what is known, whole or not at all."""
        if self._path is not None and self._known:
            write_json(self._path, self._known)


def digest_of(data: Any) -> str:
    """sha256 of JSON data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
