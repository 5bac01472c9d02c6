"""framework.processes.rendezvous, in threads; tests/faults/test_processes.py tests it through `plimsoll train`."""

import contextlib
import hmac
import json
import socket
import threading
import time
from typing import Any

import pytest

from plimsoll.framework.processes import rendezvous
from plimsoll.framework.processes.rendezvous import ProcessesMissingError, bind_host, wait_for_all
from tests.support.runs import free_port


def together(*who: tuple[int, int], seconds: float = 5.0, port: int | None = None) -> list[str]:
    """Let processes (id, of) meet at one address, and return the error of each, or "" if it proceeds."""
    address, told = f"127.0.0.1:{port or free_port()}", [""] * len(who)

    def one(number: int, index: int, of: int) -> None:
        try:
            wait_for_all(address, of, index, seconds=seconds)
        except ProcessesMissingError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=one, args=(number, *hello)) for number, hello in enumerate(who)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return told


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_processes_arrive(order: tuple[int, ...]) -> None:
    assert together(*((i, 3) for i in order)) == ["", "", ""]


def test_the_missing_are_named_to_all() -> None:
    began = time.monotonic()
    told = together((0, 4), (2, 4), seconds=1.0)
    assert 0.9 < time.monotonic() - began < 3.0
    assert "2 of 4 processes are missing: 1, 3; arrived: 0 (process " in told[0]
    assert told[0] == told[1]


def test_many_missing_are_a_short_line() -> None:
    (told,) = together((0, 1000), seconds=0.2)
    assert "999 of 1000 processes are missing: 1, 2, 3" in told
    assert len(told) < 250


def test_nobody_answers() -> None:
    (told,) = together((1, 2), seconds=0.5)
    assert "process 1 has waited for 0.5 s: no answer from 127.0.0.1:" in told
    assert "Connection refused" in told


def test_twice_the_same_and_another_count_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.KEY, "of this run")
    told = together((0, 3), (1, 3), (1, 3))
    assert len(set(told)) == 1
    assert "two processes claim to be process 1" in told[0]
    told = together((0, 2), (1, 3))
    assert told[0] == told[1]
    assert "expects 3 processes, but process 0 expects 2" in told[0]


def test_twice_the_same_and_another_count_without_a_key() -> None:
    """Any client could claim this, so it ends only the process that claims it."""
    told = together((0, 3), (1, 3), (1, 3), (2, 3))
    assert sorted(told)[:3] == ["", "", ""]
    assert "two processes claim to be process 1" in max(told)
    assert [one == "" for one in together((0, 2), (1, 3), (1, 2))] == [True, False, True]


def test_rendezvous_timeout_names_the_contradiction() -> None:
    for told in together((0, 3), (1, 3), (1, 3), seconds=1.0):
        assert "two processes claim to be process 1" in told


class Server:
    """Process 0 of `num_processes`, which waits for the others in a thread."""

    def __init__(self, num_processes: int = 2, seconds: float = 20.0):
        self._num_processes = num_processes
        self.port = free_port()
        self._told: list[str] = []
        self._thread = threading.Thread(target=lambda: self._told.extend(self._run(seconds)))
        self._thread.start()
        wait_for_port(self.port)

    def _run(self, seconds: float) -> list[str]:
        return together((0, self._num_processes), seconds=seconds, port=self.port)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10.0)

    def wait_for_error(self) -> str:
        """Return the error that process 0 ended with, or ""."""
        self._thread.join(timeout=10)
        (told,) = self._told
        return told

    def meets_the_others(self) -> bool:
        """Return whether the other processes find it and all proceed within 3 seconds."""
        began = time.monotonic()
        told = together(*((number, self._num_processes) for number in range(1, self._num_processes)), port=self.port)
        return not any([*told, self.wait_for_error()]) and time.monotonic() - began < 3.0


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)


def forge_hello(hello: dict[str, Any], greeting: bytes) -> bytes:
    """Return the line of a hello with a proof made without knowing the run's key."""
    nonce = json.loads(greeting)["nonce"]
    text = f"{nonce} {hello['id']} {hello['of']} {hello['who']}"
    proof = hmac.new(b"", text.encode(), "sha256").hexdigest()
    return json.dumps({**hello, "proof": proof}).encode() + b"\n"


def test_restarted_process_takes_its_previous_slot() -> None:
    server = Server(num_processes=3)
    with server.connect() as first:  # it sends its hello, and dies
        first.sendall(forge_hello({"id": 1, "of": 3, "who": "the first"}, first.recv(1000)))
        time.sleep(0.2)
    assert server.meets_the_others()


