"""The working directory of a run: its layout, its lock, safe names, atomic JSON files.

Nothing here starts JAX.
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
from pathlib import Path
from typing import Any

from framework.files.footprint import Footprint
from framework.files.remote import OWNER, Mirror, is_url, without_secrets
from framework.terminal import interrupts

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{,127}")


class Workdir:
    """A run's directory. It belongs to one job at a time: `claim`, or `with`, which make it if it is not there.

    Where `path` is a URL (gs://, s3://), `self.path` is a local folder of this process, carried there by a Mirror.

    Raises NotADirectoryError: something else is at `path`; PermissionError: it cannot be made or written; ValueError: a
    URL that cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if is_url(path) and not re.fullmatch(r"(gs|s3)://[^/]+(/(?!\.\.?(/|$))[^/]+)+/?", os.fspath(path)):
            raise ValueError(
                f"--workdir: expected gs://BUCKET/RUN or s3://BUCKET/RUN, got {without_secrets(str(path))!r}"
            )
        self.mirror = Mirror(os.fspath(path).rstrip("/")) if is_url(path) else None
        self.path = self.mirror.folder if self.mirror else Path(os.path.abspath(os.path.expanduser(path)))
        self.config = self.path / "config.json"  # the resolved config of the last start
        self.metrics = self.path / "metrics.jsonl"  # one object per line
        self.checkpoints = f"{self.mirror.url}/checkpoints" if self.mirror else self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"  # event files
        self.log = self.path / "log.txt"  # what was printed
        self._lock = self.path / "lock.json"  # who holds the directory
        self._held: tuple[int, int, str] | None = None  # an open descriptor of it, the process, what is in the lock
        self._footprint: Footprint | None = None  # what a start that is refused takes away again
        self._stay: Callable[[], None] = lambda: None  # takes back that a signal releases it
        if self.mirror:
            return
        parent = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not parent.is_dir():
            raise NotADirectoryError(f"--workdir: expected a directory, got the file {parent}")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(f"--workdir: no permission to write in {parent}")

    def claim(self) -> str | None:
        """Makes this process the directory's owner until it ends or calls `release`.

        The kernel's lock (flock) of the directory goes with its process, however that ends. The file lock.json names
        the owner to people, and to other hosts of a network file system, whose flock may not reach here: what another
        host has left is never taken over. In a job of several processes, one claims; claiming again does nothing.

        Returns None, or a message for the person: whose lock was left behind and taken over. Raises ValueError: another
        job holds it; names host, process and what to do.
        """
        if self._held is not None:
            return None
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        owner["command"] = without_secrets(" ".join(sys.argv))[:500]
        if self.mirror:
            message = self.mirror.claim(owner)
            self._held = -1, os.getpid(), ""
            self._stay = interrupts.at_end(lambda number, line: self.release())
            self.mirror.fetch()
            self._footprint = Footprint(self.path)
            self.mirror.start()
            return message
        footprint = Footprint(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(owner, indent=2) + "\n"
        with contextlib.ExitStack() as on_error:
            directory = os.open(self.path, os.O_RDONLY)
            on_error.callback(os.close, directory)
            message = self._take(directory)
            try:
                with open(self._lock, "x", encoding="utf-8") as file:  # decides between two hosts
                    file.write(text)
            except FileExistsError:
                raise ValueError(f"--workdir: another job has just claimed {self.path}") from None
            on_error.pop_all()
        self._held, self._footprint = (directory, os.getpid(), text), footprint
        atexit.register(self.release)
        self._stay = interrupts.at_end(lambda number, line: self.release())
        return message

    def _take(self, directory: int) -> str | None:
        """Locks the directory, and removes the lock of a process that has ended: the message says whose."""
        locked, text, who, owner = True, None, None, {}
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        with contextlib.suppress(FileNotFoundError):
            text = self._lock.read_text(errors="replace")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            owner = json.loads(text or "")
            who = OWNER.format_map(owner)
        if not locked:
            stop = f"stop that job first (kill {owner['pid']})" if who else "stop that job first"
            busy = f"--workdir: {self.path} is in use by {who or 'another process'}"
            raise ValueError(f"{busy}; {stop}, or choose another --workdir")
        if text is None:
            return None
        remove = f"if no job works there any more, remove the lock: rm {shlex.quote(str(self._lock))}"
        if who is None:
            raise ValueError(
                f"--workdir: {self._lock} makes no sense, so who works in {self.path} is unknown; {remove}"
            )
        if owner["host"] != socket.gethostname():
            unknown = f"Whether that job still runs cannot be told from host {socket.gethostname()}"
            raise ValueError(f"--workdir: {self.path} is in use by {who}. {unknown}; {remove}")
        self._lock.unlink()
        return f"took over {self.path}: its lock was left behind by {who}, which has ended"

    def release(self, *, undo: bool = False) -> None:
        """Gives the directory back. Only the process that claimed it does, and only if the lock is still its own.
        `undo`: leaves it as it was before the claim, unless `keep` was called: for a start that was refused."""
        held, self._held = self._held, None
        footprint, self._footprint = self._footprint if undo else None, None
        if footprint is not None and held is not None and held[1] == os.getpid():
            footprint.undo()
        self._stay()
        if self.mirror:
            if footprint is not None:
                self.mirror.withdraw()
            return self.mirror.close()
        if held is None or held[1] != os.getpid():
            return  # never claimed, or a forked child that inherited this object
        atexit.unregister(self.release)
        with contextlib.suppress(FileNotFoundError):  # removed while the job ran
            if self._lock.read_text(errors="replace") == held[2]:
                self._lock.unlink()
        os.close(held[0])
        if footprint is not None:
            footprint.remove_folders()

    def keep(self) -> None:
        """The start has not been refused: what was written since the claim stays, and so does what comes."""
        self._footprint = None

    def sync(self) -> None:
        """Uploads what has changed, where the workdir is a URL. Raises OSError, ValueError: that failed."""
        if self.mirror:
            self.mirror.upload()

    def meet(self, barrier: Callable[[], object], *, is_primary: bool) -> None:
        """Waits for all processes at `barrier`. Afterwards each sees the files that the primary wrote before."""
        if is_primary:
            self.sync()
        barrier()
        if self.mirror and not is_primary:
            self.mirror.fetch()
            self.mirror.start()

    def owner(self) -> str:
        """What the lock of a local directory says, as this process sees it."""
        with contextlib.suppress(FileNotFoundError):
            return self._lock.read_text()
        return ""

    def sees(self, owner: str, seconds: float = 10.0) -> bool:
        """Whether the lock says that here too, at the latest after so long (NFS keeps what it saw). Of an object store
        that needs no proof; a process that has not claimed it downloads what is there."""
        if self.mirror:
            if self._held is None:
                self.mirror.fetch()
            return True
        end = time.monotonic() + seconds
        while self.owner() != owner:
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def __enter__(self) -> Workdir:
        self.claim()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def read_only(path: str) -> tuple[Path, str]:
    """A workdir's folder and its checkpoints, for looking at. Of a URL, the folder is a local copy of the small files
    that goes with this process. Raises as Workdir."""
    if not is_url(path):
        return Path(path).expanduser(), f"{Path(path).expanduser()}/checkpoints"
    workdir = Workdir(path)
    atexit.register(shutil.rmtree, workdir.path, ignore_errors=True)
    interrupts.at_end(lambda number, line: shutil.rmtree(workdir.path, ignore_errors=True))
    workdir.sees("")
    return workdir.path, str(workdir.checkpoints)


def safe_child(root: str | os.PathLike[str], name: str, what: str = "name") -> Path:
    """The path `root/name`, if `name`, a run or step name that a person typed, is safe as one component of a path.

    Letters, digits and `. _ = + -`, at most 128 characters, the first a letter, a digit or `_`: so neither `..`, nor a
    separator, nor an absolute path, nor a hidden file, nor something that a shell takes for a flag; and no symbolic
    link that leads out of `root`. Raises ValueError otherwise, which calls it `what`, such as "--run_name".
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        suggestion = re.sub(r"[^A-Za-z0-9._=+-]+", "-", str(name)).strip(".-=+")[:128]
        hint = f"; try {suggestion!r}" if _NAME.fullmatch(suggestion) else ""
        allowed = "1 to 128 letters, digits and '._=+-', starting with a letter, digit or '_'"
        raise ValueError(f"{what}: expected {allowed}; got {name!r}{hint}")
    path = Path(root) / name
    real_root, real = os.path.realpath(root), os.path.realpath(path)
    if os.path.commonpath([real_root, real]) != real_root:
        raise ValueError(f"{what}: {path} is a symbolic link that leads out of {root}, to {real}")
    return path


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the file's name into an OSError that lacks it: the system names none where a write fails, as the disk is
    full, say."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes JSON so that a reader, or a crash at any moment, sees the old file or the new one, never a part. A
    file that says the same already is not touched.

    Raises TypeError or ValueError: the value is not JSON (NaN and infinity included); OSError, with the file's name: it
    cannot be written. The old file is untouched.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    target = Path(path)
    with contextlib.suppress(OSError, ValueError):
        if target.read_text(encoding="utf-8") == text:
            return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    # Not mkstemp, which makes 0600: the umask decides whether colleagues may read it.
    take_back = interrupts.at_end(lambda number, line: temporary.unlink(missing_ok=True))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with writing(target), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        take_back()
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself must reach the disk too
    finally:
        os.close(directory)
