"""framework.processes.rendezvous, in threads: through `plimsoll train` it is in tests/faults/test_processes.py."""

import socket
import threading
import time

import pytest

from framework.processes.rendezvous import ProcessesMissingError, bind_host, meet
from tests.support.runs import free_port


def together(*who: tuple[int, int], seconds: float = 5.0, port: int | None = None) -> list[str]:
    """Processes (id, of) meet at one address; what each was told, "" if it goes on."""
    address, told = f"127.0.0.1:{port or free_port()}", [""] * len(who)

    def one(number: int, index: int, of: int) -> None:
        try:
            meet(address, of, index, seconds=seconds)
        except ProcessesMissingError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=one, args=(number, *card)) for number, card in enumerate(who)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return told


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_are_there(order: tuple[int, ...]) -> None:
    assert together(*((i, 3) for i in order)) == ["", "", ""]


def test_the_missing_are_named_to_all() -> None:
    began = time.monotonic()
    told = together((0, 4), (2, 4), seconds=1.0)
    assert 0.9 < time.monotonic() - began < 3.0
    assert "2 of 4 processes are missing: 1, 3; there are 0 (process " in told[0]
    assert told[0] == told[1]


def test_many_missing_are_a_short_line() -> None:
    (told,) = together((0, 1000), seconds=0.2)
    assert "999 of 1000 processes are missing: 1, 2, 3" in told
    assert len(told) < 250


def test_nobody_answers() -> None:
    (told,) = together((1, 2), seconds=0.5)
    assert "process 1 has waited for 0.5 s: nobody answers at 127.0.0.1:" in told
    assert "Connection refused" in told


def test_twice_the_same_and_another_count() -> None:
    told = together((0, 3), (1, 3), (1, 3))
    assert len(set(told)) == 1
    assert "two processes say that they are process 1" in told[0]
    told = together((0, 2), (1, 3))
    assert told[0] == told[1]
    assert "counts 3 processes, and process 0 2" in told[0]


def test_one_that_was_started_again_takes_its_own_place() -> None:
    port = free_port()
    told: list[str] = []
    server = threading.Thread(target=lambda: told.extend(together((0, 3), port=port)))
    server.start()
    time.sleep(0.3)
    with socket.create_connection(("127.0.0.1", port)) as first:  # it says who it is, and dies
        first.sendall(b'{"id": 1, "of": 3, "who": "the first"}\n')
        time.sleep(0.2)
    assert together((1, 3), (2, 3), port=port) == ["", ""]
    server.join(timeout=10)
    assert told == [""]


def test_strangers_are_sent_away() -> None:
    port = free_port()
    told: list[str] = []
    server = threading.Thread(target=lambda: told.extend(together((0, 2), port=port)))
    server.start()
    time.sleep(0.3)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"id": "x", "of": 2, "who": "y"}\n', b'{"problem": ""}\n', b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    assert together((1, 2), port=port) == [""]
    server.join(timeout=10)
    assert told == [""]


def test_the_address_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        (told,) = together((0, 2), port=other.getsockname()[1])
    assert "process 0 cannot listen at 127.0.0.1:" in told


def test_addresses() -> None:
    assert bind_host("127.0.0.1") == bind_host("localhost") == "127.0.0.1"
    assert bind_host("192.0.2.1") == ""
    for wrong in ("host", "host:", ":80", "host:x"):
        with pytest.raises(ValueError, match="coordinator: expected HOST:PORT, given"):
            meet(wrong, 2, 0, seconds=1.0)
