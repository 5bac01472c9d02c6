"""Lets the processes of a run find each other before JAX connects them, so that errors can name a missing process.

When JAX's own wait times out, it aborts in C++ without naming the missing processes. Here, process 0 listens at the
address of the coordinator until every process has identified itself. Then it lets all of them continue, and frees the
address for JAX. It sends each connection a nonce. The process answers with its number and an HMAC-SHA256 (RFC 2104) of
nonce and message under the run's key.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NoReturn

from absl import logging

from plimsoll.framework.config.names import printable
from plimsoll.framework.files.text_files import parse_json

# An environment variable with a secret that all processes of a run share; launchers set it. Process 0 then accepts only
# processes that know the secret. Without it, any program that can reach the port could pass for one of them.
KEY = "PLIMSOLL_RENDEZVOUS_KEY"
# Limits on the time and the bytes in which a connection has to identify itself.
_HELLO_SECONDS = 5.0
_HELLO_BYTES = 4096
_ANSWER_BYTES = 65536
# Unidentified connections that may be open, in addition to one per process.
_MAX_PENDING = 64
_MAX_PROCESSES = 1 << 20


class ProcessesMissingError(RuntimeError):
    """The processes of a run did not find each other in time, or do not belong to the same run."""


@dataclass(frozen=True)
class _Hello:
    """The message by which a process identifies itself.

    Attributes:
        process_id: number of the process.
        num_processes: number of processes in the run, as this process was started.
        description: "process PID on host NAME".
    """

    process_id: int
    num_processes: int
    description: str

    def message(self, nonce: str) -> bytes:
        """Encode the message, with a proof that the sender knows the run's key."""
        return _line(
            {"id": self.process_id, "of": self.num_processes, "who": self.description, "proof": self._proof(nonce)}
        )

    @classmethod
    def parse(cls, line: bytes, nonce: str, num_processes: int) -> _Hello | None:
        """Parse and verify a message; None if it is not from a process of this run.

        Args:
            line: the received line.
            nonce: the nonce that this connection was sent.
            num_processes: number of processes in this run.
        """
        try:
            message = parse_json(line)
            values = message["id"], message["of"], message["who"], message["proof"]
        except (ValueError, TypeError, KeyError):
            return None
        # type() and not isinstance: True is an int.
        if [type(value) for value in values] != [int, int, str, str]:
            return None
        process_id, of, description, proof = values
        hello = cls(process_id, of, description)
        if not hmac.compare_digest(hello._proof(nonce).encode(), proof.encode("utf-8", "replace")):
            return None
        if not 0 <= process_id < max(num_processes, of) or not 0 < of <= _MAX_PROCESSES:
            return None
        return cls(process_id, of, printable(description))

    def _proof(self, nonce: str) -> str:
        text = f"{nonce} {self.process_id} {self.num_processes} {self.description}"
        return hmac.new(_key(), text.encode("utf-8", "replace"), "sha256").hexdigest()


@dataclass(frozen=True)
class _Arrival:
    """A process that has identified itself."""

    description: str  # "process PID on host NAME"
    connection: socket.socket | None  # None for process 0, which is the listener


@dataclass
class _Pending:
    """A connection that has not identified itself yet."""

    deadline: float
    nonce: str
    received: bytes = b""


def _key() -> bytes:
    return os.environ.get(KEY, "").encode()


def bind_host(host: str) -> str:
    """Return the address at which the coordinator on a host listens; "" for all interfaces.

    If the host resolves to this machine's loopback, other machines cannot connect.
    """
    with suppress(OSError):
        if socket.gethostbyname(host).startswith("127."):
            return "127.0.0.1"
    return ""


