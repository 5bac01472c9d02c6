"""Reads the rows of data files: JSON lines, CSV and Parquet."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from typing import Any

from plimsoll.framework.config import did_you_mean
from plimsoll.framework.data.file_formats import FORMAT_BY_EXTENSION, get_extension
from plimsoll.framework.data.files import DataFile, readable
from plimsoll.framework.files.text_files import parse_json

_CHUNK_BYTES = 1 << 20
_MAX_FIELD_CHARACTERS = 1 << 30


def text_field(record: object, field: str) -> str:
    """Returns the text in a field of a JSON object.

    Raises:
        ValueError: there is no such text. The message gives the reason.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, given {type(record).__name__}")
    if field not in record:
        raise ValueError(f"no field {field!r}{did_you_mean(field, record)}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is {type(text).__name__}, expected text")
    # Encoding is a check: JSON can contain an unpaired surrogate, which no tokenizer accepts.
    text.encode("utf-8")
    return text


def read_file_rows(file: DataFile) -> Iterator[tuple[str, Any]]:
    """Yields (location, row) for each row of a file: Parquet, CSV or TSV by file extension, otherwise JSON lines."""
    if file.path.endswith(".parquet"):
        return parquet_rows(file)
    is_csv = FORMAT_BY_EXTENSION.get(get_extension(file.path)) == "CSV"
    return csv_rows(file) if is_csv else json_rows(file)


def json_rows(file: DataFile) -> Iterator[tuple[str, Any]]:
    """Yields (location, value) for each non-blank line of JSON.

    Raises:
        ValueError: a line is not JSON. The message gives the file, the line and its first byte.
    """
    numbered_lines = enumerate(split_documents(file, b"\n"), start=1)
    for number, (offset, line) in numbered_lines:
        location = f"line {number} (byte {offset})"
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        # In addition to JSONDecodeError, this catches the UnicodeDecodeError of a line that is not UTF-8.
        except ValueError as error:
            raise ValueError(f"{file}, {location}: not JSON: {error}") from error
        yield location, value


def split_documents(file: DataFile, separator: bytes | None) -> Iterator[tuple[int, bytearray]]:
    """Yields (first byte, document) for each document between separators; without one, the whole text."""
    # A chunk may end inside a document or a separator. This holds the bytes that cannot be split yet.
    unfinished = bytearray()
    offset = 0
    for chunk in file.chunks(_CHUNK_BYTES, decompress=True):
        unfinished += chunk
        if separator is None or separator not in unfinished:
            continue
        *finished_documents, unfinished = unfinished.split(separator)
        for document in finished_documents:
            yield offset, document
            offset += len(document) + len(separator)
    yield offset, unfinished


def csv_rows(file: DataFile) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (location, row) for each row of a CSV file (RFC 4180) after its header, as {column: text}.

    The delimiter is the comma, semicolon or tab, whichever is most frequent in the header. A quoted field may contain
    delimiters and line breaks.

    Raises:
        ValueError: the file has no header with distinct names, a row and the header have different numbers of fields,
            a quote is not closed, or the text is not UTF-8. The message gives the file and the line.
    """
    # The csv module's default field limit is 128 KiB; a document may be longer.
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    lines = _text_lines(file)
    header_line = next(lines, "")
    delimiter = max(",;\t", key=header_line.count)
    reader = csv.reader(itertools.chain([header_line], lines), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        if not all(header) or len(set(header)) < len(header) or not header:
            raise ValueError(f"{file}: expected a header with a distinct name for each column, given {header}")
        for fields in reader:
            if not fields:
                continue
            location = f"line {reader.line_num}"
            if len(fields) != len(header):
                raise ValueError(f"{file}, {location}: {len(fields)} fields, but the header has {len(header)}")
            yield location, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: not CSV: {error}") from error


def _text_lines(file: DataFile) -> Iterator[str]:
    """Yields the lines of a UTF-8 file with their line ends, without a byte order mark."""
    for offset, line in split_documents(file, b"\n"):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 at byte {offset + error.start}: {error.reason}") from error
        yield (text.removeprefix("\ufeff") if offset == 0 else text) + "\n"


def parquet_rows(file: DataFile, column: str | None = None) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields (location, row) for each row of a Parquet file, with one column or with all columns.

    Raises:
        ValueError: there is no such column, or the file is damaged. The message gives the file and the row.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    row = 0
    size = file.size()
    try:
        # Page checksums are verified if the writer stored them.
        options = {"filesystem": file.fs, "page_checksum_verification": True}
        with readable(file.name), ParquetFile(file.path, **options) as reader:
            columns = None
            if column is not None:
                names = reader.schema_arrow.names
                if column not in names:
                    raise ValueError(f"{file}: no column {column!r}{did_you_mean(column, names)}")
                columns = [column]
            # Only a few hundred rows at a time become Python objects.
            for batch in reader.iter_batches(256, columns=columns):
                for values in batch.to_pylist():
                    yield f"row {row}", values
                    row += 1
                # pyarrow reads the bytes itself, without `file`, so progress is estimated from rows.
                file.position = size * row // reader.metadata.num_rows
    except (FileNotFoundError, PermissionError):
        # `readable` has already named the file; these are OSErrors, but do not indicate damage.
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: damaged, truncated or not Parquet, after row {row}: {reason}") from error
