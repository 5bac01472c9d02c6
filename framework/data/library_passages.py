"""Passages of the standard library's source code for scoring: with the type of text as the class, or in pairs.

They come from the files of StdlibSource, so that no file has passages in both splits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Literal

from plimsoll.framework.config import PositiveInt, component
from plimsoll.framework.data.files import DataFile
from plimsoll.framework.data.scored_sequences import ScoredRow, SequenceSource
from plimsoll.framework.data.sources import StdlibSource

Split = Literal["train", "validation"]
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
# Minimum number of different words in a passage that is used in a pair.
_MIN_WORDS = 8
_COMMENT = re.compile(r"(?:^[ \t]*#[^\n]*\n){2,}", re.MULTILINE)


class _LibrarySource(SequenceSource):
    """Base class: settings and files are those of StdlibSource."""

    def __init__(self, split: Split, characters: int):
        self.split: Split = split
        self.characters = characters

    def settings(self) -> dict[str, object]:
        return {**StdlibSource(split=self.split).settings(), "characters": self.characters, "version": 2}

    def files(self) -> list[DataFile]:
        return StdlibSource(split=self.split).files()


@component
class LibraryPassages(_LibrarySource):
    """Passages of the standard library, classified as code, comment or docstring.

    Obvious markers, quotes and the # of each line, are removed. For each class, a file contributes as many passages
    as its rarest class has, and at least one of each class that it contains.

    Args:
        split: which part of the files to read.
        characters: maximum length of a passage.
    """

    row_arrays = ("ends", "labels")

    def __init__(self, *, split: Literal["train", "validation"] = "train", characters: PositiveInt = 300):
        super().__init__(split, characters)
        self.classes: list[str] = ["code", "comment", "docstring"]  # pyright: ignore[reportIncompatibleVariableOverride]

    def read_scored_rows(self, file: DataFile) -> Iterator[ScoredRow]:
        """See SequenceSource.read_scored_rows."""
        text = file.read().decode("utf-8", errors="replace")
        comments = [re.sub(r"(?m)^[ \t]*#+ ?", "", match[0]) for match in _COMMENT.finditer(text)]
        docstrings = [match[1] for match in _DOCSTRING.finditer(text)]
        code = _COMMENT.sub("", _DOCSTRING.sub("", text))
        code_chunks = [code[start : start + self.characters] for start in range(0, len(code), self.characters)]
        passages = []
        for texts in (code_chunks, comments, docstrings):
            passages.append([stripped for one in texts if len(stripped := one.strip()[: self.characters]) >= 40])
        fewest = max(1, min(len(texts) for texts in passages))
        for label, texts in enumerate(passages):
            for number, passage in enumerate(texts[:fewest]):
                yield ScoredRow(f"{file}, {self.classes[label]} {number}", [passage], label)


@component
class LibraryPairs(_LibrarySource):
    """A passage of the standard library and its continuation, against the same words in another order.

    Args:
        split: which part of the files to read.
        characters: length of the prompt, and of the continuation.
    """

    num_sequences = 2
    row_arrays = ("ends",)

    def __init__(self, *, split: Literal["train", "validation"] = "train", characters: PositiveInt = 80):
        super().__init__(split, characters)

    def read_scored_rows(self, file: DataFile) -> Iterator[ScoredRow]:
        """See SequenceSource.read_scored_rows."""
        text = file.read().decode("utf-8", errors="replace")
        size = 2 * self.characters
        for start in range(0, len(text) - size + 1, size):
            prompt = text[start : start + self.characters]
            answer = text[start + self.characters : start + size]
            # Words, and the separators between them, which keep their positions.
            words = re.split(r"(\W+)", answer)
            shuffled = words[::2]
            # With so few different words, another order may be just as plausible.
            if len(set(shuffled)) < _MIN_WORDS:
                continue
            # Sort by hashes, so that the pairs are the same on every machine.
            seed = hashlib.sha256(answer.encode()).digest()
            keys = [
                hashlib.sha256(seed + bytes([number % 256, number // 256])).digest() for number in range(len(shuffled))
            ]
            shuffled = [word for _, word in sorted(zip(keys, shuffled, strict=True), key=lambda pair: pair[0])]
            words[::2] = shuffled
            corrupted = "".join(words)
            if corrupted != answer:
                yield ScoredRow(f"{file}, character {start}", [prompt + answer, prompt + corrupted])
