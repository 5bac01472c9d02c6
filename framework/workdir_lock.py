"""The lock of a directory: at most one job at a time, and a dead job's lock does not stop the next one.

The lock is a file that names the job that holds it. A job that died leaves it behind, and the next one takes it over
when it can prove that the owner is gone: same machine, same boot, and no process of that id with that start time (so
that a recycled process id is not mistaken for the owner).

May import: the standard library only. Nothing here starts JAX.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


class WorkdirBusyError(ValueError):
    """Another job holds the directory."""


@dataclass(frozen=True)
class Owner:
    """A process, described well enough to tell later whether it still runs.

    Args:
        host: the machine's name.
        pid: process id, in its pid namespace.
        started: start time in clock ticks since boot; None where the system does not tell.
        boot: the kernel's boot id; None likewise.
        namespace: of the process id (containers have their own); None likewise.
        since: wall clock, for people.
        command: the command line, for people.
    """

    host: str
    pid: int
    started: int | None
    boot: str | None
    namespace: str | None
    since: str
    command: str

    @classmethod
    def this_process(cls) -> Owner:
        """The calling process."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_start_time(os.getpid()),
            boot=_read("/proc/sys/kernel/random/boot_id"),
            namespace=_pid_namespace(),
            since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            command=" ".join(sys.argv)[:500],
        )

    @property
    def local(self) -> bool:
        """Whether its process id means something here: same machine, and same container."""
        return self.host == socket.gethostname() and self.namespace == _pid_namespace()

    @property
    def alive(self) -> bool:
        """Whether the process still runs; only meaningful if `local`."""
        if self.boot is not None and self.boot != _read("/proc/sys/kernel/random/boot_id"):
            return False  # the machine was started anew since
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return self._same_start()  # somebody else's process: it exists
        return self._same_start()

    def _same_start(self) -> bool:
        return self.started is None or _start_time(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since} ({self.command})"


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return None


def _start_time(pid: int) -> int | None:
    stat = _read(f"/proc/{pid}/stat")
    # The command in parentheses may hold blanks and parentheses itself: count from the last one. Field 22, see proc(5).
    # A zombie (state Z) has ended, though its id is still taken until its parent asks for it.
    fields = stat.rpartition(")")[2].split() if stat else []
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else None


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


class Lock:
    """A lock file; its directory exists. Nothing is written before `claim`.

    Args:
        path: of the lock file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._text: str | None = None

    def claim(self) -> str | None:
        """Makes this process the directory's owner until it ends or calls `release`.

        In a job of several processes, one of them claims. Claiming what this process already holds does nothing.

        Returns:
            None, or a message for the person: whose stale lock was taken over.

        Raises:
            WorkdirBusyError: another job holds it; names host, process and what to do.
        """
        if self._text is not None:
            return None
        message = None
        text = json.dumps(asdict(Owner.this_process()), indent=2) + "\n"
        with self._exclusive():
            if self.path.exists():
                message = self._judge(self._owner())
                self.path.unlink()
            # Exclusive creation decides between two hosts of one network file system, where flock may not.
            try:
                with open(self.path, "x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                raise WorkdirBusyError(f"--workdir: another job has just claimed {self.path.parent}") from None
        self._text = text
        atexit.register(self.release)
        return message

    def release(self) -> None:
        """Gives the directory back. Only the process that claimed it does, and only if the lock is still its own."""
        token, self._text = self._text, None
        if token is None or json.loads(token)["pid"] != os.getpid():
            return  # never claimed, or a forked child that inherited this object
        atexit.unregister(self.release)
        if not self.path.parent.is_dir():
            return  # removed while the job ran
        with self._exclusive():
            if self.path.exists() and self.path.read_text() == token:
                self.path.unlink()

    def _judge(self, owner: Owner | None) -> str:
        """The message with which the lock of `owner` may be taken over, or the refusal."""
        remove = f"if no job works there any more, remove the lock: rm {shlex.quote(str(self.path))}"
        if owner is None:
            raise WorkdirBusyError(
                f"--workdir: {self.path} makes no sense, so who works in {self.path.parent} is unknown; {remove}"
            )
        busy = f"--workdir: {self.path.parent} is in use by {owner}"
        if not owner.local:
            here = socket.gethostname()
            raise WorkdirBusyError(f"{busy}. Whether that job still runs cannot be told from host {here}; {remove}")
        if owner.alive:
            raise WorkdirBusyError(f"{busy}; stop that job first (kill {owner.pid}), or choose another --workdir")
        return f"took over {self.path.parent}: its lock was left behind by {owner}, which has ended"

    def _owner(self) -> Owner | None:
        """Who the lock names; None if there is no lock or it makes no sense."""
        try:
            owner = Owner(**json.loads(self.path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return owner if isinstance(owner.pid, int) and owner.pid > 0 else None  # 0 and -1 mean others to kill(2)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One process of this host at a time: between reading a stale lock and replacing it, nobody else may do so."""
        descriptor = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
