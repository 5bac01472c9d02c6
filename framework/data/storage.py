"""Files, local or behind any fsspec URL: finding, opening, range reads, and content hashes that are computed once.

A path is a local path, or a URL that fsspec understands (memory://, file://, s3://, gs://, https:// ...). What cannot
be read is an error here, naming the path, before any model is built. May import: the standard library; fsspec lazily.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

BLOCK_BYTES = 4 << 20  # content is hashed in blocks, so that a damaged file can be located to one block
_RACY_SECONDS = (
    2.0  # a file changed this recently could change again within the clock's grain: do not memorize its hash
)

# How fsspec's filesystems call what changes with the content.
_VERSION_KEYS = frozenset(
    {"ETag", "etag", "LastModified", "last_modified", "updated", "generation", "md5Hash", "crc32c", "mtime", "created"}
)

_CODEC_PACKAGES = {".zst": "zstandard", ".lz4": "lz4"}


class DataFile:
    """One file of a source.

    Args:
        fs: the fsspec filesystem that holds it.
        path: its path on that filesystem.
    """

    def __init__(self, fs: Any, path: str):
        from fsspec.implementations.local import LocalFileSystem

        self.fs = fs
        self.path = path
        self.is_local = isinstance(fs, LocalFileSystem)
        self.name: str = path if self.is_local else fs.unstrip_protocol(path)
        self.bytes_read = 0  # by `open`; what a progress bar shows

    def __str__(self) -> str:
        return self.name

    def size(self) -> int:
        """Bytes as stored (compressed, where it is)."""
        with readable(self.name):
            return int(self.fs.info(self.path)["size"])

    def state(self) -> str | None:
        """Size, times and version of the file: while they do not change, neither does the content. None where the
        filesystem tells nothing of the kind (some web servers), so that nothing may be concluded."""
        with readable(self.name):
            if self.is_local:  # of what a link points to, which fsspec's info would not say
                facts = os.stat(self.path)
                return f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino}"
            info = self.fs.info(self.path)
        versions = {key: str(info[key]) for key in sorted(_VERSION_KEYS & set(info)) if info[key] is not None}
        return f"{info['size']} {versions}" if versions else None

    def modified(self) -> float:
        """Seconds since the epoch of the last change; 0.0 for remote files, whose versions are not clock readings."""
        facts = os.stat(self.path) if self.is_local else None
        return 0.0 if facts is None else max(facts.st_mtime, facts.st_ctime)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); fewer when the file ends before `stop`.

        A local file is opened for each read: that costs a few microseconds, needs no file handle per shard, and a file
        that was truncated meanwhile gives a short read, where a memory map would kill the process with SIGBUS.
        """
        if not self.is_local:
            with readable(self.name):
                return bytes(self.fs.cat_file(self.path, start=start, end=stop))
        with readable(self.name):
            handle = os.open(self.path, os.O_RDONLY)
        try:
            return os.pread(handle, stop - start, start)
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def open(self, compression: str | None = None) -> Iterator[BinaryIO]:
        """The content from the start; `compression="infer"` decompresses by the name's extension (.gz, .bz2, .xz,
        .zip)."""
        import fsspec.compression
        import fsspec.utils

        if compression == "infer":
            compression = fsspec.utils.infer_compression(self.path)
            package = _CODEC_PACKAGES.get(os.path.splitext(self.path)[1])
            if compression is None and package is not None:  # fsspec only knows the codecs that are installed
                raise ValueError(f"{self.name}: to read this compression, `pip install {package}`")
        codecs: dict[str, Any] = fsspec.compression.compr  # type: ignore[assignment]
        with contextlib.ExitStack() as stack:
            with readable(self.name):
                raw = stack.enter_context(self.fs.open(self.path, "rb"))
            self.bytes_read = 0
            counted = stack.enter_context(io.BufferedReader(cast(Any, _Counted(raw, self)), buffer_size=1 << 20))
            if compression is None:
                yield counted
            else:
                yield stack.enter_context(codecs[compression](counted, mode="rb"))

    def blocks(self) -> Iterator[bytes]:
        """The stored bytes in blocks of BLOCK_BYTES (the last one shorter)."""
        with self.open() as stream:
            while block := stream.read(BLOCK_BYTES):
                yield block


class _Counted(io.RawIOBase):
    """Counts what passes, for the progress bar."""

    def __init__(self, raw: Any, file: DataFile):
        self._raw, self._file = raw, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: Any, /) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._file.bytes_read += len(data)
        return len(data)


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns the filesystem's refusals into errors that name the data file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"data file not found: {name}") from error
    except PermissionError as error:
        raise PermissionError(f"no permission to read the data file {name}") from error


