"""Object stores: what a URL names, and the `Mirror` by which a run works there.

An object store (gs://, s3://) has no appends, no renames and no file locks. So a run whose workdir is a URL writes its
small files into a local folder of its own, and a Mirror carries what changed to the URL; checkpoints go there directly
(framework/checkpoint/objects.py). The lock is an object that is created only if there is none, and refreshed: a lease.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

INTERVAL = 20.0  # seconds between two uploads, and between two refreshments of the lock
LEASE = 60.0  # a lock that was not refreshed for so long belongs to nobody
OWNER = "process {pid} on host {host}, since {since} ({command})"
_NOT_FETCHED = ("checkpoints", "tensorboard", "profile", "lock.json")  # what begins so, of a workdir
# Process numbers count only within their namespace: containers may share a host's name.
_NAMESPACE = os.path.basename(os.path.realpath("/proc/self/ns/pid"))
# Filesystems of fsspec around another one: they keep copies where the URL says, or interpret templates in a file.
_WRAPPERS = ("simplecache", "filecache", "blockcache", "cached", "reference")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_SECRET = re.compile(r"(?<=://)[^/\s]*@|(?<=[?&])[\w-]*(?:signature|token|credential|secret|sig|key)=[^\s&]*", re.I)


def is_url(path: Any) -> bool:
    """Whether that names something by a URL, not by a local path."""
    return "://" in os.fspath(path)


def without_secrets(text: str) -> str:
    """The text, with what looks like credentials in its URLs cut out."""
    return _SECRET.sub("...@", text)


def connect(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path there; no request is made. Listings are not cached, as other
    processes write too. Raises ValueError: credentials in the URL, an unknown protocol or one that wraps another, or
    a package is missing."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    if is_url(url) and _SECRET.search(url):
        raise ValueError(
            f"{without_secrets(url)}: credentials in a URL are refused, as logs and configs would keep them; use the "
            "store's own environment variables or files"
        )
    for part in url.split("::") if is_url(url) or "::" in url else []:
        if part.partition("://")[0] in _WRAPPERS:
            raise ValueError(f"{url}: {part.partition('://')[0]} is refused; give the URL of the file itself")
    for name in _EXTRAS:  # so that etils and pyarrow, which ask fsspec themselves, have none either
        conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    try:
        return url_to_fs(url)
    except (ValueError, ImportError) as error:
        extra = _EXTRAS.get(url.partition("://")[0]) if isinstance(error, ImportError) else None
        hint = f": pip install 'plimsoll-train[{extra}]'" if extra else ""
        raise ValueError(f"cannot open {url!r}: {error}{hint}") from error


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turns whatever a store's package raises into one line that names the URL: FileNotFoundError, PermissionError, or
    ValueError (no credentials, no connection, ...)."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url} does not exist, or its bucket does not") from error
    except PermissionError as error:
        raise PermissionError(f"no permission for {url}") from error
    except ValueError:
        raise
    except Exception as error:  # every package has its own
        line = without_secrets(str(error).strip().partition("\n")[0][:300])
        raise ValueError(f"{url}: {type(error).__name__}: {line}") from error


class Mirror:
    """Carries the files of `folder`, a local one that is made here, to `url`, and what a run reads again from there.

    Every process of a run has one, for what it writes itself. Raises what `connect` does.
    """

    def __init__(self, url: str):
        self.url = url
        self.fs, root = connect(url)
        self.root = root.rstrip("/")
        self.folder = Path(tempfile.mkdtemp(prefix="plimsoll-"))
        self._carried: dict[str, tuple[int, int]] = {}  # by name: size and time of what is the same on both sides
        self._fetched: set[str] = set()  # names of what was at the URL before anything was carried there
        self._lock, self._held, self._lost = f"{self.root}/lock.json", b"", False
        self._turn, self._stop, self._threads = threading.Lock(), threading.Event(), list[threading.Thread]()

    def fetch(self) -> None:
        """Downloads what is there, except checkpoints, event files and traces. Raises as `explained`."""
        with explained(self.url), self._turn:
            entries = self.fs.ls(self.root, detail=False) if self.fs.exists(self.root) else []
            wanted = [path for path in entries if not path[len(self.root) + 1 :].startswith(_NOT_FETCHED)]
            for found in (found for path in wanted for found in self.fs.find(path)):
                name = found[len(self.root) + 1 :]
                if name not in self._carried:  # else it may have changed here
                    (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    self.fs.get_file(found, str(self.folder / name))
                    self._carried[name] = _state(self.folder / name)
                    self._fetched.add(name)

    def withdraw(self) -> None:
        """Removes from the URL what was uploaded and is not in the folder any more, unless it was there before. Raises
        as `explained`."""
        with explained(self.url), self._turn:
            for name in [*self._carried]:
                if name not in self._fetched and not (self.folder / name).exists():
                    with contextlib.suppress(FileNotFoundError):
                        self.fs.rm_file(f"{self.root}/{name}")
                    del self._carried[name]

    def upload(self) -> None:
        """Uploads what has changed. Raises as `explained`; ValueError: the lock is not ours any more."""
        with explained(self.url), self._turn:
            if self._lost:
                raise ValueError(f"{self.url}: another job has taken it over; nothing more is written there")
            for path in sorted(self.folder.rglob("*")):
                name = path.relative_to(self.folder).as_posix()
                if path.name.endswith(".tmp") or any(part.startswith(".") for part in name.split("/")):
                    continue  # being written, to be renamed
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    if path.is_file() and (state := _state(path)) != self._carried.get(name):
                        self.fs.put_file(str(path), f"{self.root}/{name}")
                        self._carried[name] = state

    def start(self) -> None:
        """From now on, uploads and refreshes the lock in the background. A failure is told once, and tried again."""
        if not self._threads:
            for action in (self.upload, self._refresh) if self._held else (self.upload,):
                self._threads.append(threading.Thread(target=self._repeat, args=(action,), daemon=True))
                self._threads[-1].start()

    def _repeat(self, action: Callable[[], None]) -> None:
        told = False
        while not self._stop.wait(INTERVAL):
            try:
                action()
                told = False
            except Exception as error:
                if not told:
                    _log.warning("--workdir: %s; training goes on, and this is tried again", error)
                told = True

    def close(self) -> None:
        """The last upload; then the lock and the local folder go. Raises OSError: it failed; names the folder."""
        if not self.folder.exists():
            return
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=300)
        try:
            if any(thread.is_alive() for thread in self._threads):
                raise OSError(f"{self.url}: an upload does not end")
            self.upload()
        except (OSError, ValueError) as error:
            raise OSError(f"--workdir: {error}. The last files of this run are in {self.folder}") from error
        finally:
            with contextlib.suppress(Exception):  # it ends by itself
                if self._held and self.fs.cat_file(self._lock) == self._held:
                    self.fs.rm_file(self._lock)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- the lock ----------------------------------------------------------------------------------------------------

    def claim(self, owner: dict[str, Any]) -> str | None:
        """Creates the lock; waits up to LEASE seconds where there is one, to see whether its owner still refreshes it.
        Returns whose lock was taken over. Raises ValueError: another job works there; and as `explained`."""
        owner = {**owner, "pid_namespace": _NAMESPACE, "token": uuid.uuid4().hex}
        text, message = (json.dumps(owner, indent=2) + "\n").encode(), None
        with explained(self.url):
            while True:
                try:
                    self.fs.pipe_file(self._lock, text, mode="create")
                    break
                except FileExistsError:
                    with contextlib.suppress(FileNotFoundError):  # released meanwhile
                        message = self._wait_for_end()
                        self.fs.rm_file(self._lock)
            if message:
                time.sleep(min(2.0, INTERVAL / 4))  # another job may have seen the same lock end
            held = self.fs.cat_file(self._lock)
        if held != text:
            raise ValueError(f"--workdir: another job has just claimed {self.url}")
        self._held = text
        return message

    def _wait_for_end(self) -> str:
        """A message on whose lock it was, once it has ended."""
        body = self.fs.cat_file(self._lock)
        owner, who = {}, "a job that cannot be told from it"
        with contextlib.suppress(ValueError, TypeError, KeyError):
            owner = json.loads(body)
            who = OWNER.format_map(owner)
        message = f"took over {self.url}: its lock was left behind by {who}"
        if (owner.get("host"), owner.get("pid_namespace")) == (socket.gethostname(), _NAMESPACE):
            try:
                os.kill(owner["pid"], 0)
            except ProcessLookupError:
                return f"{message}, which has ended"
        # How old it is, by the store's clock alone: that of an object which is made now.
        probe = f"{self._lock}.{uuid.uuid4().hex[:8]}"
        self.fs.pipe_file(probe, b"")
        start, seen = time.monotonic(), self.fs.modified(self._lock)
        age = (self.fs.modified(probe) - seen).total_seconds()
        self.fs.rm_file(probe)
        if age < LEASE:
            _log.warning("--workdir: %s has the lock of %s; waiting for a sign of life", self.url, who)
        while age + time.monotonic() - start < LEASE:
            time.sleep(INTERVAL / 10)
            if self.fs.modified(self._lock) != seen:
                advice = "stop that job first, or choose another --workdir"
                raise ValueError(f"--workdir: {self.url} is in use by {who}; {advice}")
        return f"{message}, which did not refresh it for {LEASE:.0f} seconds"

    def _refresh(self) -> None:
        with explained(self.url):
            self._lost = self.fs.cat_file(self._lock) != self._held
            if not self._lost:
                self.fs.pipe_file(self._lock, self._held)


def _state(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns
