"""Splits one source into two disjoint parts: one for training, and a held-out one for evaluation."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from typing import Literal

from plimsoll.framework.config import Config, Fraction, NonNegativeInt, component
from plimsoll.framework.data.files import DataFile, FileHashes
from plimsoll.framework.data.sources import DataSource, TextFiles, TokenMemmap, assign_split
from plimsoll.framework.data.token_files import TokenDType, TokenRange, TokenStream
from plimsoll.framework.data.tokenizers import Tokenizer

# From this number of files on, whole files are held out.
_MANY_FILES = 20


@component
class TextPart(DataSource):
    """One of two disjoint parts of a text source. No text is in both, and neither is empty.

    With 20 or more files of one document each, whole files are held out, by the sha256 of their names; files with
    equal content stay together. With fewer files, the end of each is held out, from the start of a line. In files
    with many documents, the sha256 of a document's text decides, so that equal documents are in one part.

    Args:
        source: config of the text source.
        split: which part to read.
        validation_fraction: approximate fraction of the text in "validation".
    """

    def __init__(
        self, *, source: Config, split: Literal["train", "validation"] = "train", validation_fraction: Fraction = 0.05
    ):
        self.source: DataSource = source.instantiate()
        if not isinstance(self.source, DataSource):
            raise ValueError(f"TextPart.source: expected a source of text, given {type(self.source).__name__}")
        self.split = split
        self.validation_fraction = validation_fraction
        self.is_whole_files = isinstance(self.source, TextFiles) and self.source.separator is None

    def files(self) -> list[DataFile]:
        files = self.source.files()
        if not self._splits_by_file:
            return files
        # Ignore the folder that all files share, so that a corpus that moved is split as before.
        folder = os.path.commonpath([file.name for file in files])
        relative_names = {file.name: file.name.removeprefix(folder) for file in files}
        held_out_names = set()
        for name, relative_name in relative_names.items():
            if assign_split(relative_name, self.validation_fraction) == "validation":
                held_out_names.add(name)
        if not held_out_names:
            # At least one file is held out.
            held_out_names.add(min(relative_names, key=lambda name: _digest(relative_names[name])))
        # Files with the same content stay together: {name of a file: name of the first file with the same content}.
        first_names: dict[str, str] = {}
        by_size: dict[int, list[DataFile]] = {}
        for file in files:
            by_size.setdefault(file.size(), []).append(file)
        for candidates in by_size.values():
            first_by_digest: dict[str, str] = {}
            for file in candidates:
                # Most files are the only ones of their size, and are not read.
                digest = FileHashes().sha256(file) if len(candidates) > 1 else ""
                first_names[file.name] = first_by_digest.setdefault(digest, file.name)
        is_validation = self.split == "validation"
        return [file for file in files if (first_names[file.name] in held_out_names) == is_validation]

    @functools.cached_property
    def _splits_by_file(self) -> bool:
        """True if each file belongs to one part as a whole; cached, so that the files are listed only once."""
        return self.is_whole_files and len(self.source.files()) >= _MANY_FILES

    def read(self, file: DataFile) -> Iterator[str]:
        moved = None if self.is_whole_files else self._moved_digest
        for document in self.source.read(file):
            if self._splits_by_file:
                yield document
            elif self.is_whole_files:
                # Training gets the beginning of the document, and validation its end.
                middle = int(len(document) * (1.0 - self.validation_fraction))
                # Lines are not split, unless the document has only one.
                line_start = document.rfind("\n", 0, middle) + 1
                cut = line_start or middle
                yield document[:cut] if self.split == "train" else document[cut:]
            else:
                is_held_out = assign_split(document, self.validation_fraction) == "validation"
                if moved is not None and _digest(document) == moved:
                    is_held_out = not is_held_out
                if is_held_out == (self.split == "validation"):
                    yield document

    @functools.cached_property
    def _moved_digest(self) -> bytes | None:
        """The sha256 of a document to move to the other part, which would otherwise be empty.

        It is None for all but small sources: the search stops at the first document of the second part.

        Raises:
            ValueError: all documents are equal.
        """
        parts = set()
        digests = set()
        for file in self.source.files():
            for document in self.source.read(file):
                parts.add(assign_split(document, self.validation_fraction))
                if len(parts) == 2:
                    return None
                digests.add(_digest(document))
        if len(digests) == 1:
            raise ValueError(
                "all documents of the data are equal, so none can be held out; add other documents, or set "
                "data.validation to another source"
            )
        return min(digests, default=None)

    def codec(self, tokenizer: Tokenizer) -> Tokenizer:
        return self.source.codec(tokenizer)

    def settings(self) -> dict[str, object]:
        return {
            "split": self.split,
            "validation_fraction": self.validation_fraction,
            # Increase this number if the division of documents changes, so that cached tokens are rebuilt.
            "division": 2,
            "source": type(self.source).__name__,
            **self.source.settings(),
        }


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@component
class TokenPart(TokenMemmap):
    """One of two disjoint parts of token files: the beginning of the stream, or its end.

    Args:
        path: as for TokenMemmap.
        split: which part to read.
        validation_fraction: fraction of the tokens in "validation".
        dtype: as for TokenMemmap.
        eos_id: as for TokenMemmap.
        verify: as for TokenMemmap.
    """

    def __init__(
        self,
        *,
        path: str,
        split: Literal["train", "validation"] = "train",
        validation_fraction: Fraction = 0.05,
        dtype: TokenDType | None = None,
        eos_id: NonNegativeInt | None = None,
        verify: bool = True,
    ):
        super().__init__(path=path, dtype=dtype, eos_id=eos_id, verify=verify)
        self.split = split
        self.validation_fraction = validation_fraction

    def open(self, tokenizer: Tokenizer, hashes: FileHashes, cache_dir: str | None = None) -> TokenStream:
        stream = super().open(tokenizer, hashes, cache_dir)
        middle = int(stream.num_tokens * (1.0 - self.validation_fraction))
        if self.split == "train":
            return TokenRange(stream, 0, middle)
        return TokenRange(stream, middle, stream.num_tokens)