def find(paths: str | Iterable[str]) -> list[DataFile]:
    """The files that `paths` name; a glob (`*`, `?`, `[..]`) stands for its matches, sorted by name.

    Raises:
        FileNotFoundError: a path that does not exist (with the nearest names in its folder), a glob without a match.
        PermissionError: a folder that may not be read.
        IsADirectoryError: a folder where a file is needed.
        ValueError: no path at all, or a URL whose protocol fsspec does not know.
    """
    import fsspec.core

    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not patterns:
        raise ValueError("expected at least one path, given none")
    found: list[DataFile] = []
    for pattern in patterns:
        try:
            fs, path = fsspec.core.url_to_fs(os.path.expanduser(pattern))
        except ValueError as error:  # unknown protocol
            raise ValueError(f"cannot open {pattern!r}: {error}") from error
        except ImportError as error:  # known protocol whose package is not installed
            raise ValueError(f"cannot open {pattern!r}: {error}; install that package") from error
        found += _match(fs, str(path), pattern)
    return found


def _match(fs: Any, path: str, pattern: str) -> list[DataFile]:
    try:
        info = fs.info(path)
    except FileNotFoundError:
        info = None
    except PermissionError as error:
        raise PermissionError(f"no permission to read {pattern}") from error
    if info is not None:
        if info["type"] == "directory":
            raise IsADirectoryError(f"{pattern} is a folder; name its files, for instance {pattern.rstrip('/')}/*")
        return [DataFile(fs, path)]
    is_glob = any(letter in path for letter in "*?[")
    parts = path.split("/")
    fixed = next((i for i, part in enumerate(parts) if any(letter in part for letter in "*?[")), len(parts) - 1)
    folder = "/".join(parts[:fixed])
    try:  # listing the folder tells a missing one, a forbidden one and an empty one apart, which a glob does not
        names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(folder or "/", detail=False)]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{pattern} does not exist, nor does the folder {folder or '/'}") from error
    except PermissionError as error:
        raise PermissionError(f"no permission to list {folder} for {pattern}") from error
    if not is_glob:
        near = difflib.get_close_matches(parts[-1], names, n=3, cutoff=0.5)
        raise FileNotFoundError(f"{pattern} does not exist{_did_you_mean(folder, near)}")
    matches = sorted(match for match, info in fs.glob(path, detail=True).items() if info["type"] != "directory")
    if not matches:
        raise FileNotFoundError(f"no file matches {pattern} ({len(names)} entries in {folder or '/'})")
    return [DataFile(fs, match) for match in matches]


def _did_you_mean(folder: str, near: list[str]) -> str:
    return f"; did you mean {', '.join(f'{folder}/{name}' for name in near)}?" if near else ""


class FileHashes:
    """sha256 of files, memorized by the files' state (size, times, version), as `git status` does.

    So content decides every cache key and fingerprint, though a terabyte is read only once. The memo holds plain JSON;
    without a memo file everything is hashed anew.
    """

    def __init__(self, memo: Path | None = None):
        self._memo = memo
        self._known: dict[str, dict[str, Any]] = {}
        self._changed = False
        if memo is not None and memo.exists():
            try:
                self._known = json.loads(memo.read_text())
            except ValueError:  # a memo is only a saving of time: a damaged one is made anew
                self._known = {}

    def recall(self, file: DataFile) -> dict[str, Any] | None:
        """What was memorized for the file as it is now, or None."""
        known, state = self._known.get(file.name), file.state()
        return known["facts"] if known is not None and state is not None and known["state"] == state else None

    def remember(self, file: DataFile, state: str | None, facts: dict[str, Any]) -> None:
        """Memorizes `facts` (JSON data) for the file in the `state` that it had before it was read."""
        if state is not None and time.time() - file.modified() > _RACY_SECONDS and file.state() == state:
            self._known[file.name] = {"state": state, "facts": facts}
            self._changed = True

    def sha256(self, file: DataFile) -> str:
        """The hash of the stored bytes."""
        if (known := self.recall(file)) is not None and "sha256" in known:
            return str(known["sha256"])
        state = file.state()
        digest = hashlib.sha256()
        for block in file.blocks():
            digest.update(block)
        self.remember(file, state, {"sha256": digest.hexdigest()})
        return digest.hexdigest()

    def save(self) -> None:
        """Writes the memo, whole or not at all."""
        if self._memo is not None and self._changed:
            write_atomically(self._memo, json.dumps(self._known, indent=1).encode())
            self._changed = False


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name and renames it: a kill leaves the old file or the new one, never half."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(name: str) -> str:
    """Beside its target, and telling whose it is, so that `clear_leftovers` knows which ones a killed process left."""
    return f".{name}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def clear_leftovers(folder: Path) -> None:
    """Removes temporary files and folders in `folder` that a process of this machine left when it was killed."""
    for path in folder.glob(".*.tmp-*"):
        host, _, process = path.name.rpartition(".tmp-")[2].rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and process.isdigit() and not _alive(int(process)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
