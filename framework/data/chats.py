"""Conversations for supervised fine-tuning: rendered with the model's own chat template, loss on the answers only.

A token file of conversations holds 2 * id + 1 for a target token and 2 * id for any other token. If a template has no
{% generation %} tags, an answer is located by rendering the conversation up to it, with its generation prompt, and
after it. If a template renders earlier turns differently, the answer is the part of the text that changes with the
message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from plimsoll.framework.config import Fraction, component
from plimsoll.framework.data.files import DataFile, compute_digest
from plimsoll.framework.data.packing import Conversations
from plimsoll.framework.data.pretrained_tokenizer import Message, PretrainedTokenizer, Span
from plimsoll.framework.data.row_files import read_file_rows
from plimsoll.framework.data.sources import ExampleSource, assign_split
from plimsoll.framework.data.token_files import TokenStream
from plimsoll.framework.data.tokenizers import Tokenizer

# A private-use character. It breaks up a special token that a message spells out, and serves as a placeholder to find
# the position of an answer in the text.
_MARK = "\U0010fffd"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Row formats of a conversation, for messages.
FORMATS = "messages, conversations, prompt and completion, or instruction and output"

# ShareGPT role names, mapped to the names that templates use.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}


@component
class ChatSource(ExampleSource):
    """Conversations from JSON lines or Parquet files; loss on assistant messages, including their end-of-turn token.

    A row has "messages" ({"role", "content"}), ShareGPT's "conversations" ({"from", "value"}), "prompt" and
    "completion", or "instruction", "input" and "output"; it may also have "system" and "tools". It needs a
    PretrainedTokenizer.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; Parquet, CSV or TSV by file extension.
        split: "all", or one of two disjoint parts; the sha256 of a conversation decides which part it belongs to.
        validation_fraction: approximate fraction of the conversations in "validation".
        template_variables: variables passed to the template, such as {"enable_thinking": false}.
    """

    def __init__(
        self,
        *,
        paths: list[str],
        split: Literal["all", "train", "validation"] = "all",
        validation_fraction: Fraction = 0.05,
        template_variables: dict[str, object] = {},  # noqa: B006
    ):
        # These attributes are the source's settings, and so determine its digest.
        self.paths = paths
        self.split = split
        self.validation_fraction = validation_fraction
        self.template_variables = template_variables

    def read(self, file: DataFile) -> Iterator[str]:
        """Yields each row as JSON: [location, messages, tools]."""
        for location, row in read_file_rows(file):
            try:
                record = [parse_conversation(row), row.get("tools")]
                content = json.dumps(record, ensure_ascii=False)
                part = assign_split(content, self.validation_fraction)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, {location}: {error}") from error
            if self.split in ("all", part):
                # The location does not affect the split, so a row that moves stays in its part.
                location_json = json.dumps(f"{file}, {location}")
                yield f"[{location_json}, {content[1:]}"

    def codec(self, tokenizer: Tokenizer) -> Tokenizer:
        # The pipeline has already rejected any other tokenizer.
        assert isinstance(tokenizer, PretrainedTokenizer)
        return ChatCodec(tokenizer, self.template_variables)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, PretrainedTokenizer):
            raise ValueError(
                f"ChatSource needs the chat template of a PretrainedTokenizer, given {type(tokenizer).__name__}"
            )

    def rows(self, stream: TokenStream, seq_len: int, seed: int | None) -> Conversations:
        rows = Conversations(stream, seq_len, seed)
        if not rows.num_rows:
            raise ValueError(f"no conversation has an answer within data.seq_len={seq_len}")
        return rows


def parse_conversation(row: object, *, formats: str = FORMATS) -> list[Message]:
    """Returns the messages of a row, in any of the formats.

    Args:
        row: a JSON object.
        formats: the accepted formats, for the error message.

    Raises:
        ValueError: the row matches none of the formats. The message describes the problem.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, given {type(row).__name__}")
    messages = row.get("messages") or row.get("conversations")
    if messages is None and {"prompt", "completion"} <= row.keys():
        messages = []
        for role, content in (("user", row["prompt"]), ("assistant", row["completion"])):
            # Each is a text, or a list of messages.
            messages += content if isinstance(content, list) else [{"role": role, "content": content}]
    if messages is None and {"instruction", "output"} <= row.keys():
        request = row["instruction"]
        if row.get("input"):
            request = f"{row['instruction']}\n\n{row['input']}"
        messages = [{"role": "user", "content": request}, {"role": "assistant", "content": row["output"]}]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"expected a row with {formats}, given one with {', '.join(row) or 'nothing'}")
    checked_messages: list[Message] = []
    if row.get("system"):
        checked_messages.append({"role": "system", "content": row["system"]})
    for number, message in enumerate(messages):
        checked_messages.append(parse_message(number, message))
    return checked_messages


