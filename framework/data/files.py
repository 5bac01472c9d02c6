"""Data files, local or behind any fsspec URL: finds them, reads them, and caches their hashes.

A path is a local path, a glob, a URL that fsspec understands (memory://, s3://, gs:// ...), or a Hugging Face Hub URL
(hf://), whose files are read from the Hub's cache on this machine. A file that cannot be read raises an error that
names it, before any model is built.
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
from typing import TYPE_CHECKING, TypeVar, cast

from plimsoll.framework.config import did_you_mean
from plimsoll.framework.files import durable, hub
from plimsoll.framework.files.remote import connect, explain_errors, is_url
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.terminal.install_hints import install_package
from plimsoll.framework.terminal.phases import SHORT, phase

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Result = TypeVar("Result")

# Content is hashed in blocks of this size, so that damage can be located to one of them.
BLOCK_BYTES = 4 << 20

# A file that changed within this many seconds may change again without a new timestamp, because some filesystems have
# a resolution of up to two seconds.
_CLOCK_GRAIN_SECONDS = 2


class DataFile:
    """The file at `path` of an fsspec filesystem.

    Attributes:
        name: name of the file in messages: its local path, or its URL.
        position: number of stored bytes read so far, which a progress bar shows.
    """

    def __init__(self, fs: AbstractFileSystem, path: str):
        from fsspec.implementations.local import LocalFileSystem

        self.fs = fs
        self.path = path
        self.is_local = isinstance(fs, LocalFileSystem)
        self.name: str = path if self.is_local else fs.unstrip_protocol(path)
        self.position = 0

    def __str__(self) -> str:
        return self.name

    def size(self) -> int:
        """Returns the number of stored bytes; for a compressed file, the compressed size."""
        with readable(self.name):
            return int(self.fs.info(self.path)["size"])

    def state(self) -> str | None:
        """Returns a text that changes with the content: size and time, or all the metadata of a remote file.

        None means that the file changed so recently that it could change again within the clock's resolution.
        """
        with readable(self.name):
            if not self.is_local:
                return str(sorted(self.fs.info(self.path).items()))
            # For a link, this is the state of its target.
            status = os.stat(self.path)
        if time.time() - status.st_mtime < _CLOCK_GRAIN_SECONDS:
            return None
        return f"{status.st_size} {status.st_mtime_ns}"

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes [start, stop), or all bytes from `start` on; fewer when the file ends before `stop`."""
        with readable(self.name):
            if not self.is_local:
                # fsspec's declared type includes str, for reads in text mode.
                content = cast(bytes, self.fs.cat_file(self.path, start=start, end=stop))
                return bytes(content)
            # Opening takes microseconds. A memory map would save them, but would kill the process with SIGBUS if the
            # file is truncated meanwhile.
            with open(self.path, "rb") as stream:
                stream.seek(start)
                size = -1 if stop is None else stop - start
                return stream.read(size)

    def chunks(self, size: int, *, decompress: bool = False) -> Iterator[bytes]:
        """Yields the content in chunks of `size` bytes; the last one may be shorter.

        With `decompress`, the file extension determines the format (.gz, .bz2, .xz, .zip; .zst and .lz4 if their
        packages are installed), and `size` counts decompressed bytes.

        Raises:
            ValueError: a compressed file is damaged or truncated. The message names the last good byte of its text.
        """
        import fsspec.utils
        from fsspec.core import OpenFile

        compression = fsspec.utils.infer_compression(self.path) if decompress else None
        # fsspec knows these two endings only if the package is installed; without it, the compressed bytes would be
        # read as text.
        if decompress and compression is None and self.path.endswith((".zst", ".lz4")):
            package = "zstandard" if self.path.endswith(".zst") else "lz4"
            raise ValueError(f"{self.name}: reading it needs `{install_package(package)}`")
        opened = OpenFile(self.fs, self.path, compression=compression)
        text_bytes = 0
        try:
            with readable(self.name), opened as stream:
                while chunk := stream.read(size):
                    text_bytes += len(chunk)
                    # The first file object is the stored file, below the decompression.
                    self.position = opened.fobjects[0].tell()
                    yield chunk
        except (FileNotFoundError, PermissionError):
            # These are OSErrors too, but do not indicate damage.
            raise
        except (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{self.name}: damaged or truncated after byte {text_bytes} of its text: {error}"
            ) from error


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns filesystem errors into errors that name the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name} does not exist") from error
    except PermissionError as error:
        raise PermissionError(f"no permission to read {name}") from error


def find(paths: str | Iterable[str]) -> list[DataFile]:
    """Returns the files that `paths` name, in that order.

    A glob (`*`, `?`, `[..]`) expands to its matches, sorted by name.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError: a path is not usable. The message names the path (and
            the closest name in its folder).
        ValueError: there is no path at all, or a URL whose protocol fsspec cannot open here.
    """
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not patterns:
        raise ValueError("expected at least one path, given none")
    what = patterns[0] if len(patterns) == 1 else f"{len(patterns):,} files"
    with phase(f"looking for {what}", patience=SHORT):
        return [file for pattern in hub.local_paths(patterns) for file in _match(pattern)]


