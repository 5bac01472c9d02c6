"""Where the processes of a run meet before JAX connects them, so that who is missing can be told by name.

JAX's own wait ends, when it is over, with an abort in C++ that names nobody. Here process 0 listens at the address of
the coordinator until every process has said who it is, tells all of them to go on, and leaves the address to JAX.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from contextlib import ExitStack, suppress


class ProcessesMissingError(RuntimeError):
    """The processes of a run did not find each other in time, or are not those of one run."""


def bind_host(host: str) -> str:
    """Where the coordinator listens: at nothing but this machine's own loopback when that is its address."""
    with suppress(OSError):
        if socket.gethostbyname(host).startswith("127."):
            return "127.0.0.1"
    return ""


def meet(address: str, num_processes: int, process_id: int, *, seconds: float) -> None:
    """Returns in every process once all are there.

    Args:
        address: host:port of process 0.
        seconds: how long is waited.

    Raises:
        ValueError: the address is no host:port.
        ProcessesMissingError: names who is missing, or comes twice, or counts otherwise; or says that nobody answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator: expected HOST:PORT, given {address!r}")
    if process_id == 0:
        _serve(host, int(port), num_processes, seconds)
    else:
        _call(host, int(port), num_processes, process_id, seconds)


def _serve(host: str, port: int, num_processes: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    came: dict[int, tuple[str, socket.socket | None]] = {0: (_me(), None)}
    with ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server((bind_host(host), port), backlog=1024))
        except OSError as error:
            raise ProcessesMissingError(f"process 0 cannot listen at {host}:{port}: {error.strerror}") from None
        while len(came) < num_processes:
            if not select.select([server], [], [], max(0.0, deadline - time.monotonic()))[0]:
                there = ", ".join(f"{i} ({who})" for i, (who, _) in sorted(came.items())[:8])
                missing = sorted({*range(num_processes)} - came.keys())
                names = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
                problem = f"after {seconds:g} s, {len(missing)} of {num_processes} processes are missing: {names}; "
                problem += f"there are {there}{', ...' if len(came) > 8 else ''}"
                _tell(came, problem)
                raise ProcessesMissingError(problem)
            connection = stack.enter_context(server.accept()[0])
            if (card := _read(connection, 5.0)) is None:  # no process of ours
                connection.close()
                continue
            problem, known = "", came.get(card["id"])
            if card["of"] != num_processes:
                problem = f"process {card['id']} ({card['who']}) counts {card['of']} processes, and process 0 "
                problem += str(num_processes)
            elif known is not None and (known[1] is None or _open(known[1])):
                problem = f"two processes say that they are process {card['id']}: {known[0]} and {card['who']}"
            if problem:
                _tell({**came, -1: (card["who"], connection)}, problem)
                raise ProcessesMissingError(problem)
            came[card["id"]] = (card["who"], connection)
        server.close()
        _tell(came, "")


def _call(host: str, port: int, num_processes: int, process_id: int, seconds: float) -> None:
    deadline, nobody = time.monotonic() + seconds, f"nobody answers at {host}:{port}"
    card = json.dumps({"id": process_id, "of": num_processes, "who": _me()}).encode() + b"\n"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.sendall(card)
                # Process 0 knows better who is missing, so its answer is waited for a little longer.
                answer = _read(connection, max(0.1, deadline - time.monotonic()) + 5.0)
        except OSError as error:
            nobody, answer = f"nobody answers at {host}:{port} ({error.strerror or error})", None
        if answer is None:  # process 0 is not up yet, or was started again
            time.sleep(0.05)
        elif answer["problem"]:
            raise ProcessesMissingError(answer["problem"])
        else:
            return
    raise ProcessesMissingError(f"process {process_id} has waited for {seconds:g} s: {nobody}; is process 0 started?")


def _me() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()}"


def _open(connection: socket.socket) -> bool:
    """Whether the other side is still there: its end would be read as b""."""
    if not select.select([connection], [], [], 0)[0]:
        return True
    with suppress(OSError):
        return bool(connection.recv(1, socket.MSG_PEEK))
    return False


def _tell(came: dict[int, tuple[str, socket.socket | None]], problem: str) -> None:
    for _, connection in came.values():
        with suppress(OSError):
            if connection is not None:
                connection.sendall(json.dumps({"problem": problem}).encode() + b"\n")


def _read(connection: socket.socket, seconds: float) -> dict | None:
    """One line of JSON with the keys that are expected; None for anything else."""
    connection.settimeout(seconds)
    with suppress(OSError, ValueError, TypeError, KeyError):
        message = json.loads(connection.makefile("rb").readline(65536))
        if "problem" in message or (isinstance(message["id"], int) and message["of"] and message["who"]):
            return message
    return None