def parse_message(number: int, message: object) -> Message:
    """Returns a message in the form that templates read.

    Raises:
        ValueError: it is not a message, or has no text. The error message gives its number in the conversation.
    """
    if isinstance(message, dict) and "from" in message:
        role = message["from"]
        message = {"role": _ROLES.get(role, role), "content": message.get("value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'message {number}: expected {{"role": ..., "content": ...}}, given {str(message)[:80]}')
    content = message.get("content")
    # A message with tool calls may have no text.
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise ValueError(f"message {number}: content is {type(content).__name__}, expected text")
    return message


def _common_prefix(a: str, b: str) -> int:
    """Returns the length of the common prefix of two texts, in characters."""
    for position, (letter_a, letter_b) in enumerate(zip(a, b, strict=False)):
        if letter_a != letter_b:
            return position
    return min(len(a), len(b))


class ChatCodec(Tokenizer):
    """A tokenizer for rendered conversations, whose ids mark the targets.

    Id 2 * i + 1 is token i as a target, 2 * i the same token elsewhere. The separator comes after all of these.
    """

    def __init__(self, tokenizer: PretrainedTokenizer, variables: dict[str, Any]):
        self.tokenizer = tokenizer
        self.variables = variables
        # Twice the ids, because the lowest bit marks a target, and one more for the separator.
        self.vocab_size = 2 * tokenizer.vocab_size + 1
        self.eos_id = 2 * tokenizer.vocab_size
        # The number is the version of this encoding: increase it to invalidate cached files.
        facts = [2, tokenizer.digest, tokenizer.chat_template, variables]
        self.digest = compute_digest(facts)
        # The longest first, because a regular expression takes the first alternative that matches.
        special_tokens = sorted(tokenizer.special_tokens, key=len, reverse=True)
        # Without special tokens, the expression matches nothing.
        any_special = "|".join(re.escape(token) for token in special_tokens) or "(?!)"
        self._special = re.compile(any_special)
        self._turn_end = re.compile(rf"\s*(?:{any_special})")
        self._trailing_space = re.compile(rf"(?:{any_special})(\s+)\Z")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each conversation: 2 * id, plus 1 for targets, for each of the tokenizer's ids.

        Raises:
            ValueError: the template cannot render a conversation. The message names the file and row.
        """
        return self.encode_spans([self.render_conversation(*json.loads(text)) for text in texts])

    def encode_spans(self, rendered: Sequence[tuple[str, list[Span]]]) -> list[np.ndarray]:
        """Returns the ids of rendered texts, with the tokens inside the spans marked as targets; int64[n] each."""
        encodings = self.tokenizer.encode_rendered([text for text, _ in rendered])
        encoded_texts = []
        for (text, spans), encoding in zip(rendered, encodings, strict=True):
            ids = np.array(encoding.ids, np.int64)
            # The reshape handles a text without tokens, whose offsets would have only one axis.
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            targets = np.zeros(len(ids), np.int64)
            for start, end in spans:
                # A token that crosses the edge of an answer is a target too.
                targets |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
            encoded = 2 * ids + targets
            # The marks that break up special tokens are not part of the conversation.
            if _MARK in text:
                is_text = [text[start:end] != _MARK for start, end in offsets]
                encoded = encoded[is_text]
            encoded_texts.append(encoded)
        return encoded_texts

    def encode_question(self, messages: list[Message]) -> list[int]:
        """Returns the tokenizer's ids of a conversation, up to the point where the model's answer starts.

        Special tokens spelled out in a message are encoded as text, as in training.

        Raises:
            ValueError: the template cannot render these messages.
        """
        broken_messages = self._break_special_tokens(messages)
        text, _ = self.tokenizer.render(broken_messages, add_generation_prompt=True, **self.variables)
        (encoding,) = self.tokenizer.encode_rendered([text])
        tokens = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if text[start:end] != _MARK:
                tokens.append(token)
        return tokens

    def turn_end_ids(self) -> list[int]:
        """Returns the special token that the template writes after an answer; empty if it writes other text there."""
        example = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARK}]
        text, _ = self.tokenizer.render(example, **self.variables)
        _, _, ending = text.partition(_MARK)
        turn_end = self._turn_end.match(ending)
        if turn_end is None:
            return []
        (encoding,) = self.tokenizer.encode_rendered([turn_end[0].lstrip()])
        return encoding.ids[-1:]

    def render_conversation(
        self, location: str, messages: list[Message], tools: object, first_turn: int = 0
    ) -> tuple[str, list[Span]]:
        """Returns (text of a conversation, the spans of its answers).

        Args:
            location: location of the row, the prefix of error messages.
            messages: the conversation.
            tools: tools passed to the template.
            first_turn: number of a message; answers before it are not targets. It is 0, or the number of an answer.

        Raises:
            ValueError: the template cannot render the conversation.
        """
        messages = self._break_special_tokens(messages)
        variables: dict[str, Any] = {**self.variables, "tools": tools}
        try:
            text, spans = self.tokenizer.render(messages, **variables)
            # A template with generation tags marks the answers itself.
            if not _GENERATION.search(self.tokenizer.chat_template or ""):
                spans = []
                for turn, message in enumerate(messages):
                    if message["role"] == "assistant" and turn >= first_turn:
                        spans.append(self._answer(text, messages, turn, variables))
            elif first_turn:
                first_start, _ = self._answer(text, messages, first_turn, variables)
                spans = [(max(start, first_start), end) for start, end in spans if end > first_start]
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
        return text, spans

    def _answer(self, text: str, messages: list[Message], turn: int, variables: dict[str, Any]) -> Span:
        """Returns the span of the answer at `turn` in the conversation's text, including the token that ends it."""
        earlier_messages = messages[:turn]
        messages_with_answer = messages[: turn + 1]
        render = self.tokenizer.render
        prompt, _ = render(earlier_messages, add_generation_prompt=True, **variables)
        answered, _ = render(messages_with_answer, **variables)
        # White space after its last special token belongs to the next turn: a model stops at that token.
        trailing_space = self._trailing_space.search(answered)
        answer_end = trailing_space.start(1) if trailing_space else len(answered)
        if text.startswith(prompt) and text.startswith(answered):
            return len(prompt), answer_end
        # This template renders an answer differently if it is not the last one, or not after the last question (Qwen 3
        # then leaves out its thoughts), so neither rendered text is a prefix of the whole. The answer is the part
        # that depends on the message, from the generation prompt before it to the token after it.
        content_start, content_end = self._find_changing_span(text, messages, turn, variables)
        start = len(prompt)
        if not text.startswith(prompt):
            without_prompt, _ = render(earlier_messages, **variables)
            opening = prompt[_common_prefix(without_prompt, prompt) :]
            previous_end = 0
            if turn:
                _, previous_end = self._find_changing_span(text, messages, turn - 1, variables)
            start = self._find_opening_end(text, opening, previous_end, content_start)
        if text.startswith(answered):
            return start, answer_end
        # The token after the answer may open the next turn. It belongs to the answer only if it also follows the answer
        # when that is the last message.
        _, answered_end = self._find_changing_span(answered, messages_with_answer, turn, variables)
        remaining_text = text[content_end:]
        common_length = _common_prefix(remaining_text, answered[answered_end:])
        ending = self._turn_end.match(remaining_text[:common_length])
        return start, content_end + (ending.end() if ending else 0)

    def _find_changing_span(self, text: str, messages: list[Message], turn: int, variables: dict[str, Any]) -> Span:
        """Returns the span of the text that changes with the content of the message at `turn`."""
        marked_message = {"role": messages[turn]["role"], "content": _MARK}
        marked_messages = [*messages[:turn], marked_message, *messages[turn + 1 :]]
        marked_text, _ = self.tokenizer.render(marked_messages, **variables)
        start = _common_prefix(marked_text, text)
        # The common suffix is measured after the common prefix, so that the two cannot overlap.
        marked_reversed = marked_text[start:][::-1]
        text_reversed = text[start:][::-1]
        return start, len(text) - _common_prefix(marked_reversed, text_reversed)

    def _find_opening_end(self, text: str, opening: str, earliest: int, content_start: int) -> int:
        """Returns the end of an answer's generation prompt in the text.

        More text may follow the prompt, or its end may be missing (an empty thought).

        Args:
            text: the conversation.
            opening: the generation prompt as rendered before the answer exists.
            earliest: end of the message before the answer.
            content_start: start of the answer's content.
        """
        # Use the longest prefix that occurs. If it is not the whole prompt, it must contain a special token, because
        # a few characters may occur anywhere.
        for length in range(len(opening), 0, -1):
            is_whole = length == len(opening)
            if not is_whole and not self._special.search(opening[:length]):
                continue
            position = text.rfind(opening[:length], earliest, content_start)
            if position >= 0:
                return position + length
        return content_start

    def _break_special_tokens(self, value: Any) -> Any:
        """Returns a message with a mark inside each special token that it spells out.

        This ensures that only the template's own special tokens are encoded as such.
        """
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0][0] + _MARK + match[0][1:], value)
        if isinstance(value, dict):
            return {key: self._break_special_tokens(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._break_special_tokens(item) for item in value]
        return value
