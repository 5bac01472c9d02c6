"""Conversations for supervised fine-tuning: rendered with the model's own chat template, loss on the answers only.

A token file of them holds 2 * id + 1 for a target and 2 * id for other tokens. Where a template has no {% generation %}
tags, answers are found by rendering up to each one, with its generation prompt, and after it; where a template writes
earlier turns in another way, by what changes with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from framework.config import Fraction, component
from framework.data.files import DataFile, digest_of
from framework.data.pretrained_tokenizer import Message, PretrainedTokenizer, Span
from framework.data.sources import TextSource, json_rows, parquet_rows, split_of
from framework.data.tokenizers import Tokenizer

_MARK = "\U0010fffd"  # private use: breaks a special token that a message spells, and stands in for an answer
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}


@component
class ChatSource(TextSource):
    """Conversations from JSON lines or Parquet files; loss on what the assistant says, its end-of-turn token included.

    A row has "messages" ({"role", "content"}), ShareGPT's "conversations" ({"from", "value"}), "prompt" and
    "completion", or "instruction", "input" and "output"; "system" and "tools" beside them are read too. It needs a
    PretrainedTokenizer.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; Parquet where a name ends in .parquet.
        split: "all", or one of two disjoint parts; the sha256 of a conversation decides to which it belongs.
        validation_fraction: about so much of all conversations is "validation".
        template_variables: what the template may ask for, such as {"enable_thinking": false}.
    """

    def __init__(
        self,
        *,
        paths: list[str],
        split: Literal["all", "train", "validation"] = "all",
        validation_fraction: Fraction = 0.05,
        template_variables: dict[str, Any] = {},  # noqa: B006
    ):
        self.paths, self.split, self.validation_fraction = paths, split, validation_fraction
        self.template_variables = template_variables

    def read(self, file: DataFile) -> Iterator[str]:
        """JSON: [place, messages, tools] of each row."""
        for place, row in parquet_rows(file) if file.path.endswith(".parquet") else json_rows(file):
            try:
                content = json.dumps([conversation(row), row.get("tools")], ensure_ascii=False)
                part = split_of(content, self.validation_fraction)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, {place}: {error}") from error
            if self.split in ("all", part):
                yield f"[{json.dumps(f'{file}, {place}')}, {content[1:]}"

    def codec(self, tokenizer: Tokenizer) -> Tokenizer:
        assert isinstance(tokenizer, PretrainedTokenizer)  # the pipeline sees to it
        return _Codec(tokenizer, self.template_variables)


def conversation(row: Any) -> list[Message]:
    """The messages of a row, in any of the formats. A ValueError says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, given {type(row).__name__}")
    messages = row.get("messages") or row.get("conversations")
    if messages is None and {"prompt", "completion"} <= row.keys():
        turns = zip(("user", "assistant"), (row["prompt"], row["completion"]), strict=True)
        messages = [m for role, x in turns for m in (x if isinstance(x, list) else [{"role": role, "content": x}])]
    if messages is None and {"instruction", "output"} <= row.keys():
        asked = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    if not isinstance(messages, list) or not messages:
        known = "messages, conversations, prompt and completion, or instruction and output"
        raise ValueError(f"expected a row with {known}, given one with {', '.join(row) or 'nothing'}")
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*system, *(_message(number, message) for number, message in enumerate(messages))]


