"""Plain text and JSON lines, local or behind any fsspec URL, compressed or not.

May import: framework.data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from framework.config import did_you_mean
from framework.data.sources.base import FileSource, damage_located, decode
from framework.data.storage import DataFile

_CHUNK = 1 << 20


class TextFiles(FileSource):
    """UTF-8 text files; each file is one document, or several between `separator`s.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order (the matches of a glob sorted by name).
        separator: text between two documents of one file (for instance "<|endoftext|>"); it belongs to neither.
        compression: "infer" decompresses .gz, .bz2, .xz and .zip by their names; None reads them as they are.
    """

    def __init__(
        self, *, paths: list[str], separator: str | None = None, compression: Literal["infer"] | None = "infer"
    ):
        super().__init__(paths=paths, compression=compression)
        if separator == "":
            raise ValueError("separator: expected text or None, given ''")
        self.separator = separator

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "separator": self.separator}

    def documents(self) -> Iterator[str]:
        for file in self.files():
            if self.separator is None:
                data = b"".join(_chunks(file, self.compression))
                yield decode(data, file, 0)
            else:
                yield from _split(file, self.compression, self.separator.encode())


class JsonLines(FileSource):
    """One JSON object per line; the text stands in `field`.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order (the matches of a glob sorted by name).
        field: the key of the text in each object.
        compression: "infer" decompresses .gz, .bz2, .xz and .zip by their names; None reads them as they are.
    """

    def __init__(self, *, paths: list[str], field: str = "text", compression: Literal["infer"] | None = "infer"):
        super().__init__(paths=paths, compression=compression)
        self.field = field

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "field": self.field}

    def documents(self) -> Iterator[str]:
        for file in self.files():
            offset = 0
            for number, line in enumerate(_lines(file, self.compression), start=1):
                if line.strip():
                    yield self._text(line, f"{file}, line {number} (byte {offset})")
                offset += len(line)

    def _text(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError both are
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected a JSON object, given {type(record).__name__}")
        if self.field not in record:
            hint = did_you_mean(self.field, record)
            raise ValueError(f"{where}: no field {self.field!r}; the object has {', '.join(map(repr, record))}{hint}")
        text = record[self.field]
        if not isinstance(text, str):
            raise ValueError(f"{where}: field {self.field!r} is {type(text).__name__}, expected text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no tokenizer takes
            raise ValueError(f"{where}: field {self.field!r} is not valid Unicode: {error.reason}") from error
        return text


def _chunks(file: DataFile, compression: str | None) -> Iterator[bytes]:
    done = 0
    with damage_located(file, lambda: f"byte {done} of its text"), file.open(compression) as stream:
        while chunk := stream.read(_CHUNK):
            done += len(chunk)
            yield chunk


def _lines(file: DataFile, compression: str | None) -> Iterator[bytes]:
    number = 0
    with damage_located(file, lambda: f"line {number}"), file.open(compression) as stream:
        while line := stream.readline():
            number += 1
            yield line


def _split(file: DataFile, compression: str | None, separator: bytes) -> Iterator[str]:
    rest, offset = b"", 0  # `offset`: where `rest` begins in the file's text
    for chunk in _chunks(file, compression):
        *documents, rest = (rest + chunk).split(separator)
        for document in documents:
            yield decode(document, file, offset)
            offset += len(document) + len(separator)
    yield decode(rest, file, offset)
