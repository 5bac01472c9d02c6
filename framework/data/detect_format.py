"""--data=PATH: detects the kind of the user's data, and how to split it for training and evaluation.

detect_format("my_folder/")  # text, JSON lines, Parquet, token files, conversations, preference pairs, labeled answers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data import hub_data, local_data
from plimsoll.framework.data.chats import ChatSource, parse_conversation
from plimsoll.framework.data.file_formats import ROW_FORMATS, DataFormat, DataListing
from plimsoll.framework.data.files import DataFile
from plimsoll.framework.data.held_out import TextPart, TokenPart
from plimsoll.framework.data.preference_formats import LabeledAnswers, is_pair, is_unpaired, parse_pair, parse_unpaired
from plimsoll.framework.data.preferences import PairSource, UnpairedSource
from plimsoll.framework.data.sources import (
    Csv,
    ExampleSource,
    JsonLines,
    Parquet,
    TextFiles,
    TokenMemmap,
    read_file_rows,
)
from plimsoll.framework.files.hub_names import is_hub_url

# Columns that hold the text of a document, the most likely first.
_TEXT_FIELDS = ("text", "content", "document", "body", "story")
# Name of a source's examples in the startup message.
_NOUNS: dict[type[ExampleSource], str] = {
    ChatSource: "conversations",
    PairSource: "preference pairs",
    UnpairedSource: "labeled answers",
}


class _Rows(NamedTuple):
    """Content of the rows of the user's files.

    Attributes:
        examples: the source that reads a row as a conversation, a preference pair or a labeled answer; None if a row
            is none of these.
        needs_template: examples are messages, which need the chat template of a model.
        text_field: the field that holds a document; None if rows have no such field.
        text_fields: all fields that hold some text.
    """

    examples: type[ExampleSource] | None = None
    needs_template: bool = False
    text_field: str | None = None
    text_fields: tuple[str, ...] = ()


class _SplitPart(NamedTuple):
    """The part of the files that a source reads, when one set of files is split in two."""

    split: str
    validation_fraction: float


@dataclass(frozen=True)
class DetectedData:
    """The user's data, as config nodes.

    Attributes:
        source: config of the training source.
        held_out: config of the evaluation source.
        has_text: False for token files.
        needs_template: examples are messages, which need the chat template of a model.
        line: a summary of what was found and how it was split.
        classes: class names of texts with labels; None for other data.
    """

    source: Config
    held_out: Config
    has_text: bool
    needs_template: bool
    line: str
    classes: list[str] | None = None


def detect_format(path: str, validation_fraction: float = 0.05) -> DetectedData:
    """Inspects a file, a folder, a glob, an fsspec URL, or a Hub dataset.

    A folder is searched recursively; hidden files are skipped. If file names indicate the splits (train*, val*, test*,
    ...), the data is split by those names.

    Args:
        path: location of the data.
        validation_fraction: approximate fraction to hold out if the names indicate no splits.

    Raises:
        FileNotFoundError, PermissionError, ValueError: the data does not exist, or cannot be read.
    """
    listing = hub_data.data_listing(path) if is_hub_url(path) else local_data.data_listing(path)
    rows = _rows(listing)
    train_part = held_out_part = None
    held_out_paths = listing.validation
    if not held_out_paths:
        train_part = _SplitPart("train", validation_fraction)
        held_out_part = _SplitPart("validation", validation_fraction)
        held_out_paths = listing.train
    return DetectedData(
        source=_source(listing.data_format, rows, listing.train, train_part),
        held_out=_source(listing.data_format, rows, held_out_paths, held_out_part),
        has_text=listing.data_format != "tokens",
        needs_template=rows.needs_template,
        line=_line(listing, rows, validation_fraction),
    )


def _line(listing: DataListing, rows: _Rows, validation_fraction: float) -> str:
    """Returns a summary of the data and of its split."""
    what = listing.data_format if rows.examples is None else _NOUNS[rows.examples]
    files = _format_count(listing.num_train, "file")
    line = f"data: {what} from {listing.location}: {files}"
    if listing.validation:
        line += f" for training, {listing.num_validation} held out, {listing.split_basis}"
    else:
        line += f", {validation_fraction:.0%} held out"
    if len(rows.text_fields) > 1:
        line += f"; the text is in {rows.text_field!r} (of {', '.join(rows.text_fields)})"
    if listing.left_out:
        line += f"; left out: {', '.join(f'{count} {ending}' for ending, count in listing.left_out.most_common(5))}"
    return line


def _rows(listing: DataListing) -> _Rows:
    """Inspects the first row, if the files have rows."""
    if listing.data_format not in ROW_FORMATS:
        return _Rows()
    location, row = _first_row(listing.first)
    try:
        # Check these first: their fields are more specific than those of a conversation, which such a row may also
        # have.
        if is_pair(row):
            return _Rows(examples=PairSource, needs_template=_has_messages(parse_pair(row)))
        if is_unpaired(row):
            return _Rows(examples=UnpairedSource, needs_template=_has_messages(*parse_unpaired(row)))
        _check_no_label(row)
    except ValueError as error:
        raise ValueError(f"{listing.first}, {location}: {error}") from error
    if _is_conversation(row):
        return _Rows(examples=ChatSource, needs_template=True)
    text_fields = tuple(name for name, value in row.items() if isinstance(value, str))
    if not text_fields:
        names = ", ".join(row) or "it has none"
        raise ValueError(f"{listing.first}: no field of its first row has text: {names}")
    usual_fields = [name for name in _TEXT_FIELDS if name in text_fields]
    longest_field = max(text_fields, key=lambda name: len(row[name]))
    return _Rows(text_field=[*usual_fields, longest_field][0], text_fields=text_fields)


def _check_no_label(row: dict[str, Any]) -> None:
    """Raises ValueError if a row that is not a labeled answer has a label.

    A language model would learn the text of good and bad rows alike, as if the label were not there.
    """
    if "label" in row:
        raise ValueError(
            f"field 'label' is {str(row['label'])[:40]!r}, which the next-token loss does not use; expected true or "
            "false (1 or 0) with prompt and completion or with messages (KTO), a classifier (--config=classify:DIR or "
            "lora-classify:DIR) for class names, or a file without labels"
        )


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _has_messages(*examples: LabeledAnswers) -> bool:
    """Returns whether any answer is a list of messages rather than a text."""
    return any(not isinstance(answer, str) for example in examples for _, answer in example.answers)


def _first_row(file: DataFile) -> tuple[str, dict[str, Any]]:
    """Returns (location, row) of the first row of a file. Raises ValueError if it is absent, or not a JSON object."""
    for location, row in read_file_rows(file):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, {location}: expected a JSON object, given {type(row).__name__}")
        return location, row
    raise ValueError(f"{file} has no rows")


def _is_conversation(row: dict[str, Any]) -> bool:
    """Returns whether ChatSource can read a row."""
    try:
        parse_conversation(row)
    except (ValueError, TypeError):
        return False
    return True


def _source(data_format: DataFormat, rows: _Rows, paths: Sequence[str], part: _SplitPart | None) -> Config:
    """Returns the config of a source that reads one part of the files, or all of them."""
    part_fields = part._asdict() if part else {}
    if data_format == "tokens":
        if len(paths) > 1:
            raise ValueError(f"{len(paths)} token files: select them with one glob in --config.data.source.path")
        return config_for(TokenPart if part else TokenMemmap, path=paths[0], **part_fields)
    if rows.examples is not None:
        return config_for(rows.examples, paths=list(paths), **part_fields)
    if data_format == "JSON lines":
        documents = config_for(JsonLines, paths=list(paths), field=rows.text_field)
    elif data_format == "Parquet":
        documents = config_for(Parquet, paths=list(paths), column=rows.text_field)
    elif data_format == "CSV":
        documents = config_for(Csv, paths=list(paths), column=rows.text_field)
    else:
        documents = config_for(TextFiles, paths=list(paths))
    return config_for(TextPart, source=documents, **part_fields) if part else documents
