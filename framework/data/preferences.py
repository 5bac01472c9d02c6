"""Sources of answers that people preferred: pairs of a chosen and a rejected answer, and answers with a thumb.

A document is one prompt with its answers. `framework.data.comparisons` reads the formats,
`framework.data.preference_codec` writes the tokens, `framework.data.preference_rows` makes rows of them.
"""

from __future__ import annotations

import abc
import json
import platform
from collections.abc import Iterator
from typing import Any, Literal

from framework.config import Fraction, PositiveInt, component
from framework.data.comparisons import Judged, Words, pair_of, thumbs_of
from framework.data.files import DataFile
from framework.data.library_pairs import LIBRARY_PAIRS_VERSION, pairs_of_code
from framework.data.preference_codec import PreferenceCodec
from framework.data.preference_rows import JudgedRows, PairRows, ThumbRows
from framework.data.sources import ExampleSource, StdlibSource, rows_of_file, split_of
from framework.data.token_files import TokenStream
from framework.data.tokenizers import Tokenizer


class JudgedSource(ExampleSource):
    """The base of sources of judged answers.

    Attributes:
        noun: what an example is called, in the plural.
    """

    noun: str

    def __init__(
        self,
        *,
        paths: list[str],
        split: Literal["all", "train", "validation"] = "all",
        validation_fraction: Fraction = 0.05,
        strings: Literal["text", "messages"] = "text",
        unusable: Literal["error", "leave_out"] = "error",
        packed: bool = True,
        template_variables: dict[str, Any] = {},  # noqa: B006
    ):
        # These attributes are the source's settings, and so decide its digest.
        self.paths = paths
        self.split = split
        self.validation_fraction = validation_fraction
        self.strings = strings
        self.unusable = unusable
        self.packed = packed
        self.template_variables = template_variables

    @abc.abstractmethod
    def judged(self, row: Any) -> list[Judged]:
        """Returns the examples of a row. Raises ValueError, naming the field."""

    @abc.abstractmethod
    def rows_of(self, stream: TokenStream, seq_len: int, seed: int | None) -> JudgedRows:
        """Returns the rows of the examples that fit."""

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        # The same tokens are packed in one way or another.
        del settings["packed"]
        return settings

    def read(self, file: DataFile) -> Iterator[str]:
        """Yields each example as JSON: [place, prompt, [[verdict, answer], ...], tools]; without answers where it is
        left out."""
        for place, row in rows_of_file(file):
            try:
                examples = self.judged(row)
                part = split_of(_identity(examples, row), self.validation_fraction)
                if self.split not in ("all", part):
                    continue
                for example in examples:
                    yield self._document(f"{file}, {place}", example, row.get("tools"))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, {place}: {error}") from error

    def _document(self, place: str, example: Judged, tools: Any) -> str:
        answers = example.answers
        problem = example.problem
        if problem is not None:
            if self.unusable == "error":
                raise ValueError(f'{problem}; expected an answer to learn from, or unusable="leave_out" of the source')
            answers = []
        return json.dumps([place, example.prompt, answers, tools], ensure_ascii=False)

    def training_texts(self) -> Iterator[str]:
        """Yields prompts and answers."""
        for document in self.documents():
            _, prompt, answers, _ = json.loads(document)
            for words in [prompt, *(answer for _, answer in answers)]:
                yield _text_of(words)

    def codec(self, tokenizer: Tokenizer) -> Tokenizer:
        return PreferenceCodec(tokenizer, self.template_variables)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.has_text:
            raise ValueError(f"{type(self).__name__} needs a tokenizer of text, given {type(tokenizer).__name__}")

    def rows(self, stream: TokenStream, seq_len: int, seed: int | None) -> JudgedRows:
        rows = self.rows_of(stream, seq_len, seed)
        if rows.first_unusable is not None and self.unusable == "error":
            document, problem = rows.first_unusable
            raise ValueError(
                f"{self._place(document)}: {problem}; expected a shorter prompt, a longer data.seq_len, or "
                'unusable="leave_out" of the source'
            )
        if not rows.num_rows:
            raise ValueError(f"no {self.noun} fit in rows of data.seq_len={seq_len}")
        return rows

    def _place(self, number: int) -> str:
        """File and row of a document."""
        for index, document in enumerate(self.documents()):
            if index == number:
                return json.loads(document)[0]
        return f"{self.noun}, number {number}"


