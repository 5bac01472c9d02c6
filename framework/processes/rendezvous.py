"""Lets the processes of a run meet before JAX connects them, so that a missing one can be named.

JAX's own wait ends, when it is over, with an abort in C++ that names nobody. Here process 0 listens
at the address of the coordinator until every process has said who it is, tells all of them to go
on, and leaves the address to JAX.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple


class ProcessesMissingError(RuntimeError):
    """The processes of a run did not find each other in time, or are not those of one run."""


class _Arrival(NamedTuple):
    """A process that has said who it is."""

    words: str  # "process PID on host NAME"
    connection: socket.socket | None  # None for process 0, which listens itself


def bind_host(host: str) -> str:
    """Returns the address at which the coordinator of that host listens; "" stands for all.

    If the host is this machine's own loopback, nobody else can connect.
    """
    with suppress(OSError):
        if socket.gethostbyname(host).startswith("127."):
            return "127.0.0.1"
    return ""


def meet(address: str, num_processes: int, process_id: int, *, seconds: float) -> None:
    """Waits in every process until all are there.

    Args:
        address: host:port of process 0.
        num_processes: the number of processes.
        process_id: the number of this process.
        seconds: the longest wait.

    Raises:
        ValueError: the address is no host:port.
        ProcessesMissingError: the error names the processes that are missing, come twice, or count
            otherwise; or says that nobody answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator: expected HOST:PORT, given {address!r}")
    if process_id == 0:
        _serve(host, int(port), num_processes, seconds)
    else:
        _call(host, int(port), num_processes, process_id, seconds)


def _serve(host: str, port: int, num_processes: int, seconds: float) -> None:
    """Listens, as process 0, until all have said who they are, and tells them to go on."""
    deadline = time.monotonic() + seconds
    arrivals = {0: _Arrival(_own_words(), None)}
    # The connections stay open until the end, when all are answered at once.
    with ExitStack() as stack:
        address = (bind_host(host), port)
        try:
            server = stack.enter_context(socket.create_server(address, backlog=1024))
        except OSError as error:
            problem = f"process 0 cannot listen at {host}:{port}: {error.strerror}"
            raise ProcessesMissingError(problem) from None
        while len(arrivals) < num_processes:
            remaining_seconds = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([server], [], [], remaining_seconds)
            if not ready:
                problem = _who_is_missing(arrivals, num_processes, seconds)
                _tell(arrivals.values(), problem)
                raise ProcessesMissingError(problem)
            connection = stack.enter_context(server.accept()[0])
            card = _read_card(connection, 5.0)
            # Whoever sends anything else is no process of this run.
            if card is None:
                connection.close()
                continue
            problem = _contradiction(card, arrivals, num_processes)
            arrival = _Arrival(card["who"], connection)
            if problem:
                _tell([*arrivals.values(), arrival], problem)
                raise ProcessesMissingError(problem)
            arrivals[card["id"]] = arrival
        # Before the others go on, as JAX in this process is to listen at the same port.
        server.close()
        _tell(arrivals.values(), "")


def _who_is_missing(arrivals: dict[int, _Arrival], num_processes: int, seconds: float) -> str:
    """Describes, when the time is up, which processes are missing and which are there."""
    # Of thousands of processes only so many are named: the text is one line of a log.
    missing_ids = sorted({*range(num_processes)} - arrivals.keys())
    missing = ", ".join(map(str, missing_ids[:16]))
    if len(missing_ids) > 16:
        missing += ", ..."
    present = ", ".join(f"{i} ({arrival.words})" for i, arrival in sorted(arrivals.items())[:8])
    if len(arrivals) > 8:
        present += ", ..."
    count = f"{len(missing_ids)} of {num_processes} processes are missing"
    return f"after {seconds:g} s, {count}: {missing}; there are {present}"


def _contradiction(card: dict[str, Any], arrivals: dict[int, _Arrival], num_processes: int) -> str:
    """Describes how a process contradicts those that are there; "" if it does not."""
    process_id = card["id"]
    if card["of"] != num_processes:
        words = f"process {process_id} ({card['who']})"
        return f"{words} counts {card['of']} processes, and process 0 {num_processes}"
    earlier = arrivals.get(process_id)
    # A process whose connection has ended was started again.
    if earlier is not None and (earlier.connection is None or _is_open(earlier.connection)):
        pair = f"{earlier.words} and {card['who']}"
        return f"two processes say that they are process {process_id}: {pair}"
    return ""


def _call(host: str, port: int, num_processes: int, process_id: int, seconds: float) -> None:
    """Tells process 0 who this is, and waits until it says to go on."""
    deadline = time.monotonic() + seconds
    problem = f"nobody answers at {host}:{port}"
    card = {"id": process_id, "of": num_processes, "who": _own_words()}
    message = json.dumps(card).encode() + b"\n"
    while (remaining_seconds := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=remaining_seconds) as connection:
                connection.sendall(message)
                # Process 0 knows better who is missing, so its answer is waited for a little
                # longer.
                answer_seconds = max(0.1, deadline - time.monotonic()) + 5.0
                answer = _read_answer(connection, answer_seconds)
        except OSError as error:
            answer = None
            problem = f"nobody answers at {host}:{port} ({error.strerror or error})"
        # Without an answer, process 0 is not up yet, or was started again.
        if answer is None:
            time.sleep(0.05)
        elif answer["problem"]:
            raise ProcessesMissingError(answer["problem"])
        else:
            return
    waiting = f"process {process_id} has waited for {seconds:g} s"
    raise ProcessesMissingError(f"{waiting}: {problem}; is process 0 started?")


def _own_words() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()}"


def _is_open(connection: socket.socket) -> bool:
    """Tells whether the other side is still there: its end would be read as b""."""
    readable, _, _ = select.select([connection], [], [], 0)
    if not readable:
        return True
    # A look at the next byte leaves it to be read.
    with suppress(OSError):
        return bool(connection.recv(1, socket.MSG_PEEK))
    return False


def _tell(arrivals: Iterable[_Arrival], problem: str) -> None:
    """Answers all that have come: "" lets them go on, a problem ends them."""
    for arrival in arrivals:
        # One that has gone must not keep the answer from the next.
        with suppress(OSError):
            if arrival.connection is not None:
                message = json.dumps({"problem": problem}).encode() + b"\n"
                arrival.connection.sendall(message)


def _read_card(connection: socket.socket, seconds: float) -> dict[str, Any] | None:
    """Reads what a process says of itself; None for anything else."""
    card = _read(connection, seconds)
    if isinstance(card.get("id"), int) and card.get("of") and card.get("who"):
        return card
    return None


def _read_answer(connection: socket.socket, seconds: float) -> dict[str, Any] | None:
    """Reads the answer of process 0; None for anything else."""
    answer = _read(connection, seconds)
    return answer if "problem" in answer else None


def _read(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """Reads one line with a JSON object; {} for anything else."""
    connection.settimeout(seconds)
    with suppress(OSError, ValueError):
        # With a limit, since anybody on the network may send anything.
        line = connection.makefile("rb").readline(65536)
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    return {}
