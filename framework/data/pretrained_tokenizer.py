"""The tokenizer of a published model: a Hugging Face directory's tokenizer.json, special tokens and chat template.

No code from the directory runs: templates are rendered in jinja's sandbox, with the settings and functions that
transformers' `apply_chat_template` provides.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plimsoll.framework.config import PositiveInt, component
from plimsoll.framework.data.files import DataFile, compute_digest, find
from plimsoll.framework.data.template_process import CLOSE, OPEN, TemplateProcess, compile_template
from plimsoll.framework.data.tokenizers import TextBudget, Tokenizer, byte_table, load_library
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json

if TYPE_CHECKING:
    import tokenizers

# {"role": ..., "content": ...}, and any other fields that a template reads.
Message = dict[str, Any]

# (first character, one past the last character) of a range of text.
Span = tuple[int, int]

# Fields to read from the directory's files that are not about tokens.
_IDS = {"bos_token_id", "eos_token_id"}
# Each template is rendered by one process, which is started once.
_get_process = functools.lru_cache(TemplateProcess)


@component
class PretrainedTokenizer(Tokenizer):
    """Byte-level BPE (GPT-2, Llama 3, Qwen), or sentencepiece-style BPE or Unigram (Llama 2, Mistral, Gemma).

    The workdir stores a copy (`tokenizer.json`, `tokenizer_config.json`), which is used if `path` is no longer
    available.

    Args:
        path: the model's directory (local, or an fsspec URL).
        vocab_size: rows of the model's embedding, as in its config.json; the tokenizer may have fewer ids.
        eos_token: the token that ends texts, instead of the directory's.
        chat_template: a file with a jinja template, instead of the directory's.
    """

    def __init__(
        self, *, path: str, vocab_size: PositiveInt, eos_token: str | None = None, chat_template: str | None = None
    ):
        self.path = path.rstrip("/")
        self.vocab_size = vocab_size
        self.eos_token = eos_token
        self.template_file = chat_template

    def prepare(self, workdir: Path, texts: TextBudget | None, *, write: bool) -> None:
        """Reads the directory, or its copy in the workdir.

        Raises:
            FileNotFoundError: there is no tokenizer.json.
            ValueError: a file is damaged, has ids beyond `vocab_size`, or no token ends a text.
        """
        copied_facts = _json(str(workdir), "tokenizer_config.json")
        # The workdir may hold a copy of another directory, from before `path` was changed.
        is_copy_of_path = copied_facts.get("name_or_path") == self.path
        has_copy = is_copy_of_path and (workdir / "tokenizer.json").exists()
        file, is_copy = self._tokenizer_file(workdir, has_copy, write)
        facts = copied_facts if is_copy else self._facts()
        data = file.read()
        self._library, contents = load_library(data, file.name, self.vocab_size)
        # A second instance of the same tokenizer, for texts in which special tokens are parsed as tokens.
        self._parsing, _ = load_library(data, file.name, self.vocab_size)
        self._parsing.encode_special_tokens = False
        # The special tokens, by field: {"eos_token": "</s>"}.
        self.special: dict[str, str] = {}
        for name, token in facts.items():
            if name.endswith("_token") and token:
                # Older files describe a token as an object.
                text = token.get("content") if isinstance(token, dict) else token
                if not isinstance(text, str):
                    raise ValueError(f"tokenizer_config.json: {name} is {token!r:.80}, expected a token")
                self.special[name] = text
        self.bos_id = self._id("bos", facts)
        self.eos_id = self._id("eos", facts)
        if self.eos_id is None:
            eos_token = self.special.get("eos_token", "unknown")
            raise ValueError(
                f"{self.path}: its eos_token is {eos_token!r}, which is not one of its tokens; set "
                "data.tokenizer.eos_token"
            )
        self._stop_ids = sorted({self.eos_id, *_ids(facts, "eos")})
        added_tokens = contents["added_tokens"]
        self.special_tokens = [token["content"] for token in added_tokens if token["special"]]
        self.chat_template = facts.get("chat_template")
        vocab = self._library.get_vocab(with_added_tokens=True)
        self.table = byte_table(vocab, contents, self.vocab_size)
        self.digest = compute_digest([contents, self.bos_id, self.eos_id])
        if write:
            write_json(workdir / "tokenizer.json", contents)
            write_json(workdir / "tokenizer_config.json", facts)

    def _tokenizer_file(self, workdir: Path, has_copy: bool, write: bool) -> tuple[DataFile, bool]:
        """Returns (tokenizer.json, True if it is the workdir's copy)."""
        # A process that does not write reads the copy that the primary one has just made: not every host needs access
        # to `path`.
        folder = str(workdir) if has_copy and not write else self.path
        try:
            (file,) = find(f"{folder}/tokenizer.json")
        except FileNotFoundError as error:
            if not has_copy:
                hint = (
                    "if the model has another kind of file, save_pretrained() of transformers' AutoTokenizer writes one"
                )
                raise FileNotFoundError(f"{error}; {hint}") from error
            folder = str(workdir)
            (file,) = find(str(workdir / "tokenizer.json"))
        return file, folder != self.path

    def _facts(self) -> dict[str, Any]:
        """Returns tokenizer_config.json, merged with the other files that older and newer directories contain."""
        facts: dict[str, Any] = {}
        # Later files are more specific, and take precedence.
        names = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
        for name in names:
            fields = _json(self.path, name)
            # The first two files are about the model, so only their ids are used.
            keys = fields if "token" in name else _IDS & fields.keys()
            facts |= {key: fields[key] for key in keys}
        templates = facts.get("chat_template")
        # A directory may have several named templates.
        if isinstance(templates, list):
            template_by_name = {entry["name"]: entry["template"] for entry in templates}
            facts["chat_template"] = template_by_name.get("default")
        # A directory may have no template, but a configured file must exist.
        optional_errors = [] if self.template_file else [FileNotFoundError]
        with contextlib.suppress(*optional_errors):
            (file,) = find(self.template_file or f"{self.path}/chat_template.jinja")
            facts["chat_template"] = file.read().decode("utf-8")
        facts["name_or_path"] = self.path
        if self.eos_token:
            facts["eos_token"] = self.eos_token
        return facts

    def _id(self, name: str, facts: dict[str, Any]) -> int | None:
        """Returns the id of the token "bos" or "eos", if there is one."""
        token = f"{name}_token"
        if token in self.special:
            return self._library.token_to_id(self.special[token])
        # If bos_token is null, texts get no opening token, regardless of config.json.
        if name == "bos" and "bos_token" in facts:
            return None
        return next(iter(_ids(facts, name)), None)

    @property
    def stop_ids(self) -> list[int]:
        """All ids that end a text, according to the directory's files."""
        return self._stop_ids

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a text as transformers encodes it.

        They include the tokens that tokenizer.json adds, and special tokens that are spelled out in the text.
        """
        return self._parsing.encode(text).ids

    def encode_rendered(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Returns the library's Encodings (ids, offsets) of rendered templates, in which special tokens are parsed."""
        # A template writes the opening token itself.
        return self._parsing.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Returns the text without special tokens, and without the space that sentencepiece inserts before a text."""
        return self._library.decode([int(token) for token in tokens], skip_special_tokens=True)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: object
    ) -> tuple[str, list[Span]]:
        """Renders a conversation with the chat template.

        Args:
            messages: the conversation.
            add_generation_prompt: True to end the text with the prompt for an answer of the model.
            variables: further variables of the template.

        Returns:
            (the text, the spans of it between the template's {% generation %} tags).

        Raises:
            ValueError: there is no template, or it cannot render these messages.
        """
        if self.chat_template is None:
            raise ValueError(
                f"{self.path} has no chat template: put a chat_template.jinja there, or set "
                "data.tokenizer.chat_template to a file with the template that the model was "
                "(or will be) trained with"
            )
        # Parquet fills absent fields with None, but templates test whether a field is defined at all.
        present_messages = []
        for message in messages:
            fields = {key: value for key, value in message.items() if value is not None}
            present_messages.append(fields)
        context = {
            "tools": None,
            "documents": None,
            **self.special,
            **variables,
            "messages": present_messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if self.template_file:
                # This is the user's own file, so it needs no process limits, unlike a template from a downloaded
                # directory.
                marked_text = compile_template(self.chat_template).render(context)
            else:
                marked_text = _get_process(self.chat_template).render(context)
        # A template may raise anything.
        except Exception as error:
            raise ValueError(f"the chat template fails: {error}") from error
        text = ""
        spans = []
        # Marks come in pairs, so every second part of the text is one that the model generates.
        for number, part in enumerate(re.split(f"[{OPEN}{CLOSE}]", marked_text)):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return text, spans


def _ids(facts: dict[str, Any], name: str) -> list[int]:
    """Returns the ids of the token "bos" or "eos" from its `_token_id` field, which holds one id or several."""
    ids = facts.get(f"{name}_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(number) is int for number in listed):
        raise ValueError(f"{name}_token_id is {ids!r:.80}; expected a number, or a list of them")
    return listed


def _json(folder: str, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file; empty if there is no such file."""
    try:
        (file,) = find(f"{folder}/{name}")
    except FileNotFoundError:
        return {}
    try:
        facts = parse_json(file.read())
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON object: {error}") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{file}: not a JSON object")
    return facts
