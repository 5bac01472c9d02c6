"""Sequences that are scored as a whole: texts or conversations with a class, and pairs with one preferred sequence.

A score is read at the last token, which is therefore an input of the model: n tokens take n columns of a row, whereas
n tokens of language-modeling text take n - 1. For each row of the data, a token file has the separator, the class if
there is one, and the sequences, with a mark between two of them; these special ids come after the tokenizer's own.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.framework.data.files import DataFile, compute_digest
from plimsoll.framework.data.packing import Batch, Examples
from plimsoll.framework.data.pretrained_tokenizer import Message, PretrainedTokenizer
from plimsoll.framework.data.sources import ExampleSource
from plimsoll.framework.data.token_files import TokenStream
from plimsoll.framework.data.tokenizers import Tokenizer

# A text, or the messages of a conversation.
Content = str | list[Message]


@dataclass(frozen=True)
class ScoredRow:
    """A row of the data.

    Attributes:
        location: file and row, for messages.
        sequences: one text or conversation; two for a pair, the chosen one first.
        label: number of the class; None for pairs.
    """

    location: str
    sequences: list[Content]
    label: int | None = None


class SequenceSource(ExampleSource):
    """Base class of sources of sequences that are scored. Only messages need a tokenizer with a chat template.

    Attributes:
        classes: names of the classes; None for pairs.
        num_sequences: number of sequences per row of the data: 2 for pairs, the chosen one first.
        append_eos: append the tokenizer's end token to a text; a conversation ends as its template defines.
        pad_token_id: tokens with this id at the end of a sequence are removed: transformers reads the score at the
            last token with another id.
        template_variables: variables passed to a chat template.
    """

    classes: list[str] | None = None
    num_sequences: int = 1
    append_eos: bool = False
    pad_token_id: int | None = None
    template_variables: dict[str, Any] = {}

    @abc.abstractmethod
    def read_scored_rows(self, file: DataFile) -> Iterator[ScoredRow]:
        """Yields the rows of a file.

        Raises:
            ValueError: a row cannot be read. The message names the file, row and field.
        """

    def read(self, file: DataFile) -> Iterator[str]:
        """Yields each row as JSON: [location, sequences, class]."""
        for row in self.read_scored_rows(file):
            yield json.dumps([row.location, row.sequences, row.label], ensure_ascii=False)

    def training_texts(self) -> Iterator[str]:
        """Yields the texts; for conversations, the contents of the messages."""
        for document in self.documents():
            _, contents, _ = json.loads(document)
            for content in contents:
                messages = [{"content": content}] if isinstance(content, str) else content
                yield from (message["content"] for message in messages if message.get("content"))

    def codec(self, tokenizer: Tokenizer) -> SequenceCodec:
        return SequenceCodec(tokenizer, self)

    def rows(self, stream: TokenStream, seq_len: int, seed: int | None) -> ScoredSequences:
        rows = ScoredSequences(stream, self, seq_len, seed)
        if not rows.num_rows:
            raise ValueError(f"there are no pairs of at most data.seq_len={seq_len} tokens")
        return rows


class SequenceCodec(Tokenizer):
    """The tokenizer of a SequenceSource's rows.

    The ids after the tokenizer's own are the classes, the mark between the sequences of a pair, and the separator.

    Args:
        tokenizer: the config's tokenizer.
        source: the source of the rows.
    """

    def __init__(self, tokenizer: Tokenizer, source: SequenceSource):
        self.tokenizer = tokenizer
        self.source = source
        self.first_class = tokenizer.vocab_size
        self.mark = self.first_class + len(source.classes or [])
        self.eos_id = self.mark + 1
        self.vocab_size = self.eos_id + 1
        template = getattr(tokenizer, "chat_template", None)
        settings = [source.classes, source.append_eos, source.pad_token_id, source.template_variables]
        # The number is the version of this encoding: increase it to invalidate cached files.
        self.digest = compute_digest([1, tokenizer.digest, template, settings])

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each row: its class, and its sequences.

        Raises:
            ValueError: a conversation cannot be rendered, or a sequence has no tokens. The message names the file and
                row.
        """
        encoded = []
        for text in texts:
            location, contents, label = json.loads(text)
            ids = [] if label is None else [self.first_class + label]
            for number, content in enumerate(contents):
                ids += [self.mark] if number else []
                try:
                    ids += self.encode(content)
                except ValueError as error:
                    raise ValueError(f"{location}: {error}") from error
            encoded.append(np.array(ids, np.int64))
        return encoded

    def encode(self, content: Content) -> list[int]:
        """Returns the tokenizer's ids of a text or a conversation, in the form that the model scores.

        Raises:
            ValueError: there is no chat template, it cannot render the conversation, or no token is left.
        """
        if isinstance(content, str):
            ids = self.tokenizer.encode_prompt(content)
            eos_id = self.tokenizer.eos_id
            if self.source.append_eos and eos_id is not None and ids[-1:] != [eos_id]:
                ids = [*ids, eos_id]
        elif isinstance(self.tokenizer, PretrainedTokenizer):
            text, _ = self.tokenizer.render(content, **self.source.template_variables)
            (encoding,) = self.tokenizer.encode_rendered([text])
            ids = encoding.ids
        else:
            raise ValueError(
                "messages need the chat template of a PretrainedTokenizer; data.tokenizer is "
                f"{type(self.tokenizer).__name__}; expected a row with text"
            )
        end = len(ids)
        while end and ids[end - 1] == self.source.pad_token_id:
            end -= 1
        if not end:
            raise ValueError(f"{str(content)[:80]!r} has no tokens to score")
        return list(ids[:end])


