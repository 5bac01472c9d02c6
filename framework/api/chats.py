"""Conversations with a model from a program: messages in, an answer out, or a history that grows as one talks."""

from __future__ import annotations

from collections.abc import Generator as Pieces
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from framework.api.loaded import Loaded, Tell
from framework.config import Config, target_of
from framework.data.chats import ChatSource
from framework.data.preferences import PairSource, ThumbSource
from framework.data.pretrained_tokenizer import Message
from framework.inference.chat import Answer, Chat, TranscriptForm, Turn, form_of
from framework.inference.generation import Generator
from framework.inference.sampling import Sampling

DEFAULT_TOKENS = 512


class History(NamedTuple):
    """A conversation up to a question.

    Attributes:
        system: what precedes it.
        turns: what was asked and answered.
        question: the last message, which waits for its answer; None where there is none.
    """

    system: str | None
    turns: list[Turn]
    question: str | None


class Conversation:
    """A conversation that keeps its history.

    The model reads what is new alone, where the history begins with what it has read for the answer before.

    Args:
        chat: the model.
        system: a system prompt.
        turns: what was said before.

    Attributes:
        turns: what was said; change it as you like.
        samples: all answers to the last message, of which the first one is in the history.

    Raises:
        ValueError: the model's template has no system prompt, or it is too long.
    """

    def __init__(self, chat: Chat, system: str | None = None, turns: Sequence[Turn] = ()):
        if system:
            chat.check_system(system)
        self.system = system
        self.turns = list(turns)
        self.samples: list[str] = []
        self._chat = chat

    def say(self, text: str) -> str:
        """The model's answer to a message. Both become part of the history.

        Raises:
            ValueError: the message is empty, or the context has no room for it.
        """
        for _ in self.stream(text):
            pass
        return self.samples[0]

    def stream(self, text: str) -> Pieces[str]:
        """The pieces of the answer to a message, as they are made; what is wrong is raised at once.

        The message is part of the history when the pieces end. Where they are not read to their end, the history keeps
        what was made so far.
        """
        if not text.strip():
            raise ValueError("the message is empty")
        prompt = self._chat.prompt(self.system, self.turns, text)
        return self._pieces(text, self._chat.answer(prompt))

    def _pieces(self, question: str, answer: Answer) -> Pieces[str]:
        """Yields the first sample, and writes the history."""
        has_ended = False
        try:
            for pieces in answer:
                if pieces[0]:
                    yield pieces[0]
            has_ended = True
        finally:
            # Nothing is kept of an answer that was stopped before its first word.
            if has_ended or answer.texts[0]:
                self.samples = answer.texts
                self.turns.append(Turn(question, answer.texts[0]))

    @property
    def messages(self) -> list[Message]:
        """The history as messages: {"role": "system", "user" or "assistant", "content": text}."""
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def __repr__(self) -> str:
        return f"Conversation of {len(self.turns)} turns"


def chat_of(
    loaded: Loaded,
    generator: Generator,
    sampling: Sampling,
    *,
    num_samples: int = 1,
    shortens: bool,
    tell: Tell,
) -> Chat:
    """A model that answers, by its own chat template; a model without one continues a transcript.

    Args:
        loaded: the model.
        generator: of that model.
        sampling: how answers are made.
        num_samples: answers to each message.
        shortens: make max_new_tokens half of the context where they are more.
        tell: gets a line where there is no template.

    Raises:
        ValueError: its tokenizer has no text, or no message would fit beside max_new_tokens.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples: expected at least 1, given {num_samples}")
    tokenizer = loaded.tokenizer
    context = loaded.experiment.data.seq_len
    max_tokens = sampling.max_new_tokens
    if shortens:
        sampling = replace(sampling, max_new_tokens=max(1, min(max_tokens, context // 2)))
    elif max_tokens >= context:
        raise ValueError(
            f"max_new_tokens={max_tokens} leaves no room for a message in a context of {context} tokens (data.seq_len)"
        )
    form = form_of(tokenizer, _template_variables(loaded.config))
    if isinstance(form, TranscriptForm):
        tell(
            "no chat template: the model continues a plain transcript (User: ... Assistant: ...), as a base model does"
        )
    return Chat(generator, tokenizer, form, sampling, context=context, num_samples=num_samples)


def _template_variables(config: Config) -> dict[str, Any]:
    """The variables that a run on chats or answers has given to its chat template; none of other runs."""
    sources = (ChatSource, PairSource, ThumbSource)
    if not config.data.takes("source") or target_of(config.data.source) not in sources:
        return {}
    return config.data.source.instantiate().template_variables


def history_of(messages: Sequence[Message]) -> History:
    """Reads messages.

    Raises:
        ValueError: they are not user and assistant in turn, behind at most one system message; the place is named.
    """
    system = None
    turns: list[Turn] = []
    question: str | None = None
    for index, message in enumerate(messages):
        role, content = _fields(index, message)
        if role == "system" and index == 0:
            system = content
        elif role == "user" and question is None:
            question = content
        elif role == "assistant" and question is not None:
            turns.append(Turn(question, content))
            question = None
        else:
            raise ValueError(
                f"messages[{index}]: {role!r} cannot stand here; expected user and assistant in turn, behind at most "
                "one system message"
            )
    return History(system, turns, question)


def _fields(index: int, message: Message) -> tuple[str, str]:
    """(role, content) of a message."""
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        expected = '{"role": "system", "user" or "assistant", "content": TEXT}'
        raise ValueError(f"messages[{index}]: expected {expected}, given {message!r}")
    return role, content
