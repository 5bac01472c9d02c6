"""A page to talk with a model, for browsers on this machine: chat.html, with answers in the moment they are made.

The server keeps no conversation: the page sends all of it (chat_requests.py says how).
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import cli
from launch.chat_requests import ChatServer, Handler
from launch.weights import tell

if TYPE_CHECKING:
    from framework.inference.chat import Chat

ADDRESS = "127.0.0.1"


class Server(ChatServer):
    """Listens on 127.0.0.1 from the start, and answers once `serve` is called.

    Args:
        port: 0 takes a free one.

    Raises:
        UsageError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, port: int):
        self.page = Path(__file__).with_name("chat.html").read_text("utf-8")
        # Held while an answer is made: there is one at a time.
        self.turn = threading.Lock()
        if not 0 <= port < 1 << 16:
            raise cli.UsageError(f"--port={port}: expected 0 to 65535")
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise cli.UsageError(f"--port={port}: {error.strerror}; --port=0 takes a free one") from None

    def serve(self, chat: Chat, system: str | None) -> None:
        """Answers requests until the process ends, or `shutdown` is called."""
        self.chat = chat
        self.system = system
        tell(f"http://{ADDRESS}:{self.server_port}/   (for this machine only; Ctrl-C ends)")
        self.serve_forever()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Shows what went wrong in a handler, unless it is only that the browser has left."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @cached_property
    def hosts(self) -> set[str]:
        """What a Host header may say: names of this machine, which no other site has."""
        names = {ADDRESS, "localhost"}
        hosts = {f"{name}:{self.server_port}" for name in names}
        # Browsers leave out the usual port.
        return hosts | names if self.server_port == 80 else hosts

    @cached_property
    def policy(self) -> str:
        """The Content-Security-Policy: the page's own script and style, this server, and nothing else."""
        script_sources = " ".join(_sources("script", self.page))
        style_sources = " ".join(_sources("style", self.page))
        return (
            f"default-src 'none'; script-src {script_sources}; style-src {style_sources}; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


def _sources(tag: str, page: str) -> list[str]:
    """The inline elements of a kind as sources of a Content-Security-Policy, by their hashes."""
    sources = []
    for content in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL):
        digest = hashlib.sha256(content.encode()).digest()
        sources.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    return sources