class ScoredSequences(Examples):
    """Rows of whole sequences, masked from each other; both sequences of a pair are in one row.

    A sequence with a class is truncated to S tokens, as in transformers. A pair that has more than S tokens in total
    is skipped: truncation could remove the difference between its sequences.

    Args:
        stream: a stream written by SequenceCodec.
        source: the source of the rows.
        seq_len: S.
        seed: as for Examples.

    Attributes:
        note: the padding, and how many sequences were truncated or skipped.
    """

    def __init__(self, stream: TokenStream, source: SequenceSource, seq_len: int, seed: int | None):
        assert stream.eos_id is not None
        # The order of the special ids is that of SequenceCodec.
        self._mark = stream.eos_id - 1
        self._first_class = self._mark - len(source.classes or [])
        self._has_classes = source.classes is not None
        values = stream.read(0, stream.num_tokens).astype(np.int64)
        starts = np.flatnonzero(values == stream.eos_id) + 1
        stops = np.append(starts[1:] - 1, len(values))
        marks = np.flatnonzero(values == self._mark)
        num_marks = np.searchsorted(marks, stops) - np.searchsorted(marks, starts)
        # Exclude the values that are not tokens: the class, and the mark between the two sequences.
        num_tokens = stops - starts - num_marks - int(self._has_classes)
        is_long = num_tokens > seq_len
        are_pairs = source.num_sequences == 2
        fits = ~is_long if are_pairs else np.ones(len(starts), bool)
        self._spans = np.stack([starts, stops], 1)[fits]
        lengths = np.minimum(num_tokens, seq_len)[fits]
        super().__init__(stream, seq_len, lengths, seed)
        what = "pairs skipped, of more than" if are_pairs else "sequences truncated to"
        self.note = (
            f"{len(lengths):,} examples, {self.padding:.1%} padding, {is_long.sum():,} {what} {seq_len:,} tokens"
        )

    def example(self, number: int) -> tuple[list[np.ndarray], int]:
        """Returns (the token ids of each sequence of an example, its class; 0 if it has none)."""
        start, stop = self._spans[number].tolist()
        values = self._stream.read(start, stop).astype(np.int64)
        label = 0
        if self._has_classes:
            label = int(values[0]) - self._first_class
            values = values[1:]
        parts = np.split(values, np.flatnonzero(values == self._mark))
        return [part[part != self._mark][: self._seq_len] for part in parts], label

    def row(self, index: int) -> Batch:
        """Returns arrays [S]: tokens, targets, weights, positions, segments, ends, and labels if there are classes.

        Weights are 1 on every token. Rows from num_rows on are padding only.
        """
        integers = ("tokens", "targets", "positions", "segments")
        floats = ("weights", "ends", *(["labels"] if self._has_classes else []))
        row: Batch = {name: np.zeros(self._seq_len, np.int32) for name in integers}
        row |= {name: np.zeros(self._seq_len, np.float32) for name in floats}
        start = 0
        segment = 0
        for number in self.get_examples(index).tolist():
            sequences, label = self.example(number)
            for tokens in sequences:
                segment += 1
                stop = start + len(tokens)
                row["tokens"][start:stop] = tokens
                row["targets"][start : stop - 1] = tokens[1:]
                row["weights"][start:stop] = 1.0
                row["positions"][start:stop] = np.arange(len(tokens))
                row["segments"][start:stop] = segment
                row["ends"][stop - 1] = 1.0
                if self._has_classes:
                    row["labels"][stop - 1] = label
                start = stop
        return row


def check_classes(sources: dict[str, object]) -> None:
    """Raises ValueError if sources of labeled sequences, keyed by label, do not all have the same classes."""
    classes_by_label = {}
    for label, source in sources.items():
        if isinstance(source, SequenceSource):
            classes_by_label[label] = source.classes
    first_label = next(iter(classes_by_label), "")
    for label, classes in classes_by_label.items():
        first_classes = classes_by_label[first_label]
        if classes != first_classes:
            raise ValueError(f"{label}.classes = {classes}; expected {first_classes}, as in {first_label}")
