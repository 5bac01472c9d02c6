"""Conversations with a model from Python: a single answer to a list of messages, or a chat that keeps its history."""

from __future__ import annotations

from collections.abc import Generator as TextChunks
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from plimsoll.api.loaded import LoadedModel, Log
from plimsoll.framework.config import Config, get_target
from plimsoll.framework.data.chats import ChatSource
from plimsoll.framework.data.preferences import PairSource, UnpairedSource
from plimsoll.framework.data.pretrained_tokenizer import Message
from plimsoll.framework.inference.chat import Chat, ChatTurn, StreamedAnswer, TranscriptFormat, get_chat_format
from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.sampling import Sampling

DEFAULT_TOKENS = 512


class History(NamedTuple):
    """A conversation, possibly with an unanswered question at the end.

    Attributes:
        system: system message; None if there is none.
        turns: answered user messages.
        question: last user message if it is not answered yet, else None.
    """

    system: str | None
    turns: list[ChatTurn]
    question: str | None


class Conversation:
    """A conversation that keeps its history.

    The KV cache is reused: if the history starts with the tokens of the previous answer, only new tokens are read.

    Args:
        chat: chat with the model.
        system: system prompt; None for none.
        turns: earlier turns of the conversation.

    Attributes:
        turns: history of the conversation; may be changed by the caller.
        samples: all answers to the last message; the first one is in the history.

    Raises:
        ValueError: the model's template does not support a system prompt, or it is too long.
    """

    def __init__(self, chat: Chat, system: str | None = None, turns: Sequence[ChatTurn] = ()):
        if system:
            chat.check_system(system)
        self.system = system
        self.turns = list(turns)
        self.samples: list[str] = []
        self._chat = chat

    def say(self, text: str) -> str:
        """Return the model's answer to a message. Both are added to the history.

        Raises:
            ValueError: the message is empty, or it does not fit into the context.
        """
        for _ in self.stream(text):
            pass
        return self.samples[0]

    def stream(self, text: str) -> TextChunks[str]:
        """Stream the answer to a message in chunks of text. Errors are raised by this call, not during iteration.

        The message and the answer are added to the history when the iteration ends. If the caller stops early, the
        history gets the text generated so far.
        """
        if not text.strip():
            raise ValueError("the message is empty")
        # Checked here rather than in the generator below, so that this call raises the errors.
        prompt = self._chat.prompt(self.system, self.turns, text)
        return self._stream_chunks(text, self._chat.answer(prompt))

    def _stream_chunks(self, question: str, answer: StreamedAnswer) -> TextChunks[str]:
        """Yield the text of the first sample, and update the history."""
        has_ended = False
        try:
            for chunks in answer:
                if chunks[0]:
                    yield chunks[0]
            has_ended = True
        finally:
            # An answer that was stopped before its first word is not added to the history.
            if has_ended or answer.texts[0]:
                self.samples = answer.texts
                self.turns.append(ChatTurn(question, answer.texts[0]))

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


def create_chat(
    loaded: LoadedModel,
    generator: Generator,
    sampling: Sampling,
    *,
    num_samples: int = 1,
    clamp_max_tokens: bool,
    log: Log,
) -> Chat:
    """Create a chat that uses the model's own chat template; a model without one continues a transcript.

    Args:
        loaded: loaded model.
        generator: generator of that model.
        sampling: sampling settings.
        num_samples: number of answers to each message.
        clamp_max_tokens: limit max_new_tokens to half of the context instead of raising an error.
        log: receives a line if there is no chat template.

    Raises:
        ValueError: the tokenizer has no text, num_samples is below 1, or max_new_tokens leaves no room for a message.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples: expected at least 1, given {num_samples}")
    tokenizer = loaded.tokenizer
    context = loaded.experiment.data.seq_len
    max_tokens = sampling.max_new_tokens
    if clamp_max_tokens:
        # Leave half of the context for the messages.
        sampling = replace(sampling, max_new_tokens=max(1, min(max_tokens, context // 2)))
    elif max_tokens >= context:
        raise ValueError(
            f"max_new_tokens={max_tokens} leaves no room for a message in a context of {context} tokens (data.seq_len)"
        )
    form = get_chat_format(tokenizer, _template_variables(loaded.config))
    if isinstance(form, TranscriptFormat):
        log("no chat template: the model continues a plain transcript (User: ... Assistant: ...), as a base model does")
    return Chat(generator, tokenizer, form, sampling, context=context, num_samples=num_samples)


def _template_variables(config: Config) -> dict[str, Any]:
    """Return the chat template variables of a run on chats or preferences; {} for other runs."""
    sources = (ChatSource, PairSource, UnpairedSource)
    if not config.data.takes("source") or get_target(config.data.source) not in sources:
        return {}
    return config.data.source.instantiate().template_variables


def history_from_messages(messages: Sequence[Message]) -> History:
    """Convert messages to a history.

    Raises:
        ValueError: the messages do not alternate between user and assistant, after at most one system message. The
            error names the position.
    """
    system = None
    turns: list[ChatTurn] = []
    question: str | None = None
    for index, message in enumerate(messages):
        role, content = _fields(index, message)
        if role == "system" and index == 0:
            system = content
        elif role == "user" and question is None:
            question = content
        elif role == "assistant" and question is not None:
            turns.append(ChatTurn(question, content))
            question = None
        else:
            raise ValueError(
                f"messages[{index}]: unexpected role {role!r}; expected user and assistant in turn, after at most "
                "one system message"
            )
    return History(system, turns, question)


def _fields(index: int, message: Message) -> tuple[str, str]:
    """Return (role, content) of a message. Raises ValueError if it is malformed."""
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        expected = '{"role": "system", "user" or "assistant", "content": TEXT}'
        raise ValueError(f"messages[{index}]: expected {expected}, given {message!r}")
    return role, content
