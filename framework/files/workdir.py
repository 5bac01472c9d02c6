"""The working directory of a run: its layout, its lock, safe names, atomic JSON files.

Nothing here initializes JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from plimsoll.framework.files import durable
from plimsoll.framework.files.footprint import Footprint
from plimsoll.framework.files.remote import OWNER, Mirror, is_url, without_secrets
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.terminal import interrupts

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{,127}")
# gs:// or s3://, a bucket, and at least one folder; none of them is "." or "..", which a store would treat as a name.
_RUN_URL = re.compile(r"(gs|s3)://[^/]+(/(?!\.\.?(/|$))[^/]+)+/?")


@dataclass(frozen=True)
class _Claim:
    """The directory's lock while this process holds it."""

    descriptor: int  # descriptor of the open directory, which holds the flock; -1 if the workdir is a URL
    process: int  # the process that claimed it, because a fork inherits the object but not the lock
    text: str  # the content of lock.json; empty if the workdir is a URL


class Workdir:
    """A run's directory. It belongs to one job at a time.

    `claim`, or `with`, claims the directory, and creates it if necessary. If `path` is a URL (gs://, s3://),
    `self.path` is a local folder of this process, which a Mirror copies to the URL.

    Args:
        path: a local path, or gs://BUCKET/RUN, or s3://BUCKET/RUN.

    Raises:
        NotADirectoryError: `path` is not a directory.
        PermissionError: the directory cannot be created or written.
        ValueError: the URL cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if is_url(path) and not _RUN_URL.fullmatch(os.fspath(path)):
            shown = without_secrets(str(path))
            forms = "gs://BUCKET/RUN or s3://BUCKET/RUN"
            raise ValueError(f"--workdir: expected {forms}, got {shown!r}")
        self.mirror: Mirror | None = None
        if is_url(path):
            self.mirror = Mirror(os.fspath(path).rstrip("/"))
            self.path = self.mirror.folder
            # Checkpoints are large, and go to the store without a copy on the local disk.
            self.checkpoints: str | Path = f"{self.mirror.url}/checkpoints"
        else:
            self.path = Path(os.path.abspath(os.path.expanduser(path)))
            self.checkpoints = self.path / "checkpoints"
        self.config = self.path / "config.json"  # the resolved config of the last start
        self.metrics = self.path / "metrics.jsonl"  # one object per line
        self.tensorboard = self.path / "tensorboard"  # event files
        self.log = self.path / "log.txt"  # the lines that were printed
        self._lock = self.path / "lock.json"  # the owner of the directory
        self._claim: _Claim | None = None
        # The state to restore if the start is refused.
        self._footprint: Footprint | None = None
        # Cancels the release of the directory on a signal.
        self._cancel_release: Callable[[], object] = lambda: None
        # For a URL, `Mirror.claim` finds out whether it can be written.
        if self.mirror is not None:
            return
        parent = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not parent.is_dir():
            raise NotADirectoryError(f"--workdir: expected a directory, got the file {parent}")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(f"--workdir: no permission to write in {parent}")

    def claim(self) -> str | None:
        """Makes this process the directory's owner until it ends or calls `release`.

        The kernel releases its lock (flock) of the directory when the process ends, however it ends. The file
        lock.json names the owner to users, and to other hosts of a network file system, whose flock may not reach
        this host: a lock that another host has left is never taken over. In a job of several processes, one claims;
        claiming again does nothing.

        Returns None, or a message for the user: the owner of an abandoned lock that was taken over.

        Raises:
            ValueError: another job holds the directory; the error gives the host, the process and a remedy.
        """
        if self._claim is not None:
            return None
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": without_secrets(" ".join(sys.argv))[:500],
        }
        if self.mirror is not None:
            message = self.mirror.claim(owner)
            self._claim = _Claim(-1, os.getpid(), "")
            self._cancel_release = interrupts.register_cleanup(lambda number, line: self.release())
            self.mirror.fetch()
            # The files just downloaded are part of the state that a refused start restores.
            self._footprint = Footprint(self.path)
            self.mirror.start()
            return message
        # First, because the directory itself may have to be removed again.
        footprint = Footprint(self.path)
        try:
            durable.make_folder(self.path)
        except (FileNotFoundError, PermissionError) as error:
            # File systems such as /proc permit writing, but refuse new folders.
            raise PermissionError(f"--workdir: the folder {self.path} cannot be created") from error
        text = json.dumps(owner, indent=2) + "\n"
        with contextlib.ExitStack() as on_error:
            directory = os.open(self.path, os.O_RDONLY)
            on_error.callback(os.close, directory)
            message = self._lock_directory(directory)
            try:
                # Mode "x" decides between two hosts, which may both have acquired their flock.
                with open(self._lock, "x", encoding="utf-8") as file:
                    file.write(text)
                # A lock without content would be rejected as having an unknown owner.
                durable.sync(self._lock)
            except FileExistsError:
                raise ValueError(f"--workdir: another job has just claimed {self.path}") from None
            # Success: the descriptor stays open, because closing it releases the flock.
            on_error.pop_all()
        self._claim = _Claim(directory, os.getpid(), text)
        self._footprint = footprint
        # At a normal exit `atexit` releases the directory; on a signal, the process exits without `atexit`.
        atexit.register(self.release)
        self._cancel_release = interrupts.register_cleanup(lambda number, line: self.release())
        return message

    def _lock_directory(self, directory: int) -> str | None:
        """Locks the directory, and removes the lock file of a process that has ended.

        Returns a message that names the owner of that lock; None if there was none.

        Raises:
            ValueError: another process has it, or may have it.
        """
        is_locked = True
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = False
        text = None
        with contextlib.suppress(FileNotFoundError):
            text = self._lock.read_text(errors="replace")
        owner: dict[str, object] = {}
        owner_description = None
        with contextlib.suppress(ValueError, TypeError, KeyError):
            owner = parse_json(text or "")
            owner_description = OWNER.format_map(owner)
        if not is_locked:
            stop = "stop that job first"
            if owner_description:
                stop += f" (kill {owner['pid']})"
            busy = f"--workdir: {self.path} is in use by {owner_description or 'another process'}"
            raise ValueError(f"{busy}; {stop}, or choose another --workdir")
        if text is None:
            return None
        command = f"rm {shlex.quote(str(self._lock))}"
        advice = f"if no job uses it any more, remove the lock: {command}"
        if owner_description is None:
            problem = f"{self._lock} is not a valid lock file, so the owner of {self.path} is unknown"
            raise ValueError(f"--workdir: {problem}; {advice}")
        if owner["host"] != socket.gethostname():
            busy = f"{self.path} is in use by {owner_description}"
            unknown = f"Host {socket.gethostname()} cannot check whether that job is still running"
            raise ValueError(f"--workdir: {busy}. {unknown}; {advice}")
        # The flock was free on the owner's own host, so the owner has ended.
        self._lock.unlink()
        return f"took over {self.path}: its lock was left behind by {owner_description}, which has ended"

    def release(self, *, undo: bool = False) -> None:
        """Releases the directory.

        Only the process that claimed the directory does so, and only if the lock is still its own.

        Args:
            undo: restore the directory to its state before the claim, unless `keep` was called: for a start that was
                refused.
        """
        claim = self._claim
        self._claim = None
        footprint = self._footprint if undo else None
        self._footprint = None
        # A forked child has inherited this object, and must not remove its parent's files.
        is_owner = claim is not None and claim.process == os.getpid()
        if footprint is not None and is_owner:
            footprint.undo()
        self._cancel_release()
        if self.mirror:
            if footprint is not None:
                self.mirror.withdraw()
            return self.mirror.close()
        if claim is None or not is_owner:
            return
        atexit.unregister(self.release)
        # While this job ran, the lock may have been removed, and another job may have claimed the directory.
        with contextlib.suppress(FileNotFoundError):
            if self._lock.read_text(errors="replace") == claim.text:
                self._lock.unlink()
        os.close(claim.descriptor)
        # Last, because the lock is in the folder.
        if footprint is not None:
            footprint.remove_folders()

    def keep(self) -> None:
        """Keeps the files that were written since the claim, because the start is not refused."""
        self._footprint = None

    def sync(self) -> None:
        """Uploads changed files, if the workdir is a URL. Raises OSError, ValueError."""
        if self.mirror:
            self.mirror.upload()

    def sync_processes(self, barrier: Callable[[], object], *, is_primary: bool) -> None:
        """Waits for all processes at `barrier`.

        Afterwards, each process sees the files that the primary wrote before.
        """
        if is_primary:
            self.sync()
        barrier()
        if self.mirror and not is_primary:
            self.mirror.fetch()
            self.mirror.start()

    def owner(self) -> str:
        """Returns the content of a local directory's lock, as this process sees it."""
        with contextlib.suppress(FileNotFoundError):
            return self._lock.read_text()
        return ""

    def has_same_lock(self, owner: str, seconds: float = 10.0) -> bool:
        """Returns whether the lock has the content `owner` here too, which proves that the directory is the same one.

        An object store needs no such proof; a process that has not claimed it downloads the files.

        Args:
            owner: result of `owner` in the process that claimed the directory.
            seconds: how long to wait for it, because NFS caches files.
        """
        if self.mirror:
            if self._claim is None:
                self.mirror.fetch()
            return True
        deadline = time.monotonic() + seconds
        while self.owner() != owner:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def __enter__(self) -> Workdir:
        self.claim()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def read_only(path: str) -> tuple[Path, str]:
    """Returns a workdir's folder and the path of its checkpoints, for reading.

    If the workdir is a URL, the folder is a local copy of the small files, which is removed when this process ends.
    Raises as Workdir.
    """
    if not is_url(path):
        folder = Path(path).expanduser()
        return folder, f"{folder}/checkpoints"
    workdir = Workdir(path)
    atexit.register(shutil.rmtree, workdir.path, ignore_errors=True)
    interrupts.register_cleanup(lambda number, line: shutil.rmtree(workdir.path, ignore_errors=True))
    workdir.has_same_lock("")
    return workdir.path, str(workdir.checkpoints)


