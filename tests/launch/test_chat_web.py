"""The page of `plimsoll chat` and its server, with a scripted model, through urllib and in a real browser."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.launch.chat_web import MAX_BODY_BYTES, ChatServer
from plimsoll.launch.cli import UsageError
from tests.support import chats

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "quic background-networking component-update sync gpu dev-shm-usage"
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", "--enable-logging=stderr", "--remote-debugging-port=0"]
FLAGS += [f"--disable-{part}" for part in QUIET.split()]
JSON = {"Content-Type": "application/json"}

# Types, stops and starts over as a user would; the last question sends what the page showed to the script.
PROBE = """<script>
const until = async test => { while (!test()) await new Promise(done => setTimeout(done, 10)) };
const type = text => { question.value = text; part("form").requestSubmit() };
const boxes = () => [...talk.children].map(box => [box.className, box.textContent]);
const tell = seen => type("SEEN " + JSON.stringify(seen));
onerror = message => tell({error: message});
(async () => {
  await until(() => part("system").value && samples === 2);
  type("<b>hi</b>");
  await until(() => turns.length === 1);
  talk.children[2].click();
  type("long");
  await until(() => boxes()[5]?.[1].length > 30);
  send.click();
  await until(() => turns.length === 2);
  const seen = {boxes: boxes(), turns, html: talk.querySelector("b"), scripts: document.scripts.length};
  part("fresh").click();
  seen.fresh = [talk.children.length, turns.length];
  seen.requests = performance.getEntriesByType("resource").map(entry => new URL(entry.name).pathname);
  tell(seen);
})();
</script></body>"""


@pytest.fixture
def script() -> chats.Script:
    return chats.Script(lambda index: time.sleep(0.0005))


@pytest.fixture
def server(script: chats.Script) -> Iterator[ChatServer]:
    with ChatServer(0) as made:
        thread = threading.Thread(target=made.serve, args=(chats.chat(script, num_samples=2), "be kind"))
        thread.start()
        yield made
        made.close()
        thread.join()


def ask(server: ChatServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    named = {
        "Authorization": f"Bearer {server.key}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    connection.request(method, path, body, named)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, data


def question(text: str, **fields: Any) -> str:
    return json.dumps({"question": text, **fields})


def test_answers_are_streamed(server: ChatServer, script: chats.Script) -> None:
    status, data = ask(server, "POST", "/chat", question("a", turns=[["b", "c"]], system="s"), **JSON)
    assert status == 200
    events = [json.loads(line) for line in data.splitlines()]
    assert events[-1] == {"end": "stop"}
    texts = ["".join(event["text"] for event in events[:-1] if event["row"] == row) for row in (0, 1)]
    assert texts == ["I heard a (0)\n", "I heard a (1)\n"]
    assert script.prompts == ["s\n\nUser: b\nAssistant: c\nUser: a\nAssistant:"]
    assert ask(server, "GET", "/chat") == (200, b'{"system": "be kind", "samples": 2}')


def test_answers_are_serialized_and_stop_on_disconnect(server: ChatServer, script: chats.Script) -> None:
    known = {**JSON, "Authorization": f"Bearer {server.key}"}
    leaving = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    leaving.request("POST", "/chat", question("long"), known)
    response = leaving.getresponse()
    assert b"text" in response.readline()
    waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    waiting.request("POST", "/chat", question("second"), known)
    second = waiting.getresponse()
    assert json.loads(second.readline()) == {"waiting": True}
    assert len(script.prompts) == 1
    response.close()
    leaving.close()
    assert second.read().splitlines()[-1] == b'{"end": "stop"}'
    assert script.given < 10_000
    waiting.close()


@pytest.mark.parametrize(
    ("expected", "reason", "method", "path", "body", "headers"),
    [
        (421, "127.0.0.1", "GET", "/", None, {"Host": "evil.example"}),
        (421, "127.0.0.1", "POST", "/chat", question("a"), {**JSON, "Host": "evil.example:80"}),
        (403, "other sites", "POST", "/chat", question("a"), {**JSON, "Origin": "http://evil.example"}),
        (403, "other sites", "POST", "/chat", question("a"), {**JSON, "Origin": "null"}),
        (415, "application/json", "POST", "/chat", question("a"), {"Content-Type": "text/plain"}),
        (400, "Content-Length", "POST", "/chat", question("a"), {**JSON, "Content-Length": "-1"}),
        (413, "exceeds", "POST", "/chat", None, {**JSON, "Content-Length": f"{MAX_BODY_BYTES + 1}"}),
        (403, "key", "POST", "/chat", question("a"), {**JSON, "Authorization": "Bearer x"}),
        (403, "key", "POST", "/chat", question("a"), {**JSON, "Authorization": "", "Cookie": "plimsoll=x"}),
        (403, "key", "GET", "/chat", None, {"Authorization": "Basic eA=="}),
        (403, "key", "GET", "/", None, {}),
        (403, "key", "GET", "/?key=", None, {}),
        (403, "key", "GET", "/?key=%ff", None, {}),
        (404, "only paths are /", "GET", "/../chat.py", None, {}),
        (404, "/chat", "POST", "/", question("a"), JSON),
        (405, "GET or POST", "PUT", "/chat", question("a"), JSON),
        (400, "not JSON", "POST", "/chat", "{", JSON),
        (400, "not JSON", "POST", "/chat", "[" * 100_000, JSON),
        (400, "expected", "POST", "/chat", "[]", JSON),
        (400, "expected", "POST", "/chat", question(" "), JSON),
        (400, "expected", "POST", "/chat", question("a", turns=[["b"]]), JSON),
        (400, "expected", "POST", "/chat", question("a", turns=[["b", 1]]), JSON),
        (400, "expected", "POST", "/chat", question("a", system=[1]), JSON),
        (400, "Unicode", "POST", "/chat", question("\ud800"), JSON),
        (400, "has room for", "POST", "/chat", question("z" * 20_000), JSON),
    ],
)
def test_invalid_requests_are_refused(server, script, expected, reason, method, path, body, headers) -> None:
    status, data = ask(server, method, path, body, **headers)
    assert status == expected
    assert reason in data.decode()
    assert not script.prompts


def test_listens_on_localhost_only(server: ChatServer) -> None:
    assert server._server.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(UsageError, match=f"--port={server.port}: Address already in use"):
        ChatServer(server.port)
    _, page = ask(server, "GET", f"/?key={server.key}", Host=f"localhost:{server.port}")
    assert b"http" not in page.replace(b"http-equiv", b"")
    assert "unsafe" not in server.policy


def test_the_page_brings_a_cookie_that_opens_the_chat(server: ChatServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", f"/?key={server.key}")
    response = connection.getresponse()
    assert b"<html" in response.read()
    cookie = response.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    connection.request("GET", "/chat", headers={"Cookie": f"other=1; {cookie.partition(';')[0]}"})
    assert connection.getresponse().status == 200
    connection.close()


def test_get_request_body_is_not_a_second_request(server: ChatServer, script: chats.Script) -> None:
    hidden = (
        f"POST /chat HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(question('x'))}\r\n\r\n{question('x')}"
    )
    assert ask(server, "GET", "/chat", hidden)[0] == 200
    time.sleep(0.3)
    assert not script.prompts


def test_silent_connections_block_nothing(server: ChatServer) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for number in range(200):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            silent.sendall(b"POST /chat HTTP/1.1\r\n"[: number % 20])
        assert ask(server, "POST", "/chat", question("a"), **JSON)[0] == 200
        assert threading.active_count() <= threads


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_in_a_browser(server: ChatServer, script: chats.Script, tmp_path: Path) -> None:
    server.page = server.page.replace("</body>", PROBE)
    said = tmp_path / "said.txt"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", server.url]
    with said.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as browser:
        try:
            end = time.monotonic() + 60
            while not any("SEEN " in prompt for prompt in script.prompts):
                assert time.monotonic() < end, said.read_text()
                time.sleep(0.05)
        finally:
            browser.terminate()
    told = next(prompt for prompt in script.prompts if "SEEN " in prompt)
    seen = json.loads(told.partition("SEEN ")[2].removesuffix("\nAssistant:"))
    assert "error" not in seen, seen
    assert seen["boxes"][:4] == [
        ["question", "<b>hi</b>"],
        ["answer sample", "I heard <b>hi</b> (0)\n"],
        ["answer sample kept", "I heard <b>hi</b> (1)\n"],
        ["question", "long"],
    ]
    assert seen["boxes"][-1] == ["note", "(stopped)"]
    assert seen["turns"][0] == ["<b>hi</b>", "I heard <b>hi</b> (1)"]
    assert seen["turns"][1][1].startswith("many words many words")
    assert seen["html"] is None
    assert seen["fresh"] == [0, 0]
    assert set(seen["requests"]) == {"/chat"}
    assert script.prompts[1].startswith("be kind\n\nUser: <b>hi</b>\nAssistant: I heard <b>hi</b> (1)\nUser: long")
    assert "CONSOLE" not in said.read_text()
