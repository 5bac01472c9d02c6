"""The tokenizer of a published model: a Hugging Face directory's tokenizer.json, special tokens and chat template.

Nothing of the directory is run: templates are rendered in jinja's sandbox, with the settings and functions that
transformers' `apply_chat_template` gives them.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from framework.config import PositiveInt, component
from framework.data.files import digest_of, find
from framework.data.tokenizers import TextBudget, Tokenizer, byte_table, load_library
from framework.files.workdir import write_json

Message = dict[str, Any]  # {"role": ..., "content": ...}, and whatever else a template reads
Span = tuple[int, int]
_OPEN, _CLOSE = "\U0010fffb", "\U0010fffc"  # private use: around what a template says the model generates
_IDS = {"bos_token_id", "eos_token_id"}


@component
class PretrainedTokenizer(Tokenizer):
    """Byte-level BPE (GPT-2, Llama 3, Qwen), or BPE or Unigram as sentencepiece makes them (Llama 2, Mistral, Gemma).

    The workdir keeps a copy (`tokenizer.json`, `tokenizer_config.json`), used where `path` is not at hand any more.

    Args:
        path: the model's directory (local, or an fsspec URL).
        vocab_size: rows of the model's embedding, as its config.json says; the tokenizer may have fewer ids.
        eos_token: the token that ends texts, instead of the directory's.
        chat_template: a file with a jinja template, instead of the directory's.
    """

    def __init__(
        self, *, path: str, vocab_size: PositiveInt, eos_token: str | None = None, chat_template: str | None = None
    ):
        self.path, self.vocab_size = path.rstrip("/"), vocab_size
        self.eos_token, self.template_file = eos_token, chat_template

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Reads the directory, or the copy that the workdir keeps of it.

        Raises:
            FileNotFoundError: there is no tokenizer.json. ValueError: a file is damaged, has ids beyond `vocab_size`,
                or no token ends a text.
        """
        kept = _json(str(workdir), "tokenizer_config.json")
        has_copy = kept.get("name_or_path") == self.path and (workdir / "tokenizer.json").exists()
        try:
            folder = str(workdir) if has_copy and not write else self.path
            (file,) = find(f"{folder}/tokenizer.json")
        except FileNotFoundError as error:
            if not has_copy:
                hint = "a model with another kind of file: save_pretrained() of transformers' AutoTokenizer writes one"
                raise FileNotFoundError(f"{error}; {hint}") from error
            folder, (file,) = str(workdir), find(str(workdir / "tokenizer.json"))
        facts = kept if folder != self.path else self._facts()
        data = file.read()
        self._library, contents = load_library(data, file.name, self.vocab_size)
        self._parsing, _ = load_library(data, file.name, self.vocab_size)
        self._parsing.encode_special_tokens = False
        tokens = {name: facts[name] for name in facts if name.endswith("_token") and facts[name]}
        self.special = {name: x if isinstance(x, str) else x["content"] for name, x in tokens.items()}
        self.bos_id, self.eos_id = self._id("bos", facts), self._id("eos", facts)
        if self.eos_id is None:
            given = self.special.get("eos_token", "none that is known")
            raise ValueError(f"{self.path}: its eos_token is {given!r}, no token of it; set data.tokenizer.eos_token")
        self._stop_ids = sorted({self.eos_id, *_ids(facts, "eos")})
        self.special_tokens = [token["content"] for token in contents["added_tokens"] if token["special"]]
        self.chat_template = facts.get("chat_template")
        self.table = byte_table(self._library.get_vocab(with_added_tokens=True), contents, self.vocab_size)
        self.digest = digest_of([contents, self.bos_id, self.eos_id])
        if write:
            write_json(workdir / "tokenizer.json", contents)
            write_json(workdir / "tokenizer_config.json", facts)

    def _facts(self) -> dict[str, Any]:
        """tokenizer_config.json, completed from the files that older and newer directories have beside it."""
        facts: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json"):
            found = _json(self.path, name)
            facts |= {key: found[key] for key in (found if "token" in name else _IDS & found.keys())}
        if isinstance(templates := facts.get("chat_template"), list):  # several, by name
            facts["chat_template"] = {one["name"]: one["template"] for one in templates}.get("default")
        with contextlib.suppress(*[] if self.template_file else [FileNotFoundError]):
            (file,) = find(self.template_file or f"{self.path}/chat_template.jinja")
            facts["chat_template"] = file.read().decode("utf-8")
        return {**facts, "name_or_path": self.path, **({"eos_token": self.eos_token} if self.eos_token else {})}

    def _id(self, name: str, facts: dict[str, Any]) -> int | None:
        if f"{name}_token" in self.special:
            return self._library.token_to_id(self.special[f"{name}_token"])
        # bos_token null: no text is opened, whatever config.json says
        return None if name == "bos" and "bos_token" in facts else next(iter(_ids(facts, name)), None)

    @property
    def stop_ids(self) -> list[int]:
        """All that the directory's files say."""
        return self._stop_ids

    def encode_prompt(self, text: str) -> list[int]:
        """As transformers encodes it: with what tokenizer.json adds, and special tokens that the text spells."""
        return self._parsing.encode(text).ids

    def encode_rendered(self, texts: Sequence[str]) -> list[Any]:
        """The library's Encodings (ids, offsets) of what a template made: its special tokens are tokens."""
        return self._parsing.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """By the library: special tokens left out, and the space that sentencepiece puts before a text."""
        return self._library.decode([int(token) for token in tokens], skip_special_tokens=True)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[Span]]:
        """(the conversation as text, the spans of it that the template has between {% generation %} tags).

        Raises:
            ValueError: there is no template, or it cannot render these messages.
        """
        if self.chat_template is None:
            raise ValueError(
                f"{self.path} has no chat template: put a chat_template.jinja there, or set "
                "data.tokenizer.chat_template to a file with the template that the model was (or will be) trained with"
            )
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        given = {"tools": None, "documents": None, **self.special, **variables, "messages": plain}
        try:
            text = _compiled(self.chat_template).render(add_generation_prompt=add_generation_prompt, **given)
        except Exception as error:  # a template may raise anything
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


def _ids(facts: dict[str, Any], name: str) -> list[int]:
    ids = facts.get(f"{name}_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _json(folder: str, name: str) -> dict[str, Any]:
    """The object in that file; empty where there is none."""
    try:
        (file,) = find(f"{folder}/{name}")
    except FileNotFoundError:
        return {}
    try:
        return dict(json.loads(file.read()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: not a JSON object: {error}") from error
