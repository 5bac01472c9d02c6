"""A conversation with a model: its turns as tokens, cut from the front where they are too long; answers as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from framework.data.chats import ChatCodec
from framework.data.pretrained_tokenizer import Message, PretrainedTokenizer
from framework.data.tokenizers import Tokenizer
from framework.inference.generation import Generator, stream_text
from framework.inference.sampling import Sampling


class Turn(NamedTuple):
    """What the user said, and what the model answered."""

    question: str
    answer: str


class Prompt(NamedTuple):
    """A conversation as the model reads it: its tokens, and how many of the oldest turns did not fit."""

    tokens: list[int]
    turns_left_out: int


class Form(Protocol):
    """How a conversation is written as tokens.

    Attributes:
        stop_ids: tokens that end an answer, beside the tokenizer's own.
        stops: texts that end an answer.
    """

    @property
    def stop_ids(self) -> Sequence[int]: ...

    @property
    def stops(self) -> Sequence[str]: ...

    def encode(self, system: str | None, turns: Sequence[Turn], question: str) -> list[int]:
        """Returns the tokens of a conversation, up to where the next answer begins."""
        ...


class TemplateForm:
    """The model's own chat template."""

    stops: Sequence[str] = ()

    def __init__(self, codec: ChatCodec):
        self._codec = codec
        self.stop_ids = codec.turn_end_ids()

    def encode(self, system: str | None, turns: Sequence[Turn], question: str) -> list[int]:
        """Raises ValueError: the template cannot render this, as some cannot with a system message."""
        messages: list[Message] = []
        if system:
            messages.append({"role": "system", "content": system})
        for turn in turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        messages.append({"role": "user", "content": question})
        return self._codec.encode_question(messages)


class TranscriptForm:
    """Plain text with "User:" and "Assistant:", for a model without a template: it continues texts."""

    stop_ids: Sequence[int] = ()
    stops: Sequence[str] = ("\nUser:", "\nAssistant:")

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, system: str | None, turns: Sequence[Turn], question: str) -> list[int]:
        """Returns the tokens of the transcript, opened as the documents of training are."""
        text = f"{system}\n\n" if system else ""
        for turn in turns:
            text += f"User: {turn.question}\nAssistant: {turn.answer}\n"
        # No space at the end: most tokenizers join it to the next word.
        text += f"User: {question}\nAssistant:"
        return self._tokenizer.encode_prompt(text)


def form_of(tokenizer: Tokenizer, variables: dict[str, Any]) -> Form:
    """Returns how conversations are written for a model.

    Args:
        tokenizer: the model's.
        variables: what its chat template may ask for, such as {"enable_thinking": false}.
    """
    if isinstance(tokenizer, PretrainedTokenizer) and tokenizer.chat_template is not None:
        codec = ChatCodec(tokenizer, variables)
        return TemplateForm(codec)
    return TranscriptForm(tokenizer)


class Answer:
    """An answer that is being made: iterating gives the new text of each sample.

    Attributes:
        texts: the text of each sample so far, without white space at its ends.
        at_limit: whether it ended only because there were max_new_tokens.
    """

    def __init__(self, steps: Iterator[list[str]], num_samples: int, max_new_tokens: int):
        self.texts = [""] * num_samples
        self.at_limit = False
        self._steps = steps
        self._max_new_tokens = max_new_tokens

    def __iter__(self) -> Iterator[list[str]]:
        whole_texts = list(self.texts)
        for index, pieces in enumerate(self._steps):
            new_pieces = []
            for row, piece in enumerate(pieces):
                # A space before the first word is the template's or the tokenizer's.
                new_piece = piece if whole_texts[row] else piece.lstrip()
                whole_texts[row] += new_piece
                new_pieces.append(new_piece)
            self.texts = [text.rstrip() for text in whole_texts]
            # The last step, after that of the last token, gives the text that was held back.
            self.at_limit = index == self._max_new_tokens
            yield new_pieces


class Chat:
    """A model that answers. It keeps no conversation, so that several can share it, one answer at a time.

    Args:
        generator: the model.
        tokenizer: its tokenizer.
        form: how a conversation is written.
        sampling: how answers are made; the seed is that of the first answer, and the next one's is one higher.
        context: how many tokens a conversation may have, its answer included.
        num_samples: how many answers are made to a question.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        form: Form,
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
        """Raises ValueError: the template knows no system message, or it is too long for the context."""
        try:
            self.prompt(system, [], "?")
        except ValueError as error:
            raise ValueError(f"the system prompt cannot be used: {error}") from None

    def prompt(self, system: str | None, turns: Sequence[Turn], question: str) -> Prompt:
        """Returns what the model reads, without the oldest turns where the context has no room for them.

        Raises:
            ValueError: there is no room for the question itself, or it cannot be encoded.
        """
        _check_text(system or "", question, *(text for turn in turns for text in turn))
        room = self.context - self._sampling.max_new_tokens
        tokens = self._form.encode(system, turns, question)
        # The fewest turns that have to go lie between these two numbers.
        too_few, enough = 0, len(turns)
        if len(tokens) <= room:
            return Prompt(tokens, 0)
        while too_few + 1 < enough:
            middle = (too_few + enough) // 2
            if len(self._form.encode(system, turns[middle:], question)) <= room:
                enough = middle
            else:
                too_few = middle
        tokens = self._form.encode(system, turns[enough:], question)
        if len(tokens) > room:
            raise ValueError(
                f"the message makes a prompt of {len(tokens)} tokens, and the context of {self.context} (data.seq_len) "
                f"has room for {room} beside max_new_tokens = {self._sampling.max_new_tokens}"
            )
        return Prompt(tokens, enough)

    def answer(self, prompt: Prompt) -> Answer:
        """Begins an answer; the model works while one iterates over it."""
        prompts = [prompt.tokens] * self.num_samples
        seed = (self._sampling.seed + self._num_answers) % (1 << 32)
        sampling = replace(self._sampling, seed=seed)
        self._num_answers += 1
        # The next message's prompt begins with this one and its answer.
        steps = stream_text(self._generator, self._tokenizer, prompts, sampling, self._form.stops, keeps_cache=True)
        return Answer(steps, self.num_samples, sampling.max_new_tokens)


def _check_text(*texts: str) -> None:
    """Raises ValueError: a text has half a character (a lone surrogate), which no tokenizer takes."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"a message is no Unicode text: {error.reason}") from None