def _message(number: int, message: Any) -> Message:
    if isinstance(message, dict) and "from" in message:
        message = {"role": _ROLES.get(message["from"], message["from"]), "content": message.get("value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'message {number}: expected {{"role": ..., "content": ...}}, given {str(message)[:80]}')
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
        raise ValueError(f"message {number}: content is {type(message.get('content')).__name__}, expected text")
    return message


def _common(a: str, b: str) -> int:
    """How many letters two texts begin with together."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Codec(Tokenizer):
    """Conversations as the ids of a token file."""

    def __init__(self, tokenizer: PretrainedTokenizer, variables: dict[str, Any]):
        self.tokenizer, self.variables = tokenizer, variables
        self.vocab_size, self.eos_id = 2 * tokenizer.vocab_size + 1, 2 * tokenizer.vocab_size
        self.digest = digest_of([2, tokenizer.digest, tokenizer.chat_template, variables])
        one_of = (
            "|".join(re.escape(token) for token in sorted(tokenizer.special_tokens, key=len, reverse=True)) or "(?!)"
        )
        self._special, self._turn_end = re.compile(one_of), re.compile(rf"\s*(?:{one_of})")
        self._behind = re.compile(rf"(?:{one_of})(\s+)\Z")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each id twice, plus one where it is a target. A ValueError names file and row."""
        rendered = [self._rendered(*json.loads(text)) for text in texts]
        encodings = self.tokenizer.encode_rendered([text for text, _ in rendered])
        out = []
        for (text, spans), encoding in zip(rendered, encodings, strict=True):
            ids, offsets = np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)
            targets = np.zeros(len(ids), np.int64)
            for start, end in spans:
                targets |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
            own = [text[start:end] != _MARK for start, end in offsets] if _MARK in text else slice(None)
            out.append((2 * ids + targets)[own])
        return out

    def _rendered(self, place: str, messages: list[Message], tools: Any) -> tuple[str, list[Span]]:
        messages, variables = self._broken(messages), {**self.variables, "tools": tools}
        try:
            text, spans = self.tokenizer.render(messages, **variables)
            if not _GENERATION.search(self.tokenizer.chat_template or ""):
                spans = [
                    self._answer(text, messages, turn, variables)
                    for turn, message in enumerate(messages)
                    if message["role"] == "assistant"
                ]
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        return text, spans

    def _answer(self, text: str, messages: list[Message], turn: int, variables: dict[str, Any]) -> Span:
        """Where the answer at `turn` stands in the conversation's text, the token that ends it included."""
        before, through = messages[:turn], messages[: turn + 1]
        prompt, _ = self.tokenizer.render(before, add_generation_prompt=True, **variables)
        after, _ = self.tokenizer.render(through, **variables)
        if text.startswith(prompt) and text.startswith(after):
            behind = self._behind.search(after)
            return len(prompt), behind.start(1) if behind else len(after)
        # A template that writes an answer in another way once it is not the last one, or not behind the last question
        # (Qwen 3's writes no thoughts then): neither text is the beginning of the whole. What depends on the message
        # is the answer, from the generation prompt before it to the token behind it.
        content_start, content_end = self._changing(text, messages, turn, variables)
        start = len(prompt)
        if not text.startswith(prompt):
            plain, _ = self.tokenizer.render(before, **variables)
            opening = prompt[_common(plain, prompt) :]
            earliest = self._changing(text, messages, turn - 1, variables)[1] if turn else 0
            start = self._behind_opening(text, opening, earliest, content_start)
        if text.startswith(after):
            behind = self._behind.search(after)
            return start, behind.start(1) if behind else len(after)
        # A token ends the answer if it does so where the answer is the last one, too: it may open the next turn.
        last_end = self._changing(after, through, turn, variables)[1]
        following = text[content_end : content_end + _common(text[content_end:], after[last_end:])]
        ending = self._turn_end.match(following)
        return start, content_end + (ending.end() if ending else 0)

    def _changing(self, text: str, messages: list[Message], turn: int, variables: dict[str, Any]) -> Span:
        """What changes in the text with what the message at `turn` says."""
        message = {"role": messages[turn]["role"], "content": _MARK}
        changed, _ = self.tokenizer.render([*messages[:turn], message, *messages[turn + 1 :]], **variables)
        start = _common(changed, text)
        return start, len(text) - _common(changed[start:][::-1], text[start:][::-1])

    def _behind_opening(self, text: str, opening: str, earliest: int, content_start: int) -> int:
        """The end of the generation prompt `opening` between the message before, which ends at `earliest`, and what an
        answer says; it may be followed by more, or be written without its end (an empty thought)."""
        for length in range(len(opening), 0, -1):
            is_known = length == len(opening) or self._special.search(opening[:length])
            place = text.rfind(opening[:length], earliest, content_start) if is_known else -1
            if place >= 0:
                return place + length
        return content_start

    def _broken(self, value: Any) -> Any:
        """The same with a mark inside each special token that it spells: only the template's are tokens."""
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0][0] + _MARK + found[0][1:], value)
        if isinstance(value, dict):
            return {key: self._broken(item) for key, item in value.items()}
        return [self._broken(item) for item in value] if isinstance(value, list) else value
