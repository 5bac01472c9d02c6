"""Chat templates: jinja text that writes a conversation as a model was trained to see it.

Rendered in jinja's sandbox, and with the same settings and functions, as transformers' `apply_chat_template` does it.
May import: jinja2 lazily.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]  # {"role": ..., "content": ...}, and whatever else a template reads
Span = tuple[int, int]
_OPEN, _CLOSE = "\U0010fffb", "\U0010fffc"  # private use: around what a template says the model generates


def render(template: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
    """(the conversation as text, the spans of it that the template has between {% generation %} tags).

    Raises:
        ValueError: the template is none, or refuses these messages.
    """
    import jinja2

    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        text = _compiled(template).render(**{"tools": None, "documents": None, **variables, "messages": plain})
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"the chat template fails: {error}") from error
    out, spans = "", []
    for number, piece in enumerate(re.split(f"[{_OPEN}{_CLOSE}]", text)):
        if number % 2:
            spans.append((len(out), len(out) + len(piece)))
        out += piece
    return out, spans


@functools.lru_cache
def _compiled(template: str) -> Any:
    import jinja2
    import jinja2.nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own escapes HTML

    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [Generation, loopcontrols]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
