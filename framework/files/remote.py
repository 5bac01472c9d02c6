"""Object stores: connects to URLs, and provides the `Mirror` that runs use to work there.

An object store (gs://, s3://) has no appends, no renames and no file locks. So a run whose workdir is a URL writes
its small files into its own local folder, and a Mirror copies changes to the URL; checkpoints are written there
directly (framework/checkpoint/chunk_store.py). The lock is an object that is created only if there is none, and
refreshed: a lease.
"""

from __future__ import annotations

import contextlib
import json
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
from typing import TYPE_CHECKING, Any

from absl import logging

from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.terminal.install_hints import install_extra

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# Seconds between two uploads, and between two refreshes of the lock.
INTERVAL = 20.0
# Seconds after which a lock that was not refreshed counts as abandoned.
LEASE = 60.0
OWNER = "process {pid} on host {host}, since {since} ({command})"
# Names in a workdir with these prefixes are not downloaded: a run does not read them from its folder.
_NOT_FETCHED = ("checkpoints", "tensorboard", "profile", "lock.json")
# Process numbers are unique only within their namespace: containers may share a host's name.
_NAMESPACE = os.path.basename(os.path.realpath("/proc/self/ns/pid"))
# fsspec filesystems that wrap another one. They keep copies at a location given by the URL, or interpret templates in a
# file.
_WRAPPERS = ("simplecache", "filecache", "blockcache", "cached", "reference")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# A user name and password before "@", and query values that sign or authorize a URL.
_SECRET = re.compile(
    r"(?<=://)[^/\s]*@"
    r"|(?<=[?&])[\w-]*(?:signature|token|credential|secret|sig|key)=[^\s&]*",
    re.I,
)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL rather than a local path."""
    return "://" in os.fspath(path)


def without_secrets(text: str) -> str:
    """Returns the text, with anything that looks like credentials in its URLs removed."""
    return _SECRET.sub("...@", text)


def connect(url: str) -> tuple[AbstractFileSystem, str]:
    """Returns the fsspec filesystem of a URL, and the path in it; no request is made.

    Listings are not cached, because other processes write too.

    Raises:
        ValueError: the URL contains credentials, its protocol is unknown or wraps another, or a package is missing.
    """
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    if is_url(url) and _SECRET.search(url):
        shown = without_secrets(url)
        raise ValueError(
            f"{shown}: credentials in a URL are refused, because logs and configs would store them; "
            "use the store's own environment variables or files"
        )
    # fsspec chains filesystems by "::", and a wrapper may come without a URL after it.
    links = url.split("::") if is_url(url) or "::" in url else []
    for link in links:
        protocol = link.partition("://")[0]
        if protocol in _WRAPPERS:
            raise ValueError(f"{url}: {protocol} is refused; give the URL of the file itself")
    # Set in fsspec's own configuration, so that etils and pyarrow, which use fsspec themselves, have no cached listings
    # either.
    for protocol in _EXTRAS:
        options = conf.setdefault(protocol, {})
        options.setdefault("use_listings_cache", False)
    try:
        return url_to_fs(url)
    except (ValueError, ImportError) as error:
        hint = ""
        protocol = url.partition("://")[0]
        if isinstance(error, ImportError) and protocol in _EXTRAS:
            hint = f": {install_extra(_EXTRAS[protocol])}"
        raise ValueError(f"cannot open {url!r}: {error}{hint}") from error


@contextlib.contextmanager
def explain_errors(url: str) -> Iterator[None]:
    """Turns any error of a store's package into a one-line error that names the URL.

    It is FileNotFoundError, PermissionError, or ValueError (no credentials, no connection, ...).
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url} does not exist, or its bucket does not") from error
    except PermissionError as error:
        raise PermissionError(f"no permission for {url}") from error
    except ValueError:
        raise
    except Exception as error:
        # Every store's package has its own exceptions, without a common base class.
        first_line = str(error).strip().partition("\n")[0]
        message = without_secrets(first_line[:300])
        raise ValueError(f"{url}: {type(error).__name__}: {message}") from error


