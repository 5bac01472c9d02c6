"""Preference data sources: pairs of a chosen and a rejected answer, and answers with a binary label.

A document is one prompt with its answers. `framework.data.preference_formats` parses the formats,
`framework.data.preference_codec` encodes the tokens, and `framework.data.preference_rows` builds the rows.
"""

from __future__ import annotations

import abc
import itertools
import json
import platform
from collections.abc import Iterator
from typing import ClassVar, Literal

from plimsoll.framework.config import Fraction, PositiveInt, component
from plimsoll.framework.data.files import DataFile
from plimsoll.framework.data.library_pairs import LIBRARY_PAIRS_VERSION, make_pairs
from plimsoll.framework.data.preference_codec import PreferenceCodec
from plimsoll.framework.data.preference_formats import LabeledAnswers, parse_pair, parse_unpaired
from plimsoll.framework.data.preference_rows import PairRows, PreferenceRows, UnpairedRows
from plimsoll.framework.data.row_files import read_file_rows
from plimsoll.framework.data.sources import ExampleSource, StdlibSource, assign_split
from plimsoll.framework.data.token_files import TokenStream
from plimsoll.framework.data.tokenizers import Tokenizer


class PreferenceSource(ExampleSource):
    """Base class of preference data sources.

    Attributes:
        noun: name of the examples, in the plural.
        rows_type: class of the rows of the examples.
    """

    noun: str
    rows_type: ClassVar[type[PairRows | UnpairedRows]]

    def __init__(
        self,
        *,
        paths: list[str],
        split: Literal["all", "train", "validation"] = "all",
        validation_fraction: Fraction = 0.05,
        strings: Literal["text", "messages"] = "text",
        unusable: Literal["error", "leave_out"] = "error",
        packed: bool = True,
        template_variables: dict[str, object] = {},  # noqa: B006
    ):
        # These attributes are the source's settings, and so determine its digest.
        self.paths = paths
        self.split = split
        self.validation_fraction = validation_fraction
        self.strings = strings
        self.unusable = unusable
        self.packed = packed
        self.template_variables = template_variables

    @abc.abstractmethod
    def parse_examples(self, row: object) -> list[LabeledAnswers]:
        """Returns the examples of a row. Raises ValueError with the name of the field."""

    def settings(self) -> dict[str, object]:
        settings = super().settings()
        # Packing does not affect the tokens.
        del settings["packed"]
        return settings

    def read(self, file: DataFile) -> Iterator[str]:
        """Yields each example as JSON: [location, prompt, [[label, answer], ...], tools].

        A skipped example has no answers.
        """
        for location, row in read_file_rows(file):
            try:
                examples = self.parse_examples(row)
                # Rows with one prompt stay in one part. Without a prompt, the whole row decides.
                identity = examples[0].prompt or [row.get(name) for name in sorted(row)]
                part = assign_split(json.dumps(identity, ensure_ascii=False), self.validation_fraction)
                if self.split not in ("all", part):
                    continue
                for example in examples:
                    yield self._document(f"{file}, {location}", example, row.get("tools"))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, {location}: {error}") from error

    def _document(self, location: str, example: LabeledAnswers, tools: object) -> str:
        answers = example.answers
        problem = example.problem
        if problem is not None:
            if self.unusable == "error":
                raise ValueError(f'{problem}; correct the row, or set unusable="leave_out" in the source')
            answers = []
        return json.dumps([location, example.prompt, answers, tools], ensure_ascii=False)

    def training_texts(self) -> Iterator[str]:
        """Yields prompts and answers."""
        for document in self.documents():
            _, prompt, answers, _ = json.loads(document)
            for content in [prompt, *(answer for _, answer in answers)]:
                messages = [{"content": content}] if isinstance(content, str) else content
                yield "\n".join(message.get("content") or "" for message in messages)

    def codec(self, tokenizer: Tokenizer) -> Tokenizer:
        return PreferenceCodec(tokenizer, self.template_variables)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.has_text:
            raise ValueError(f"{type(self).__name__} needs a tokenizer of text, given {type(tokenizer).__name__}")

    def rows(self, stream: TokenStream, seq_len: int, seed: int | None) -> PreferenceRows:
        rows = self.rows_type(stream, seq_len, seed, packed=self.packed)
        if rows.first_unusable is not None and self.unusable == "error":
            number, problem = rows.first_unusable
            location = f"{self.noun}, number {number}"
            for document in itertools.islice(self.documents(), number, number + 1):
                location = json.loads(document)[0]
            raise ValueError(
                f"{location}: {problem}; expected a shorter prompt, a longer data.seq_len, or "
                'unusable="leave_out" in the source'
            )
        if not rows.num_rows:
            raise ValueError(f"no {self.noun} fit in rows of data.seq_len={seq_len}")
        return rows


