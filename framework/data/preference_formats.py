"""Parses rows with preference labels, in the usual formats, into a prompt and its answers.

The formats are those of TRL and its datasets: prompt, chosen and rejected, as texts or as messages; chosen and rejected
with the prompt included in both; prompt, completion and label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from plimsoll.framework.config import did_you_mean
from plimsoll.framework.data.chats import parse_message
from plimsoll.framework.data.pretrained_tokenizer import Message

# A plain text, or messages for a chat template.
TextOrMessages = str | list[Message]

# Label of an answer. The order is part of the token file format: append only.
AnswerLabel = Literal["chosen", "rejected", "desirable", "undesirable"]
ANSWER_LABELS: tuple[AnswerLabel, ...] = ("chosen", "rejected", "desirable", "undesirable")


@dataclass(frozen=True)
class LabeledAnswers:
    """Labeled answers to one prompt; prompt and answers are all texts, or all messages.

    Attributes:
        prompt: the text or messages before each answer.
        answers: (label, answer) pairs.
    """

    prompt: TextOrMessages
    answers: list[tuple[AnswerLabel, TextOrMessages]]

    @property
    def problem(self) -> str | None:
        """The reason why the answers are unusable, as text; None if they are usable."""
        for answer_label, answer in self.answers:
            if isinstance(answer, str):
                is_empty = not answer.strip()
            else:
                # A tool call is content too.
                messages = [message for message in answer if message["role"] == "assistant"]
                texts = [(message.get("content") or "").strip() for message in messages]
                is_empty = not any(texts) and not any(message.get("tool_calls") for message in messages)
            if is_empty:
                return f"the {answer_label} answer is empty"
        content = [answer for _, answer in self.answers]
        if len(content) == 2 and content[0] == content[1]:
            return "both answers are the same"
        return None


def parse_pair(row: object, *, strings_are_messages: bool = False) -> LabeledAnswers:
    """Returns the chosen and the rejected answer of a row.

    Args:
        row: an object with chosen and rejected, and with a prompt unless both include it.
        strings_are_messages: treat a text prompt as a user message, and text answers as assistant messages; otherwise,
            texts are used verbatim, unless the row also has a system prompt.

    Raises:
        ValueError: the row matches none of the formats. The message names the field.
    """
    row = _check_row(row)
    answers: dict[str, object] = {}
    for name in ("chosen", "rejected"):
        answers[name] = _field(row, name, "a pair has chosen and rejected")
    if answers["chosen"] == answers["rejected"]:
        # The prompt cannot be separated from equal answers, and does not matter: `LabeledAnswers.problem` rejects them.
        same = _parse_content("chosen", answers["chosen"])
        return LabeledAnswers("" if isinstance(same, str) else [], [("chosen", same), ("rejected", same)])
    prompt, (chosen, rejected) = _prompt_and_answers(row, answers, strings_are_messages)
    return LabeledAnswers(prompt, [("chosen", chosen), ("rejected", rejected)])


def parse_unpaired(row: object, *, strings_are_messages: bool = False) -> list[LabeledAnswers]:
    """Returns the labeled answers of a row, one `LabeledAnswers` each: a single answer, or the two of a pair.

    Args:
        row: an object with prompt, completion and label (true or false, or 1 or 0), or with messages and label; or a
            pair, as for `parse_pair`.
        strings_are_messages: as for `parse_pair`.

    Raises:
        ValueError: the row matches none of the formats. The message names the field.
    """
    row = _check_row(row)
    if is_pair(row):
        pair = parse_pair(row, strings_are_messages=strings_are_messages)
        (_, chosen), (_, rejected) = pair.answers
        return [
            LabeledAnswers(pair.prompt, [("desirable", chosen)]),
            LabeledAnswers(pair.prompt, [("undesirable", rejected)]),
        ]
    label = _field(row, "label", "a labeled answer has prompt, completion and label; a pair has chosen and rejected")
    if not _is_unpaired_label(label):
        raise ValueError(f"field 'label' is {str(label)[:40]!r}, expected true or false")
    name = "completion"
    if row.get(name) is None:
        name = "messages" if row.get("messages") is not None else "conversations"
    if row.get(name) is None:
        _field(row, "completion", "a labeled answer has prompt, completion and label")
    prompt, (answer,) = _prompt_and_answers(row, {name: row[name]}, strings_are_messages)
    return [LabeledAnswers(prompt, [("desirable" if label else "undesirable", answer)])]


def is_pair(row: Mapping[str, object]) -> bool:
    """Returns whether a row is meant as a preference pair: it has chosen or rejected."""
    return row.get("chosen") is not None or row.get("rejected") is not None


def is_unpaired(row: Mapping[str, object]) -> bool:
    """Returns whether a row is meant as a labeled answer: it has a binary label and an answer or a conversation."""
    answer_names = ("completion", "messages", "conversations")
    return _is_unpaired_label(row.get("label")) and any(row.get(name) is not None for name in answer_names)


def _is_unpaired_label(label: object) -> bool:
    """Returns whether a label is binary: true or false, or 1 or 0."""
    return isinstance(label, bool | int | float) and label in (0, 1)


def _check_row(row: object) -> dict[str, object]:
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, given {type(row).__name__}")
    return row


def _field(row: dict[str, object], name: str, expected: str) -> object:
    """Returns the value of a field; raises ValueError if it is absent or null."""
    value = row.get(name)
    if value is not None:
        return value
    if name in row:
        raise ValueError(f"field {name!r} is null; {expected}")
    meant = did_you_mean(name, row)
    # If no field has a similar name, list the row's fields after the expected ones.
    hint = meant if "did you mean" in meant else f", given {', '.join(row) or 'nothing'}"
    raise ValueError(f"no field {name!r}: {expected}{hint}")


def _parse_content(name: str, value: object) -> TextOrMessages:
    """Returns the text or the messages of a field, after checking them.

    Raises:
        ValueError: the field holds neither. The message names the field.
    """
    # A single message does not have to be in a list.
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        try:
            return [parse_message(number, message) for number, message in enumerate(value)]
        except ValueError as error:
            raise ValueError(f"field {name!r}: {error}") from error
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is {type(value).__name__}, expected text or messages")
    # Encoding is a check: JSON can contain an unpaired surrogate, which no tokenizer accepts.
    value.encode("utf-8")
    return value


def _prompt_and_answers(
    row: dict[str, object], answers: dict[str, object], strings_are_messages: bool
) -> tuple[TextOrMessages, list[TextOrMessages]]:
    """Returns (the prompt, the text or messages of each answer after the prompt).

    Args:
        row: an object with a prompt, or without one if the answers include it.
        answers: the row's answer fields, by name.
        strings_are_messages: as for `parse_pair`.
    """
    prompt = row.get("prompt")
    if prompt is None and not {"messages", "conversations"} & answers.keys():
        # Some datasets store the turns before the answers in a conversation field.
        prompt = row.get("messages") or row.get("conversations")
    content_by_name = {name: _parse_content(name, value) for name, value in answers.items()}
    prompt_content = None if prompt is None else _parse_content("prompt", prompt)
    all_contents = [*content_by_name.values(), *([] if prompt_content is None else [prompt_content])]
    all_texts = [content for content in all_contents if isinstance(content, str)]
    system = row.get("system")
    if len(all_texts) == len(all_contents) and not strings_are_messages and not system:
        if prompt_content is None:
            return _common_text(content_by_name)
        return prompt_content, list(content_by_name.values())
    return _split_turns(content_by_name, prompt_content, system)


def _common_text(content_by_name: Mapping[str, TextOrMessages]) -> tuple[TextOrMessages, list[TextOrMessages]]:
    """Returns (the common prefix of all answers, the text of each after it); an answer starts at a word boundary."""
    texts = [content for content in content_by_name.values() if isinstance(content, str)]
    if len(texts) == 1:
        raise ValueError("no field 'prompt', and the answer is a string: expected both fields, or messages")
    length = 0
    while length < min(map(len, texts)) and len({text[length] for text in texts}) == 1:
        length += 1
    prompt = texts[0][:length]
    while prompt:
        end = len(prompt)
        if not any(end < len(text) and not text[end].isspace() and not text[end - 1].isspace() for text in texts):
            break
        # The prompt ends inside a word of an answer.
        prompt = prompt[:-1]
    # The space before a word is part of its token, so it stays with the answer.
    if prompt.endswith(" "):
        prompt = prompt[:-1]
    return prompt, [text[len(prompt) :] for text in texts]


def _split_turns(
    content_by_name: Mapping[str, TextOrMessages], prompt: TextOrMessages | None, system: object
) -> tuple[list[Message], list[TextOrMessages]]:
    """Returns (the messages of the prompt, the messages of each answer)."""
    turns_by_name: dict[str, list[Message]] = {}
    for name, content in content_by_name.items():
        if isinstance(content, str) and prompt is None:
            raise ValueError(f"no field 'prompt', and {name!r} is a string: expected a prompt, or messages")
        turns_by_name[name] = [{"role": "assistant", "content": content}] if isinstance(content, str) else content
    prompt_turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    # If the first role is not the assistant's, the field is a conversation that includes the prompt.
    holding_names = [name for name, turns in turns_by_name.items() if turns and turns[0]["role"] != "assistant"]
    for name in holding_names:
        # The prompt's messages may be in any of its turns.
        contents = [message.get("content") for message in turns_by_name[name]]
        if any(message.get("content") not in contents for message in prompt_turns or []):
            raise ValueError(f"field {name!r} is a conversation without the prompt; expected the prompt in it, or none")
    if prompt_turns is None or len(holding_names) == len(turns_by_name):
        conversations = list(turns_by_name.values())
        length = _common_turns(conversations)
        prompt_turns = conversations[0][:length]
        answers = [turns[length:] for turns in conversations]
    elif holding_names:
        raise ValueError(f"field {holding_names[0]!r} is a conversation and the other one only an answer")
    else:
        answers = list(turns_by_name.values())
    if system:
        if not isinstance(system, str):
            raise ValueError(f"field 'system' is {type(system).__name__}, expected text")
        prompt_turns = [{"role": "system", "content": system}, *prompt_turns]
    return prompt_turns, list(answers)


def _common_turns(conversations: list[list[Message]]) -> int:
    """Returns the number of leading turns that form the prompt of the conversations.

    For several conversations, this is the length of their common prefix. For one, it is the number of turns up to and
    including the user's last one.
    """
    if len(conversations) == 1:
        roles = [message["role"] for message in conversations[0]]
        return len(roles) - roles[::-1].index("user") if "user" in roles else 0
    length = 0
    while all(length < len(turns) and turns[length] == conversations[0][length] for turns in conversations):
        length += 1
    return length