def wait_for_all(address: str, num_processes: int, process_id: int, *, seconds: float) -> None:
    """Wait until all processes have arrived. Every process calls this.

    Args:
        address: host:port of process 0.
        num_processes: number of processes.
        process_id: number of this process.
        seconds: maximum time to wait.

    Raises:
        ValueError: the address is not host:port.
        ProcessesMissingError: a process is missing, arrived twice, or was started with a different number of processes
            (the message names it), or process 0 does not respond.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator: expected HOST:PORT, given {address!r}")
    if process_id == 0:
        _serve(host, int(port), num_processes, seconds)
    else:
        _call(host, int(port), num_processes, process_id, seconds)


def _serve(host: str, port: int, num_processes: int, seconds: float) -> None:
    """Listen as process 0 until all processes have identified themselves, then let them continue."""
    deadline = time.monotonic() + seconds
    address = (bind_host(host), port)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(address, backlog=1024))
        except OSError as error:
            problem = f"process 0 cannot listen at {host}:{port}: {error.strerror}"
            raise ProcessesMissingError(problem) from None
        # Keep the connections of arrived processes open until the end, when all of them are answered together.
        rendezvous = stack.enter_context(_Rendezvous(server, num_processes))
        while len(rendezvous.arrivals) < num_processes:
            if time.monotonic() >= deadline:
                rendezvous.end(_describe_missing(rendezvous, num_processes, seconds))
            rendezvous.wait(deadline)
        # Close the port before the others continue, because JAX in this process listens at the same port.
        server.close()
        _send_answers(rendezvous.arrivals.values(), "")


class _Rendezvous:
    """The connections to process 0, in one select loop.

    Any program on the network may connect and send anything. The loop never blocks on one connection: each has a
    deadline and a byte limit for identifying itself.

    Attributes:
        arrivals: processes of the run that have arrived, by number.
        num_rejected: number of connections that were closed because they did not identify as a process of the run.
        contradiction: the last contradiction between processes that did not end the wait; "" if there was none.
    """

    def __init__(self, server: socket.socket, num_processes: int):
        self.arrivals: dict[int, _Arrival] = {0: _Arrival(_describe_process(), None)}
        self.num_rejected = 0
        self.contradiction = ""
        self._server = server
        self._num_processes = num_processes
        self._pending: dict[socket.socket, _Pending] = {}
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for connection in (*self._pending, *(arrival.connection for arrival in self.arrivals.values())):
            if connection is not None:
                connection.close()

    def wait(self, deadline: float) -> None:
        """Handle events until the next deadline of a connection, or `deadline`.

        Raises:
            ProcessesMissingError: two processes of the run, which has a key, contradict each other.
        """
        next_time = min([deadline, *(pending.deadline for pending in self._pending.values())])
        for key, _ in self._selector.select(max(0.0, next_time - time.monotonic())):
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj in self._pending:
                self._receive(key.fileobj)  # pyright: ignore[reportArgumentType]
        now = time.monotonic()
        for connection in [one for one, pending in self._pending.items() if pending.deadline <= now]:
            self._reject(connection)

    def end(self, problem: str) -> NoReturn:
        """Send a problem to all processes that have arrived, and raise it as a ProcessesMissingError."""
        _send_answers(self.arrivals.values(), problem)
        raise ProcessesMissingError(problem)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            # The peer has already closed the connection, or no file descriptor is free.
            return
        if len(self._pending) >= _MAX_PENDING + self._num_processes:
            self._reject(next(iter(self._pending)))
        connection.setblocking(False)
        pending = _Pending(time.monotonic() + _HELLO_SECONDS, secrets.token_hex(16))
        self._pending[connection] = pending
        self._selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):
            connection.sendall(_line({"nonce": pending.nonce}))

    def _receive(self, connection: socket.socket) -> None:
        pending = self._pending[connection]
        try:
            part = connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        pending.received += part
        line, newline, _ = pending.received.partition(b"\n")
        if not newline:
            if not part or len(pending.received) > _HELLO_BYTES:
                self._reject(connection)
            return
        hello = _Hello.parse(line, pending.nonce, self._num_processes)
        if hello is None:
            self._reject(connection)
            return
        self._selector.unregister(connection)
        del self._pending[connection]
        arrival = _Arrival(hello.description, connection)
        problem = self._contradiction(hello)
        if not problem:
            earlier = self.arrivals.get(hello.process_id)
            if earlier is not None and earlier.connection is not None:
                earlier.connection.close()
            self.arrivals[hello.process_id] = arrival
            return
        _send_answers([arrival], problem)
        connection.close()
        if _key():
            # Only processes of the run know the key.
            self.end(problem)
        # Without a key the sender may be any program, so the others keep waiting for the real process.
        self.contradiction = problem
        logging.warning("rendezvous: %s", problem)

    def _contradiction(self, hello: _Hello) -> str:
        """Describe how a process contradicts those that have arrived; "" if it does not."""
        process_id = hello.process_id
        if hello.num_processes != self._num_processes:
            description = f"process {process_id} ({hello.description})"
            return f"{description} expects {hello.num_processes} processes, but process 0 expects {self._num_processes}"
        earlier = self.arrivals.get(process_id)
        # If the earlier connection is closed, the process was restarted.
        if earlier is not None and (earlier.connection is None or _is_open(earlier.connection)):
            pair = f"{earlier.description} and {hello.description}"
            return f"two processes claim to be process {process_id}: {pair}"
        return ""

    def _reject(self, connection: socket.socket) -> None:
        self.num_rejected += 1
        self._selector.unregister(connection)
        del self._pending[connection]
        connection.close()


def _describe_missing(rendezvous: _Rendezvous, num_processes: int, seconds: float) -> str:
    """Describe, after the timeout, which processes are missing and which have arrived."""
    arrivals = rendezvous.arrivals
    # List only a few, because there may be thousands of processes and the text is one line of a log.
    missing_ids = sorted({*range(num_processes)} - arrivals.keys())
    missing = ", ".join(map(str, missing_ids[:16]))
    if len(missing_ids) > 16:
        missing += ", ..."
    present = ", ".join(f"{i} ({arrival.description})" for i, arrival in sorted(arrivals.items())[:8])
    if len(arrivals) > 8:
        present += ", ..."
    count = f"{len(missing_ids)} of {num_processes} processes are missing"
    rejected = ""
    if rendezvous.num_rejected:
        rejected = f"; {rendezvous.num_rejected} connections were rejected: not from a process of this run"
        if _key():
            rejected += f", or without its {KEY}"
    contradiction = f"; {rendezvous.contradiction}" if rendezvous.contradiction else ""
    return f"after {seconds:g} s, {count}: {missing}; arrived: {present}{contradiction}{rejected}"


def _call(host: str, port: int, num_processes: int, process_id: int, seconds: float) -> None:
    """Identify this process to process 0, and wait for its answer."""
    deadline = time.monotonic() + seconds
    problem = f"no answer from {host}:{port}"
    hello = _Hello(process_id, num_processes, _describe_process())
    while (remaining_seconds := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=remaining_seconds) as connection:
                # Wait a little longer for the answer, because process 0 knows which processes are missing.
                answer_deadline = deadline + 5.0
                greeting = _read_message(connection, answer_deadline)
                connection.sendall(hello.message(str(greeting.get("nonce", ""))))
                answer = _read_message(connection, answer_deadline)
        except OSError as error:
            answer = dict[str, object]()
            problem = f"no answer from {host}:{port} ({error.strerror or error})"
        # Without an answer, process 0 is not up yet, or was restarted.
        if "problem" not in answer:
            time.sleep(0.05)
        elif answer["problem"]:
            raise ProcessesMissingError(str(answer["problem"]))
        else:
            return
    waiting = f"process {process_id} has waited for {seconds:g} s"
    raise ProcessesMissingError(f"{waiting}: {problem}; has process 0 started?")


def _describe_process() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()}"


def _is_open(connection: socket.socket) -> bool:
    """Return whether the peer is still connected: a closed connection would be readable as b""."""
    readable, _, _ = select.select([connection], [], [], 0)
    if not readable:
        return True
    # Peek at the next byte without consuming it.
    with suppress(OSError):
        return bool(connection.recv(1, socket.MSG_PEEK))
    return False


def _send_answers(arrivals: Iterable[_Arrival], problem: str) -> None:
    """Answer processes that have arrived: "" lets them continue, a problem ends them."""
    for arrival in arrivals:
        # A closed connection must not keep the answer from the others.
        with suppress(OSError):
            if arrival.connection is not None:
                arrival.connection.sendall(_line({"problem": problem}))


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_message(connection: socket.socket, deadline: float) -> dict[str, object]:
    """Read one line with a JSON object; {} for anything else, or if the deadline passes first."""
    received = b""
    with suppress(OSError, ValueError):
        while b"\n" not in received and len(received) <= _ANSWER_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(_ANSWER_BYTES)
            if not part or time.monotonic() > deadline:
                return {}
            received += part
        message = parse_json(received.partition(b"\n")[0])
        if isinstance(message, dict):
            return message
    return {}
