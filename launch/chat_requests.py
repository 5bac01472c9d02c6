"""The requests of the page: the page itself, and answers as lines of JSON while they are made.

    GET  /       the page
    GET  /chat   {"system": TEXT, "samples": N}: what the page begins with
    POST /chat   {"system": TEXT, "turns": [[QUESTION, ANSWER], ...], "question": TEXT}, answered by lines of
                 {"row": I, "text": TEXT}, {"note": TEXT}, {"waiting": true}, {"error": TEXT} and, last, {"end": REASON}

Another site in the same browser must not reach the model: the Host and Origin headers have to name this server, and a
body has to be declared as JSON, which a form cannot do.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from framework.files.texts import parse_json
from launch.chat_lines import left_out
from launch.weights import tell

if TYPE_CHECKING:
    from framework.inference.chat import Chat, Prompt, Turn

MAX_BODY_BYTES = 1 << 20
# A client that neither sends nor reads for so long is gone.
_CLIENT_SECONDS = 60
# How often one that waits for its turn is written to, which is how it shows that it has left.
_WAITING_SECONDS = 1.0


class _Refused(Exception):
    """A request that is not answered: its status and the reason."""

    def __init__(self, status: HTTPStatus, reason: str):
        super().__init__(reason)
        self.status = status


class ChatServer(ThreadingHTTPServer):
    """What a handler asks of its server.

    Attributes:
        page: the HTML page.
        policy: the Content-Security-Policy of the page.
        hosts: what a Host header may say.
        turn: held while an answer is made.
        chat: the model.
        system: the system prompt that the page begins with.
    """

    page: str
    policy: str
    hosts: set[str]
    turn: threading.Lock
    chat: Chat
    system: str | None


class Handler(BaseHTTPRequestHandler):
    """One connection of a browser, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    server_version = "plimsoll"
    sys_version = ""
    timeout = _CLIENT_SECONDS
    server: ChatServer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: answers are shown on the page."""

    def do_GET(self) -> None:
        """The page, and what it begins with."""
        with self._refusals():
            self._check_origin()
            if self.path == "/":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
            elif self.path == "/chat":
                beginning = {"system": self.server.system or "", "samples": self.server.chat.num_samples}
                self._send(HTTPStatus.OK, "application/json", json.dumps(beginning))
            else:
                raise _Refused(HTTPStatus.NOT_FOUND, "there is only / and /chat")

    def do_POST(self) -> None:
        """An answer, as it is made."""
        with self._refusals():
            self._check_origin()
            if self.path != "/chat":
                raise _Refused(HTTPStatus.NOT_FOUND, "there is only /chat")
            body = self._body()
            try:
                system, turns, question = _conversation(body)
                prompt = self.server.chat.prompt(system, turns, question)
            except ValueError as error:
                raise _Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/x-ndjson")
            self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if prompt.turns_left_out:
                self._event(note=left_out(prompt.turns_left_out, self.server.chat.context))
            with self._turn():
                self._answer(prompt)
            self._chunk(b"")

    def _answer(self, prompt: Prompt) -> None:
        """Sends the text of an answer, and how it ended."""
        answer = self.server.chat.answer(prompt)
        try:
            for pieces in answer:
                for row, piece in enumerate(pieces):
                    if piece:
                        self._event(row=row, text=piece)
        except OSError:
            # The browser has left.
            raise
        except Exception as error:
            tell(f"error: {error}")
            self._event(error=str(error))
            return
        self._event(end="max_new_tokens" if answer.at_limit else "stop")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits until no other answer is being made; writing to a client that has left meanwhile is an OSError."""
        turn = self.server.turn
        while not turn.acquire(timeout=_WAITING_SECONDS):
            self._event(waiting=True)
        try:
            yield
        finally:
            turn.release()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Answers a request that is refused, and lets go of a browser that has left."""
        try:
            yield
        except _Refused as refusal:
            # The rest of the request is not read, so the connection cannot go on.
            self.close_connection = True
            with contextlib.suppress(OSError):
                self._send(refusal.status, "application/json", json.dumps({"error": str(refusal)}))
        except OSError:
            self.close_connection = True

    def _check_origin(self) -> None:
        """Refuses what does not come from this machine's own page.

        A site whose name is made to point at 127.0.0.1 (DNS rebinding) still sends its own name as the host.
        """
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        if host not in self.server.hosts:
            hosts = " or ".join(sorted(self.server.hosts))
            raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, f"expected a Host header of {hosts}, given {host!r}")
        if origin is not None and origin.removeprefix("http://") not in self.server.hosts:
            raise _Refused(HTTPStatus.FORBIDDEN, "requests of other sites are refused")

    def _body(self) -> bytes:
        """The request's body, once its headers are right."""
        if self.headers.get_content_type() != "application/json":
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,12}", length):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        """Sends a whole response."""
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _event(self, **fields: Any) -> None:
        """Sends a line of JSON at once."""
        self._chunk(f"{json.dumps(fields)}\n".encode())

    def _chunk(self, data: bytes) -> None:
        """Sends a chunk of a response whose length is not known; an empty one ends it."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def _conversation(body: bytes) -> tuple[str | None, list[Turn], str]:
    """Returns (system prompt, turns, question) from a request.

    Raises:
        ValueError: it is no JSON, or not of that form.
    """
    from framework.inference.chat import Turn

    expected = 'expected {"system": TEXT, "turns": [[QUESTION, ANSWER], ...], "question": TEXT}'
    try:
        fields = parse_json(body)
    # Arrays that are nested too deeply are a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{expected}, given no JSON: {error}") from None
    if not isinstance(fields, dict) or fields.keys() - {"system", "turns", "question"}:
        raise ValueError(expected)
    system = fields.get("system") or None
    question = fields.get("question", "")
    pairs = fields.get("turns", [])
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(expected)
    turns = [Turn(*pair) for pair in pairs]
    texts = [system or "", question, *(text for turn in turns for text in turn)]
    if not all(isinstance(text, str) for text in texts) or not question.strip():
        raise ValueError(expected)
    return system, turns, question