class Mirror:
    """Uploads the files of a local folder to a URL, and downloads those that a run reads again.

    The folder, `self.folder`, is created here. Every process of a run has a Mirror, for the files that it writes
    itself.

    Args:
        url: the workdir's URL, gs:// or s3://.

    Raises:
        ValueError: as from `connect`.
    """

    def __init__(self, url: str):
        self.url = url
        self.fs, root = connect(url)
        self.root = root.rstrip("/")
        self.folder = Path(tempfile.mkdtemp(prefix="plimsoll-"))
        # Size and modification time, by name, of the files that are the same on both sides.
        self._synced: dict[str, tuple[int, int]] = {}
        # Names of the files that were at the URL before anything was uploaded.
        self._fetched: set[str] = set()
        self._lock = f"{self.root}/lock.json"
        # The content of the lock while this process holds it; empty in the other processes of a run.
        self._held = b""
        # True if another job has replaced the lock.
        self._lost = False
        # Uploads come from a thread and from the training loop, one at a time.
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def fetch(self) -> None:
        """Downloads the workdir's files, except checkpoints, event files and traces.

        Raises as `explain_errors`.
        """
        prefix_len = len(self.root) + 1
        with explain_errors(self.url), self._turn:
            remote_paths: list[str] = []
            for entry in self.fs.ls(self.root, detail=False) if self.fs.exists(self.root) else []:
                if not entry[prefix_len:].startswith(_NOT_FETCHED):
                    # A file that is already in sync may have changed locally since.
                    remote_paths += [path for path in self.fs.find(entry) if path[prefix_len:] not in self._synced]
            names = [path[prefix_len:] for path in remote_paths]
            # Downloads them concurrently, and creates their folders.
            self.fs.get(remote_paths, [str(self.folder / name) for name in names])
            for name in names:
                self._synced[name] = _state(self.folder / name)
            self._fetched.update(names)

    def withdraw(self) -> None:
        """Deletes the uploaded files from the URL that are no longer in the folder.

        Files that were there before stay. Raises as `explain_errors`.
        """
        with explain_errors(self.url), self._turn:
            # Iterate over a copy, because the loop deletes names.
            for name in [*self._synced]:
                if name in self._fetched or (self.folder / name).exists():
                    continue
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm_file(f"{self.root}/{name}")
                del self._synced[name]

    def upload(self) -> None:
        """Uploads the files that have changed.

        Raises as `explain_errors`; ValueError: another job has the lock now.
        """
        with explain_errors(self.url), self._turn:
            if self._lost:
                raise ValueError(f"{self.url}: another job has taken it over; this job uploads nothing more")
            for path in sorted(self.folder.rglob("*")):
                name = path.relative_to(self.folder).as_posix()
                is_hidden = any(part.startswith(".") for part in name.split("/"))
                # Such files are still being written, and will be renamed.
                if path.name.endswith(".tmp") or is_hidden:
                    continue
                # A file may be renamed or removed after the listing.
                with contextlib.suppress(FileNotFoundError):
                    if not path.is_file():
                        continue
                    # Get the state before the upload, so that a change in between makes the next upload copy the file
                    # again.
                    state = _state(path)
                    if state != self._synced.get(name):
                        self.fs.put_file(str(path), f"{self.root}/{name}")
                        self._synced[name] = state

    def start(self) -> None:
        """Starts to upload, and to refresh the lock, in the background.

        A failure is logged once, and retried.
        """
        if self._threads:
            return
        # Separate threads: an upload of many files must not make the lock look abandoned.
        actions = [self.upload, self._refresh] if self._held else [self.upload]
        for action in actions:
            thread = threading.Thread(target=self._repeat, args=(action,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _repeat(self, action: Callable[[], None]) -> None:
        is_reported = False
        while not self._stop.wait(INTERVAL):
            try:
                action()
                is_reported = False
            except Exception as error:
                if not is_reported:
                    logging.warning("--workdir: %s; training continues, and this is retried", error)
                is_reported = True

    def close(self) -> None:
        """Uploads one last time, then removes the lock and the local folder.

        Raises OSError: the upload failed; the error names the folder, which is kept.
        """
        if not self.folder.exists():
            return
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=300)
        try:
            if any(thread.is_alive() for thread in self._threads):
                raise OSError(f"{self.url}: an upload did not finish")
            self.upload()
        except (OSError, ValueError) as error:
            raise OSError(f"--workdir: {error}. The last files of this run are in {self.folder}") from error
        finally:
            # A lock that cannot be removed expires by itself, as a lease.
            with contextlib.suppress(Exception):
                if self._held and self.fs.cat_file(self._lock) == self._held:
                    self.fs.rm_file(self._lock)
        shutil.rmtree(self.folder, ignore_errors=True)

    def claim(self, owner: dict[str, object]) -> str | None:
        """Creates the lock, and returns a message about the owner of a lock that was taken over, if any.

        An existing lock is watched for up to LEASE seconds: its owner may still refresh it.

        Raises:
            ValueError: another job is working there; and as `explain_errors`.
        """
        # The token makes the content unique to this claim, for the check below.
        owner = {**owner, "pid_namespace": _NAMESPACE, "token": uuid.uuid4().hex}
        claimed_text = (json.dumps(owner, indent=2) + "\n").encode()
        message = None
        with explain_errors(self.url):
            while True:
                try:
                    self.fs.pipe_file(self._lock, claimed_text, mode="create")
                    break
                except FileExistsError:
                    # Its owner may release it meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        message = self._wait_for_end()
                        self.fs.rm_file(self._lock)
            # Another job may have seen the same lock expire, and may replace this one.
            if message:
                time.sleep(min(2.0, INTERVAL / 4))
            lock_text = self.fs.cat_file(self._lock)
        if lock_text != claimed_text:
            raise ValueError(f"--workdir: another job has just claimed {self.url}")
        self._held = claimed_text
        return message

    def _wait_for_end(self) -> str:
        """Waits until the lock has expired, and returns a message about its owner.

        Raises ValueError: its owner has refreshed it.
        """
        body = self.fs.cat_file(self._lock)
        owner: dict[str, Any] = {}
        owner_description = "an unknown job"
        # Whatever the object contains, it is a lock.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            stored_owner = parse_json(body)
            owner_description = OWNER.format_map(stored_owner)
            owner = stored_owner
        message = f"took over {self.url}: its lock was left behind by {owner_description}"
        if owner.get("host") == socket.gethostname() and owner.get("pid_namespace") == _NAMESPACE:
            # The owner was a process on this machine. Signal 0 only checks whether it exists.
            try:
                os.kill(owner["pid"], 0)
            except ProcessLookupError:
                return f"{message}, which has ended"
        # The lock's age is measured only by the store's clock, which may differ from this machine's: the current time
        # is that of an object created for this purpose.
        probe = f"{self._lock}.{uuid.uuid4().hex[:8]}"
        self.fs.pipe_file(probe, b"")
        start = time.monotonic()
        modified = self.fs.modified(self._lock)
        age = (self.fs.modified(probe) - modified).total_seconds()
        self.fs.rm_file(probe)
        if age < LEASE:
            warning = "--workdir: %s is locked by %s; waiting to see whether that job is still running"
            logging.warning(warning, self.url, owner_description)
        while age + time.monotonic() - start < LEASE:
            time.sleep(INTERVAL / 10)
            if self.fs.modified(self._lock) != modified:
                advice = "stop that job first, or choose another --workdir"
                raise ValueError(f"--workdir: {self.url} is in use by {owner_description}; {advice}")
        return f"{message}, which did not refresh it for {LEASE:.0f} seconds"

    def _refresh(self) -> None:
        with explain_errors(self.url):
            self._lost = self.fs.cat_file(self._lock) != self._held
            if not self._lost:
                # The content stays; other jobs check the modification time.
                self.fs.pipe_file(self._lock, self._held)


def _state(path: Path) -> tuple[int, int]:
    """Returns the size in bytes and the modification time in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