@component
class PairSource(JudgedSource):
    """Pairs of answers, of which one was preferred, from JSON lines or Parquet files.

    A row has "chosen" and "rejected", and "prompt" unless both hold it as their common beginning. Each is a text, which
    is read as it stands and ends with the tokenizer's end token, or a list of messages, which need the chat template of
    a PretrainedTokenizer; "system" and "tools" beside messages are read too. Both answers of a pair stand in one row,
    the chosen one first, and are cut where the row has no room for them.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; Parquet, CSV or TSV by its ending.
        split: "all", or one of two disjoint parts; the sha256 of a prompt decides to which its answers belong.
        validation_fraction: about so much of all prompts is "validation".
        strings: "messages" has the chat template write texts as well, a prompt as what the user says.
        unusable: what becomes of a pair whose prompt leaves no room for two answers in a row, or whose answers are
            empty or the same: it is refused, or left out and counted.
        packed: put several pairs into a row, not one.
        template_variables: what the template may ask for, such as {"enable_thinking": false}.
    """

    noun = "pairs"
    row_arrays = ("ends",)

    def judged(self, row: Any) -> list[Judged]:
        return [pair_of(row, strings_are_messages=self.strings == "messages")]

    def rows_of(self, stream: TokenStream, seq_len: int, seed: int | None) -> PairRows:
        return PairRows(stream, seq_len, seed, packed=self.packed)


@component
class ThumbSource(JudgedSource):
    """Answers that were found good or bad, each on its own, from JSON lines or Parquet files; for KTO.

    A row has "prompt", "completion" and "label" (true or false, or 1 or 0), or "messages" and "label"; one with
    "chosen" and "rejected" is two of them. Texts and messages are read as by a PairSource. Beside each answer stands,
    in the same row, its prompt with another one's answer, for KTO's estimate of the KL divergence.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; Parquet, CSV or TSV by its ending.
        split: "all", or one of two disjoint parts; the sha256 of a prompt decides to which its answers belong.
        validation_fraction: about so much of all prompts is "validation".
        strings: "messages" has the chat template write texts as well, a prompt as what the user says.
        unusable: what becomes of an answer that is empty, or whose prompt leaves no room for two answers in a row: it
            is refused, or left out and counted.
        packed: put several answers into a row, not one and the other's beside it.
        template_variables: what the template may ask for, such as {"enable_thinking": false}.
    """

    noun = "judged answers"
    row_arrays = ("ends", "labels")

    def judged(self, row: Any) -> list[Judged]:
        return thumbs_of(row, strings_are_messages=self.strings == "messages")

    def rows_of(self, stream: TokenStream, seq_len: int, seed: int | None) -> ThumbRows:
        return ThumbRows(stream, seq_len, seed, packed=self.packed)


@component
class StdlibPairs(PairSource):
    """Pairs of the standard library's source: what follows some lines of a file, and the same words in another order.

    Args:
        split: "train" or "validation", by files as for StdlibSource.
        every: of each file's pairs, the first and each so many behind it.
        packed: put several pairs into a row, not one.
    """

    def __init__(
        self,
        *,
        split: Literal["train", "validation"] = "train",
        every: PositiveInt = 1,
        packed: bool = True,
    ):
        super().__init__(paths=[], split=split, unusable="leave_out", packed=packed)
        self.every = every

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "python": platform.python_version(), "pairs": LIBRARY_PAIRS_VERSION}

    def files(self) -> list[DataFile]:
        return StdlibSource(split=self._library_split).files()

    def read(self, file: DataFile) -> Iterator[str]:
        source = StdlibSource(split=self._library_split)
        for text in source.read(file):
            for number, pair in enumerate(pairs_of_code(text)):
                if number % self.every:
                    continue
                yield self._document(f"{file}, pair {number + 1}", pair, None)

    @property
    def _library_split(self) -> Literal["train", "validation"]:
        return "validation" if self.split == "validation" else "train"


def _identity(examples: list[Judged], row: Any) -> str:
    """What decides the part of a row: its prompt, so that no prompt is in both; without one, all that it says."""
    identity = examples[0].prompt or [row.get(name) for name in sorted(row)]
    return json.dumps(identity, ensure_ascii=False)


def _text_of(words: Words) -> str:
    """The text of a prompt or an answer, of messages what they say."""
    if isinstance(words, str):
        return words
    return "\n".join(message.get("content") or "" for message in words)