def _match(pattern: str) -> list[DataFile]:
    """Returns the files that match one path, URL or glob."""
    fs, path = connect(os.path.expanduser(pattern))
    with explain_errors(pattern) if is_url(pattern) else readable(pattern):
        is_folder = fs.isdir(path)
        exists = fs.exists(path)
    if is_folder:
        files_pattern = f"{pattern.rstrip('/')}/*"
        raise IsADirectoryError(f"{pattern} is a folder; name its files, for example {files_pattern}")
    # A file's own name may contain glob characters, so check this before globs.
    if exists:
        return [DataFile(fs, path)]
    literal_prefix = re.split(r"[*?[]", path)[0]
    parent, _, name = literal_prefix.rpartition("/")
    folder = parent or "/"
    # List the folder, because a glob cannot distinguish a forbidden folder from an empty one.
    with readable(f"the folder {folder} of {pattern}"):
        entries = fs.ls(folder, detail=False)
        names = [os.path.basename(entry.rstrip("/")) for entry in entries]
    has_wildcard = literal_prefix != path
    if not has_wildcard:
        raise FileNotFoundError(f"{pattern} does not exist{did_you_mean(name, names)}")
    # fsspec's declared type is that of a listing without details.
    infos = cast(dict[str, dict[str, object]], fs.glob(path, detail=True))
    matches = [match for match, info in infos.items() if info["type"] != "directory"]
    if not matches:
        raise FileNotFoundError(f"no file matches {pattern} ({len(names)} entries in {folder})")
    return [DataFile(fs, match) for match in sorted(matches)]


def fetch_local_copy(file: DataFile, folder: str | None, sidecar_path: str) -> DataFile:
    """Returns a local file unchanged, and a local copy of a remote file.

    The copy is made once, and again if the size, time or tag of the remote file changes. Raises as `explain_errors`.

    Args:
        file: the file to be read in random order.
        folder: folder for copies; None means ~/.cache/plimsoll.
        sidecar_path: path of a second file to copy too, if it exists.
    """
    if file.is_local:
        return file
    if folder:
        cache = folder
    else:
        user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = f"{user_cache}/plimsoll"
    remote_paths = [file.path]
    states = [file.name, file.state()]
    with explain_errors(file.name):
        if sidecar_path != file.path and file.fs.exists(sidecar_path):
            remote_paths.insert(0, sidecar_path)
            states.append(DataFile(file.fs, sidecar_path).state())
    # The states are part of the folder's name, so a changed file gets a new copy, and runs that still read the previous
    # copy keep it.
    copies = Path(cache).expanduser() / "fetched" / compute_digest(states)[:16]
    copies.mkdir(parents=True, exist_ok=True)
    with open(copies / ".lock", "w") as lock, explain_errors(file.name):
        # The processes of a host share the folder; the first one downloads, and the others wait here.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for remote_path in remote_paths:
            target = copies / os.path.basename(remote_path)
            if not target.exists():
                # The rename makes the copy appear as a whole, even if the process is killed.
                file.fs.get_file(remote_path, f"{target}.tmp")
                durable.rename(f"{target}.tmp", target)
    (copy,) = find(str(copies / os.path.basename(file.path)))
    # Messages use the name that the user gave.
    copy.name = file.name
    return copy


class FileHashes:
    """A cache of results computed from files' contents, so that a terabyte is read only once.

    Args:
        path: JSON file that stores the results between runs; None keeps them in memory only.
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        # {key: [state, result]}: a result is valid as long as the file still has that state.
        self._entries: dict[str, list] = {}
        if path is not None:
            # If the file is missing or damaged, everything is hashed again.
            with contextlib.suppress(FileNotFoundError, ValueError):
                entries = parse_json(path.read_text(), parse_constant=_refuse_constant)
                if isinstance(entries, dict):
                    # Entries of another form come from another version, and count as missing.
                    for key, entry in entries.items():
                        if isinstance(entry, list) and len(entry) == 2:
                            self._entries[key] = entry

    def get_or_compute(self, file: DataFile, kind: str, compute: Callable[[], Result]) -> Result:
        """Returns `compute()` (JSON data of that kind), or the earlier result if the file has not changed since."""
        # Get the state before reading the content: a change in between is then noticed next time.
        state = file.state()
        key = f"{kind} {file}"
        entry = self._entries.get(key)
        if entry is None or entry[0] != state:
            with phase(f"reading {file} for its checksum", patience=SHORT):
                entry = [state, compute()]
            # A file without a state changed just now, and may change again unnoticed.
            if state is not None:
                self._entries[key] = entry
        return entry[1]

    def sha256(self, file: DataFile) -> str:
        """Returns the sha256 of the stored bytes."""

        def compute() -> str:
            digest = hashlib.sha256()
            for block in file.chunks(BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()

        return self.get_or_compute(file, "sha256", compute)

    def save(self) -> None:
        """Writes the results to the file at `path`, atomically."""
        if self._path is not None and self._entries:
            write_json(self._path, self._entries)


def _refuse_constant(name: str) -> None:
    # Python's parser accepts NaN and Infinity, which are not JSON.
    raise ValueError(f"{name} is not JSON")


def compute_digest(data: object) -> str:
    """Returns the sha256 of JSON data, independent of the order of keys."""
    text = json.dumps(data, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