@component
class PairSource(PreferenceSource):
    """Pairs of a chosen and a rejected answer, from JSON lines or Parquet files.

    A row has "chosen" and "rejected", and "prompt" unless it is the common prefix of both. Each is a text, which is
    used verbatim and ends with the tokenizer's end token, or a list of messages, which need the chat template of a
    PretrainedTokenizer; rows with messages may also have "system" and "tools". Both answers of a pair are in one row,
    the chosen one first, and are truncated if the row has no room for them.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; Parquet, CSV or TSV by file extension.
        split: "all", or one of two disjoint parts; the sha256 of a prompt decides which part its answers belong to.
        validation_fraction: approximate fraction of the prompts in "validation".
        strings: "messages" applies the chat template to texts too, with a prompt as a user message.
        unusable: handling of a pair whose prompt leaves no room for two answers in a row, or whose answers are empty
            or the same: raise an error, or skip and count it.
        packed: put several pairs into a row instead of one.
        template_variables: variables passed to the template, such as {"enable_thinking": false}.
    """

    noun = "pairs"
    rows_type = PairRows
    row_arrays = ("ends",)

    def parse_examples(self, row: object) -> list[LabeledAnswers]:
        return [parse_pair(row, strings_are_messages=self.strings == "messages")]


@component
class UnpairedSource(PreferenceSource):
    """Answers labeled as desirable or undesirable, from JSON lines or Parquet files; for KTO.

    A row has "prompt", "completion" and "label" (true or false, or 1 or 0), or "messages" and "label"; a row with
    "chosen" and "rejected" counts as two answers. Texts and messages are read as by a PairSource. Each answer shares
    a row with its prompt followed by another answer, for KTO's estimate of the KL divergence.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; Parquet, CSV or TSV by file extension.
        split: "all", or one of two disjoint parts; the sha256 of a prompt decides which part its answers belong to.
        validation_fraction: approximate fraction of the prompts in "validation".
        strings: "messages" applies the chat template to texts too, with a prompt as a user message.
        unusable: handling of an answer that is empty, or whose prompt leaves no room for two answers in a row: raise
            an error, or skip and count it.
        packed: put several answers into a row instead of only one and its mismatched answer.
        template_variables: variables passed to the template, such as {"enable_thinking": false}.
    """

    digest_name = "ThumbSource"
    noun = "labeled answers"
    rows_type = UnpairedRows
    row_arrays = ("ends", "labels")

    def parse_examples(self, row: object) -> list[LabeledAnswers]:
        return parse_unpaired(row, strings_are_messages=self.strings == "messages")


@component
class StdlibPairs(PairSource):
    """Pairs from the standard library's source code: the lines that follow a prompt, and the same words reordered.

    Args:
        split: "train" or "validation", by files as for StdlibSource.
        every: stride over each file's pairs: use the first pair, then every `every`-th one.
        packed: put several pairs into a row instead of one.
    """

    split: Literal["train", "validation"]

    def __init__(self, *, split: Literal["train", "validation"] = "train", every: PositiveInt = 1, packed: bool = True):
        super().__init__(paths=[], split=split, unusable="leave_out", packed=packed)
        self.every = every

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "python": platform.python_version(), "pairs": LIBRARY_PAIRS_VERSION}

    def files(self) -> list[DataFile]:
        return StdlibSource(split=self.split).files()

    def read(self, file: DataFile) -> Iterator[str]:
        source = StdlibSource(split=self.split)
        for text in source.read(file):
            for number, pair in enumerate(make_pairs(text)):
                if number % self.every:
                    continue
                yield self._document(f"{file}, pair {number + 1}", pair, None)