def safe_child(root: str | os.PathLike[str], name: str, what: str = "name") -> Path:
    """Returns the path `root/name`, if a user-supplied name is a safe path component.

    A safe name has letters, digits and `. _ = + -`, at most 128 characters, the first a letter, a digit or `_`. So it
    is not `..`, a separator, an absolute path, a hidden file, or anything that a shell reads as a flag; and the path
    is not a symbolic link that points outside `root`.

    Args:
        root: the folder that contains the path.
        name: the name of a run or step.
        what: label of the name in the error, such as "--run_name".

    Raises:
        ValueError: the name is not safe.
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        dashed = re.sub(r"[^A-Za-z0-9._=+-]+", "-", str(name))
        suggestion = dashed.strip(".-=+")[:128]
        hint = f"; try {suggestion!r}" if _NAME.fullmatch(suggestion) else ""
        allowed = "1 to 128 letters, digits and '._=+-', starting with a letter, digit or '_'"
        raise ValueError(f"{what}: expected {allowed}; got {name!r}{hint}")
    path = Path(root) / name
    real_root = os.path.realpath(root)
    real_path = os.path.realpath(path)
    if os.path.commonpath([real_root, real_path]) != real_root:
        raise ValueError(f"{what}: {path} is a symbolic link that points outside {root}, to {real_path}")
    return path


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names the file in an OSError.

    The system does not name the file when a write fails, as on a full disk. A failed open may name a temporary file.
    """
    try:
        yield
    except OSError as error:
        is_temporary = error.filename is not None and str(error.filename).endswith((".tmp", ".partial"))
        if error.errno is not None and (error.filename is None or is_temporary):
            error.filename = os.fspath(path)
        raise


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Writes JSON atomically: a reader, or a crash at any moment, sees either the old file or the new one.

    It never sees a partial file. A file that already has the same content is not touched.

    Raises:
        TypeError, ValueError: the value is not JSON (NaN and infinity included).
        OSError: the file, which the error names, cannot be written. The old file is untouched.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    target = Path(path)
    with contextlib.suppress(OSError, ValueError):
        if target.read_text(encoding="utf-8") == text:
            return
    # In the same folder, because a rename is atomic only within one file system.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    cancel_removal = interrupts.register_cleanup(lambda number, line: temporary.unlink(missing_ok=True))
    # Not mkstemp, which creates files with mode 0600: the umask decides whether colleagues may read the file.
    with writing(target):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with writing(target), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        durable.rename(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        cancel_removal()