WHO = {"id": 1, "of": 2, "who": "x"}
DEEP = b"[" * 60_000
STRANGERS: dict[str, bytes] = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(64),
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "list": b"[]\n",
    "number": b"1\n",
    "null": b"null\n",
    "text": b'"x"\n',
    "empty line": b"\n",
    "empty object": b"{}\n",
    "answer": b'{"problem": ""}\n',
    "nonce": b'{"nonce": "x"}\n',
    "no UTF-8": b"\xff\xfe\xfd\n",
    "zeros": bytes(1000) + b"\n",
    "deep": DEEP + b"\n",
    "deep objects": b'{"a":' * 10_000 + b"\n",
    "deep in a hello": b'{"id": ' + DEEP[:2000] + b"\n",
    "long without an end": b"x" * 100_000,
    "long": b"x" * 100_000 + b"\n",
    "NaN": b'{"id": NaN, "of": 2, "who": "x", "proof": "x"}\n',
    "huge number": b'{"id": ' + b"9" * 4000 + b', "of": 2, "who": "x", "proof": "x"}\n',
    "huge exponent": b'{"id": 1e999, "of": 2, "who": "x", "proof": "x"}\n',
    "no proof": json.dumps(WHO).encode() + b"\n",
    "wrong proof": json.dumps({**WHO, "proof": "0" * 64}).encode() + b"\n",
    "proof of another type": json.dumps({**WHO, "proof": 1}).encode() + b"\n",
    "proof of a letter that is no ASCII": json.dumps({**WHO, "proof": "\u00e9"}).encode() + b"\n",
    "lone surrogate": b'{"id": 1, "of": 2, "who": "\\ud800", "proof": "\\ud800"}\n',
    "half a hello": json.dumps(WHO).encode()[:10],
}
# Hellos with a proof that would be valid for a run without a key.
HELLOS: dict[str, dict[str, Any]] = {
    "id 99": {"id": 99},
    "id -1": {"id": -1},
    "id true": {"id": True},
    "id 1.0": {"id": 1.0},
    "id as text": {"id": "1"},
    "id of a list": {"id": [1]},
    "no id": {"id": None},
    "of 0": {"of": 0},
    "of -2": {"of": -2},
    "of true": {"of": True},
    "of 10^9": {"of": 10**9},
    "of 3": {"of": 3},
    "who of a number": {"who": 1},
    "who of a list": {"who": ["x"]},
    "the first process": {"id": 0},
    "the first process of three": {"id": 0, "of": 3},
}


@pytest.mark.once("http", "deep")
@pytest.mark.parametrize("name", STRANGERS)
def test_unauthenticated_clients_are_rejected(name: str) -> None:
    server = Server()
    with server.connect() as stranger:
        stranger.recv(1000)
        with contextlib.suppress(OSError):
            stranger.sendall(STRANGERS[name])
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert server.meets_the_others()


@pytest.mark.once("id 99", "id true")
@pytest.mark.parametrize("name", HELLOS)
def test_invalid_messages_are_not_counted(name: str) -> None:
    server = Server()
    with server.connect() as stranger:
        stranger.sendall(forge_hello({**WHO, **HELLOS[name]}, stranger.recv(1000)))
        assert b'"problem": ""' not in stranger.recv(1000)
    assert server.meets_the_others()


@pytest.mark.first(1)
@pytest.mark.parametrize("hello", [WHO, {**WHO, "id": 0}, {**WHO, "of": 3}], ids=str)
def test_forged_message_is_ignored_if_a_key_is_set(hello: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.KEY, "of this run")
    server = Server()
    with server.connect() as stranger:
        stranger.sendall(forge_hello(hello, stranger.recv(1000)))
        assert stranger.recv(100) == b""
    assert server.meets_the_others()


def test_replayed_message_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.KEY, "of this run")
    server = Server()
    with server.connect() as one, server.connect() as other:
        nonce = json.loads(one.recv(1000))["nonce"]
        text = f"{nonce} 1 2 x"
        proof = hmac.new(b"of this run", text.encode(), "sha256").hexdigest()
        other.sendall(json.dumps({**WHO, "proof": proof}).encode() + b"\n")
        other.recv(1000)
        assert other.recv(1000) == b""
    assert server.meets_the_others()


def test_silent_and_slow_connections_block_nothing() -> None:
    server = Server()
    with contextlib.ExitStack() as stack:
        # More connections than the server has room for.
        silent = [stack.enter_context(server.connect()) for _ in range(100)]
        for connection in silent[-10:]:
            connection.sendall(b"{")
        assert server.meets_the_others()


@pytest.mark.pairs
def test_a_slow_connection_does_not_hold_the_start_beyond_its_time() -> None:
    began = time.monotonic()
    server = Server(seconds=1.5)
    with server.connect() as slow, contextlib.suppress(OSError):
        while time.monotonic() < began + 10.0:
            slow.sendall(b"{")
            time.sleep(0.1)
    assert "1 of 2 processes are missing: 1" in server.wait_for_error()
    assert time.monotonic() - began < 4.0


def test_control_characters_do_not_reach_a_message() -> None:
    told: list[str] = []
    port = free_port()
    thread = threading.Thread(target=lambda: told.extend(together((0, 3), seconds=1.0, port=port)))
    thread.start()
    wait_for_port(port)
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as stranger:
        stranger.sendall(forge_hello({"id": 1, "of": 3, "who": "\x1b[2J\nx"}, stranger.recv(1000)))
        thread.join(timeout=10)
    assert "1 of 3 processes are missing: 2" in told[0]
    assert told[0].isprintable()


def test_the_address_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        (told,) = together((0, 2), port=other.getsockname()[1])
    assert "process 0 cannot listen at 127.0.0.1:" in told


def test_addresses() -> None:
    assert bind_host("127.0.0.1") == bind_host("localhost") == "127.0.0.1"
    assert bind_host("192.0.2.1") == ""
    for wrong in ("host", "host:", ":80", "host:x"):
        with pytest.raises(ValueError, match="coordinator: expected HOST:PORT, given"):
            wait_for_all(wrong, 2, 0, seconds=1.0)
