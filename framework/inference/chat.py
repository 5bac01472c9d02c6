"""Chat with a model: encodes the turns as tokens, drops the oldest turns that do not fit, and streams the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from plimsoll.framework.data.chats import ChatCodec
from plimsoll.framework.data.pretrained_tokenizer import Message, PretrainedTokenizer
from plimsoll.framework.data.tokenizers import Tokenizer
from plimsoll.framework.inference.generation import Generator, stream_text
from plimsoll.framework.inference.sampling import Sampling


@dataclass(frozen=True)
class ChatTurn:
    """A user message and the model's answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as model input: its tokens, and the number of oldest turns that did not fit."""

    tokens: list[int]
    num_dropped_turns: int


class ChatFormat(Protocol):
    """The format in which a conversation is encoded as tokens.

    Attributes:
        stop_ids: tokens that end an answer, in addition to the tokenizer's own.
        stops: strings that end an answer.
    """

    @property
    def stop_ids(self) -> Sequence[int]: ...

    @property
    def stops(self) -> Sequence[str]: ...

    def encode(self, system: str | None, turns: Sequence[ChatTurn], question: str) -> list[int]:
        """Return the tokens of a conversation, up to the start of the next answer."""
        ...


class TemplateFormat:
    """The model's own chat template."""

    stops: Sequence[str] = ()

    def __init__(self, codec: ChatCodec):
        self._codec = codec
        self.stop_ids = codec.turn_end_ids()

    def encode(self, system: str | None, turns: Sequence[ChatTurn], question: str) -> list[int]:
        """See `ChatFormat`. Raises ValueError if the template cannot render it; some have no system message."""
        messages: list[Message] = []
        if system:
            messages.append({"role": "system", "content": system})
        for turn in turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        messages.append({"role": "user", "content": question})
        return self._codec.encode_question(messages)


class TranscriptFormat:
    """A plain transcript with "User:" and "Assistant:", for a base model without a chat template."""

    stop_ids: Sequence[int] = ()
    stops: Sequence[str] = ("\nUser:", "\nAssistant:")

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, system: str | None, turns: Sequence[ChatTurn], question: str) -> list[int]:
        """Return the tokens of the transcript, which starts like a training document."""
        text = f"{system}\n\n" if system else ""
        for turn in turns:
            text += f"User: {turn.question}\nAssistant: {turn.answer}\n"
        # No trailing space: most tokenizers merge it into the next word.
        text += f"User: {question}\nAssistant:"
        return self._tokenizer.encode_prompt(text)


def get_chat_format(tokenizer: Tokenizer, variables: dict[str, Any]) -> ChatFormat:
    """Return the conversation format of a model: its chat template, or a transcript if it has none.

    Args:
        tokenizer: tokenizer of the model.
        variables: variables for the chat template, such as {"enable_thinking": false}.
    """
    if isinstance(tokenizer, PretrainedTokenizer) and tokenizer.chat_template is not None:
        codec = ChatCodec(tokenizer, variables)
        return TemplateFormat(codec)
    return TranscriptFormat(tokenizer)


class StreamedAnswer:
    """An answer in progress: iterating over it generates and yields the new text of each sample.

    Attributes:
        texts: the text of each sample so far, without leading or trailing whitespace.
        at_limit: True if the answer ended only because it reached max_new_tokens.
    """

    def __init__(self, steps: Iterator[list[str]], num_samples: int, max_new_tokens: int):
        self.texts = [""] * num_samples
        self.at_limit = False
        self._steps = steps
        self._max_new_tokens = max_new_tokens

    def __iter__(self) -> Iterator[list[str]]:
        full_texts = list(self.texts)
        for index, chunks in enumerate(self._steps):
            new_chunks = []
            for row, chunk in enumerate(chunks):
                # A space before the first word comes from the template or the tokenizer.
                new_chunk = chunk if full_texts[row] else chunk.lstrip()
                full_texts[row] += new_chunk
                new_chunks.append(new_chunk)
            self.texts = [text.rstrip() for text in full_texts]
            # One more step follows the last token: it yields the text that was held back.
            self.at_limit = index == self._max_new_tokens
            yield new_chunks


class Chat:
    """Answers messages. It stores no conversation, so several conversations can share it, one answer at a time.

    Args:
        generator: generator of the model.
        tokenizer: tokenizer of the model.
        form: format of a conversation.
        sampling: sampling settings; the seed is used for the first answer and increases by one with each answer.
        context: maximum number of tokens of a conversation, including the answer.
        num_samples: number of answers to generate per message.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        form: ChatFormat,
        sampling: Sampling,
        *,
        context: int,
        num_samples: int = 1,
    ):
        stop_ids = {*tokenizer.stop_ids, *form.stop_ids}
        self.num_samples = num_samples
        self.context = context
        self._generator = generator
        self._tokenizer = tokenizer
        self._form = form
        self._sampling = replace(sampling, stop_ids=tuple(sorted(stop_ids)))
        self._num_answers = 0

    def check_system(self, system: str | None) -> None:
        """Raise ValueError if the template does not support a system message, or it is too long for the context."""
        try:
            self.prompt(system, [], "?")
        except ValueError as error:
            raise ValueError(f"the system prompt cannot be used: {error}") from None

    def prompt(self, system: str | None, turns: Sequence[ChatTurn], question: str) -> ChatPrompt:
        """Return the model's input, dropping the oldest turns if they do not fit into the context.

        Raises:
            ValueError: the question itself does not fit, or it cannot be encoded.
        """
        for text in (system or "", question, *(text for turn in turns for text in (turn.question, turn.answer))):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                # Half a character, which no tokenizer accepts.
                raise ValueError(f"a message is not valid Unicode text: {error.reason}") from None
        prompt_budget = self.context - self._sampling.max_new_tokens
        tokens = self._form.encode(system, turns, question)
        # Binary search for the smallest number of turns to drop: more than too_few, at most enough.
        too_few, enough = 0, len(turns)
        if len(tokens) <= prompt_budget:
            return ChatPrompt(tokens, 0)
        while too_few + 1 < enough:
            middle = (too_few + enough) // 2
            if len(self._form.encode(system, turns[middle:], question)) <= prompt_budget:
                enough = middle
            else:
                too_few = middle
        tokens = self._form.encode(system, turns[enough:], question)
        if len(tokens) > prompt_budget:
            raise ValueError(
                f"the message makes a prompt of {len(tokens)} tokens, but the context of {self.context} (data.seq_len) "
                f"has room for {prompt_budget} in addition to max_new_tokens = {self._sampling.max_new_tokens}"
            )
        return ChatPrompt(tokens, enough)

    def answer(self, prompt: ChatPrompt) -> StreamedAnswer:
        """Start an answer; the model generates it as the caller iterates over it."""
        prompts = [prompt.tokens] * self.num_samples
        # `Sampling` accepts seeds of 32 bits.
        seed = (self._sampling.seed + self._num_answers) % (1 << 32)
        sampling = replace(self._sampling, seed=seed)
        self._num_answers += 1
        # Keep the cache, because the next prompt starts with this one and its answer.
        steps = stream_text(self._generator, self._tokenizer, prompts, sampling, self._form.stops, keep_cache=True)
        return StreamedAnswer(steps, self.num_samples, sampling.max_new_tokens)
