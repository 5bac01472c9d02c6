"""A local web page for chatting with a model: serves chat.html and streams answers as they are generated.

    GET  /?key=KEY   the page, and a cookie with the key
    GET  /chat       {"system": TEXT, "samples": N}: the initial settings of the page
    POST /chat       {"system": TEXT, "turns": [[QUESTION, ANSWER], ...], "question": TEXT}, answered by lines of
                     {"row": I, "text": TEXT}, {"note": TEXT}, {"waiting": true}, {"error": TEXT} and, last,
                     {"end": REASON}

The server stores no conversation: the page sends the whole conversation with each request.

Other users of this machine do not know the key, which is generated anew at each start. Another site in the same
browser must not reach the model either: the Host and Origin headers must name this server, and a body must be
declared as JSON, which a form cannot do. waitress reads the requests, with limits on their number, size and time.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from waitress.server import create_server

from plimsoll.framework.files.text_files import parse_json
from plimsoll.launch import cli
from plimsoll.launch.chat_lines import format_omitted_turns
from plimsoll.launch.weights import log

if TYPE_CHECKING:
    from plimsoll.framework.inference.chat import Chat, ChatPrompt, ChatTurn

ADDRESS = "127.0.0.1"
# Far larger than a conversation that fits any context.
MAX_BODY_BYTES = 1 << 18
_MAX_HEADER_BYTES = 1 << 14
# Limits on requests that are being answered or wait for their turn, and on connections.
_THREADS = 16
_CONNECTIONS = 512
# Seconds after which an idle connection is closed.
_CLIENT_SECONDS = 60
# Seconds between writes to a request that waits for its turn; a failed write shows that the client has left.
_WAITING_SECONDS = 1.0

# WSGI's start_response (PEP 3333).
Start = Callable[[str, list[tuple[str, str]]], Any]


class _RequestRefused(Exception):
    """A refused request: its status and the reason."""

    def __init__(self, status: HTTPStatus, reason: str):
        super().__init__(reason)
        self.status = status


class ChatServer:
    """Listens on 127.0.0.1 from the start, and answers once `serve` is called.

    Args:
        port: port to listen on; 0 selects a free port.

    Attributes:
        key: secret that every request must contain.

    Raises:
        UsageError: the port cannot be used.
    """

    def __init__(self, port: int):
        if not 0 <= port < 1 << 16:
            raise cli.UsageError(f"--port={port}: expected 0 to 65535")
        self.page = Path(__file__).with_name("chat.html").read_text("utf-8")
        self.key = secrets.token_urlsafe(16)
        # Held while a conversation is read and while an answer is generated, so that only one of each runs at a time.
        self._reading = threading.Lock()
        self._turn = threading.Lock()
        try:
            listening = socket.create_server((ADDRESS, port))
        except OSError as error:
            raise cli.UsageError(
                f"--port={port}: {error.strerror}; use another port, or --port=0 for a free one"
            ) from None
        self.port: int = listening.getsockname()[1]
        self._server: Any = create_server(
            self._respond,
            sockets=[listening],
            threads=_THREADS,
            connection_limit=_CONNECTIONS,
            channel_timeout=_CLIENT_SECONDS,
            max_request_body_size=MAX_BODY_BYTES,
            max_request_header_size=_MAX_HEADER_BYTES,
            ident=None,
        )

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_all()

    def serve(self, chat: Chat, system: str | None) -> None:
        """Answer requests until the process ends or `close` is called.

        Args:
            chat: the model.
            system: system prompt that the page starts with.
        """
        self._chat = chat
        self._system = system
        log(f"{self.url}   (only reachable from this machine; press Ctrl-C to stop)")
        self._server.run()

    def close(self) -> None:
        """Make `serve` return; called from another thread."""
        self._server.task_dispatcher.shutdown()
        # Close in the thread of the event loop, which polls the sockets.
        self._server.trigger.pull_trigger(self._close_all)

    def _close_all(self) -> None:
        self._server.asyncore.close_all(self._server._map)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.port}/?key={self.key}"

    @cached_property
    def hosts(self) -> set[str]:
        """Valid Host headers: names of this machine that no other site has."""
        names = {ADDRESS, "localhost"}
        hosts = {f"{name}:{self.port}" for name in names}
        # Browsers omit the default port.
        return hosts | names if self.port == 80 else hosts

    @cached_property
    def policy(self) -> str:
        """The Content-Security-Policy: allows the page's own script and style and this server, and nothing else."""
        script_sources = " ".join(_hash_sources("script", self.page))
        style_sources = " ".join(_hash_sources("style", self.page))
        return (
            f"default-src 'none'; script-src {script_sources}; style-src {style_sources}; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    @property
    def _cookie(self) -> str:
        # Browsers send cookies to all ports of a host.
        return f"plimsoll-{self.port}"

    def _respond(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """The WSGI application."""
        try:
            return self._handle_request(environ, start)
        except _RequestRefused as refusal:
            text = json.dumps({"error": str(refusal)})
            return self._send_whole(start, refusal.status, "application/json", text)

    def _handle_request(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        self._check_origin(environ)
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"]
        if method not in ("GET", "POST"):
            raise _RequestRefused(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET or POST")
        if path == "/" and method == "GET":
            self._check_key(parse_qs(environ.get("QUERY_STRING", "")).get("key", []))
            cookie = f"{self._cookie}={self.key}; Path=/; HttpOnly; SameSite=Strict"
            return self._send_whole(start, HTTPStatus.OK, "text/html; charset=utf-8", self.page, ("Set-Cookie", cookie))
        if path != "/chat":
            raise _RequestRefused(HTTPStatus.NOT_FOUND, "not found; the only paths are / and /chat")
        self._check_key(_get_keys(environ, self._cookie))
        if method == "GET":
            initial = {"system": self._system or "", "samples": self._chat.num_samples}
            return self._send_whole(start, HTTPStatus.OK, "application/json", json.dumps(initial))
        if environ.get("CONTENT_TYPE", "").partition(";")[0].strip() != "application/json":
            raise _RequestRefused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected Content-Type: application/json")
        body = environ["wsgi.input"].read()
        try:
            system, turns, question = _parse_conversation(body)
            with self._reading:
                prompt = self._chat.prompt(system, turns, question)
        except ValueError as error:
            raise _RequestRefused(HTTPStatus.BAD_REQUEST, str(error)) from None
        start("200 OK", [("Content-Type", "application/x-ndjson"), ("Cache-Control", "no-store")])
        return self._answer(prompt)

    def _answer(self, prompt: ChatPrompt) -> Iterator[bytes]:
        """Yield the lines of an answer. waitress closes the iterator when the browser disconnects."""
        if prompt.num_dropped_turns:
            yield _line(note=format_omitted_turns(prompt.num_dropped_turns, self._chat.context))
        while not self._turn.acquire(timeout=_WAITING_SECONDS):
            yield _line(waiting=True)
        try:
            answer = self._chat.answer(prompt)
            try:
                for pieces in answer:
                    for row, piece in enumerate(pieces):
                        if piece:
                            yield _line(row=row, text=piece)
            except Exception as error:
                log(f"error: {error}")
                yield _line(error=str(error))
                return
            yield _line(end="max_new_tokens" if answer.at_limit else "stop")
        finally:
            self._turn.release()

    def _check_origin(self, environ: dict[str, Any]) -> None:
        """Refuse requests that do not come from this machine's own page.

        A site whose name is made to point at 127.0.0.1 (DNS rebinding) still sends its own name as the host.
        """
        host = environ.get("HTTP_HOST", "")
        origin = environ.get("HTTP_ORIGIN")
        if host not in self.hosts:
            hosts = " or ".join(sorted(self.hosts))
            raise _RequestRefused(HTTPStatus.MISDIRECTED_REQUEST, f"expected a Host header of {hosts}, given {host!r}")
        if origin is not None and origin.removeprefix("http://") not in self.hosts:
            raise _RequestRefused(HTTPStatus.FORBIDDEN, "requests from other sites are refused")

    def _check_key(self, given: list[str]) -> None:
        if not any(hmac.compare_digest(key.encode(), self.key.encode()) for key in given):
            raise _RequestRefused(
                HTTPStatus.FORBIDDEN, "open the address that `plimsoll chat` printed; it ends with a key"
            )

    def _send_whole(
        self, start: Start, status: HTTPStatus, content_type: str, text: str, *more: tuple[str, str]
    ) -> list[bytes]:
        """Send a response of known length."""
        data = text.encode()
        headers = [
            ("Content-Type", content_type),
            ("Content-Length", str(len(data))),
            ("Content-Security-Policy", self.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
            *more,
        ]
        start(f"{status.value} {status.phrase}", headers)
        return [data]


def _get_keys(environ: dict[str, Any], cookie: str) -> list[str]:
    """Return the keys in a request: from the page's cookie, or from `Authorization: Bearer KEY`."""
    keys = []
    # Other servers of this host may have set cookies that cannot be parsed.
    with contextlib.suppress(CookieError):
        cookies = SimpleCookie(environ.get("HTTP_COOKIE", ""))
        if cookie in cookies:
            keys.append(cookies[cookie].value)
    scheme, _, key = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme.lower() == "bearer":
        keys.append(key)
    return keys


def _line(**fields: Any) -> bytes:
    return f"{json.dumps(fields)}\n".encode()


def _parse_conversation(body: bytes) -> tuple[str | None, list[ChatTurn], str]:
    """Return (system prompt, turns, question) from a request.

    Raises:
        ValueError: the body is not JSON, or does not have the expected form.
    """
    from plimsoll.framework.inference.chat import ChatTurn

    expected = 'expected {"system": TEXT, "turns": [[QUESTION, ANSWER], ...], "question": TEXT}'
    try:
        fields = parse_json(body)
    except ValueError as error:
        raise ValueError(f"{expected}; the body is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.keys() - {"system", "turns", "question"}:
        raise ValueError(expected)
    system = fields.get("system") or None
    question = fields.get("question", "")
    pairs = fields.get("turns", [])
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(expected)
    texts = [system or "", question, *(text for pair in pairs for text in pair)]
    if not all(isinstance(text, str) for text in texts) or not question.strip():
        raise ValueError(expected)
    return system, [ChatTurn(*pair) for pair in pairs], question


def _hash_sources(tag: str, page: str) -> list[str]:
    """Return Content-Security-Policy sources, by hash, for the inline elements with a tag."""
    sources = []
    for content in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL):
        digest = hashlib.sha256(content.encode()).digest()
        sources.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    return sources
