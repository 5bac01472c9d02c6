"""What --data=PATH means: finds the kind of somebody's own data, and how it is split for training and evaluation.

recognized("my_folder/")  # text, JSON lines, Parquet, token files, conversations, pairs of answers, judged answers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from framework.config import Config, config_for
from framework.data import hub_data, local_data
from framework.data.chats import ChatSource, conversation
from framework.data.comparisons import Judged, is_pair, is_thumb, pair_of, thumbs_of
from framework.data.files import DataFile
from framework.data.held_out import TextPart, TokenPart
from framework.data.kinds import ROW_KINDS, DataListing, Kind
from framework.data.preferences import PairSource, ThumbSource
from framework.data.sources import Csv, ExampleSource, JsonLines, Parquet, TextFiles, TokenMemmap, rows_of_file
from framework.files.hub_names import is_hub_url

# Columns that hold the text of a document, the likeliest first.
_TEXT_FIELDS = ("text", "content", "document", "body", "story")
# What the start line calls the examples of a source.
_NOUNS: dict[type[ExampleSource], str] = {
    ChatSource: "conversations",
    PairSource: "pairs of answers",
    ThumbSource: "judged answers",
}


class _Rows(NamedTuple):
    """What the rows of somebody's files hold.

    Attributes:
        examples: the source that reads a row as a conversation, a pair or a judged answer; None where a row is none.
        needs_template: an example is of messages, which need the chat template of a model.
        text_field: the field that holds a document; None where rows have no such field.
        text_fields: all fields that hold some text.
    """

    examples: type[ExampleSource] | None = None
    needs_template: bool = False
    text_field: str | None = None
    text_fields: tuple[str, ...] = ()


class _Part(NamedTuple):
    """The part of the same files that a source reads."""

    split: str
    validation_fraction: float


@dataclass(frozen=True)
class Recognized:
    """Somebody's own data, as a config has it.

    Attributes:
        source: config of the source that is trained on.
        held_out: config of the source that is evaluated.
        has_text: False for token files.
        needs_template: it is of messages, which need the chat template of a model.
        line: what was found, and how it was split.
        classes: the names of the classes of texts with labels; None for other data.
    """

    source: Config
    held_out: Config
    has_text: bool
    needs_template: bool
    line: str
    classes: list[str] | None = None


def recognized(path: str, validation_fraction: float = 0.05) -> Recognized:
    """Looks at a file, a folder, a glob, an fsspec URL, or a data set of the Hub.

    A folder is searched with its subfolders; hidden files are left out. Where names say which files are for training
    and which for validation (train*, val*, test*, ...), that is how the data is split; otherwise about so much of it is
    held out as `validation_fraction` says.

    Raises:
        FileNotFoundError, PermissionError, ValueError: there is no such data, or none that can be read.
    """
    listing = hub_data.data_listing(path) if is_hub_url(path) else local_data.data_listing(path)
    rows = _rows(listing)
    train_part = held_out_part = None
    held_out_paths = listing.validation
    if not held_out_paths:
        train_part = _Part("train", validation_fraction)
        held_out_part = _Part("validation", validation_fraction)
        held_out_paths = listing.train
    return Recognized(
        source=_source(listing.kind, rows, listing.train, train_part),
        held_out=_source(listing.kind, rows, held_out_paths, held_out_part),
        has_text=listing.kind != "tokens",
        needs_template=rows.needs_template,
        line=_line(listing, rows, validation_fraction),
    )


def _line(listing: DataListing, rows: _Rows, validation_fraction: float) -> str:
    """What the data is, and how it is split."""
    what = listing.kind if rows.examples is None else _NOUNS[rows.examples]
    files = _counted(listing.num_train, "file")
    line = f"data: {what} from {listing.place}: {files}"
    if listing.validation:
        line += f" for training, {listing.num_validation} held out, {listing.told_by}"
    else:
        line += f", {validation_fraction:.0%} held out"
    if len(rows.text_fields) > 1:
        line += f"; the text is in {rows.text_field!r} (of {', '.join(rows.text_fields)})"
    if listing.left_out:
        line += f"; left out: {', '.join(f'{count} {ending}' for ending, count in listing.left_out.most_common(5))}"
    return line


def _rows(listing: DataListing) -> _Rows:
    """Looks into the first row of files that have rows."""
    if listing.kind not in ROW_KINDS:
        return _Rows()
    place, row = _first_row(listing.first)
    try:
        # The fields of both say more than those of a conversation, which such a row may have as well.
        if is_pair(row):
            return _Rows(examples=PairSource, needs_template=_has_messages(pair_of(row)))
        if is_thumb(row):
            return _Rows(examples=ThumbSource, needs_template=_has_messages(*thumbs_of(row)))
        _check_no_label(row)
    except ValueError as error:
        raise ValueError(f"{listing.first}, {place}: {error}") from error
    if _is_conversation(row):
        return _Rows(examples=ChatSource, needs_template=True)
    text_fields = tuple(name for name, value in row.items() if isinstance(value, str))
    if not text_fields:
        names = ", ".join(row) or "it has none"
        raise ValueError(f"{listing.first}: no field of its first row holds text: {names}")
    usual_fields = [name for name in _TEXT_FIELDS if name in text_fields]
    longest_field = max(text_fields, key=lambda name: len(row[name]))
    return _Rows(text_field=[*usual_fields, longest_field][0], text_fields=text_fields)


def _check_no_label(row: dict[str, Any]) -> None:
    """Raises ValueError where a row that is no judged answer has a label.

    A language model would learn the text of good and of bad rows alike, as if the label were not there.
    """
    if "label" in row:
        raise ValueError(
            f"field 'label' is {str(row['label'])[:40]!r}, which the loss of next tokens does not read; expected true "
            "or false (1 or 0) beside prompt and completion or messages (KTO), a classifier (--config=classify:DIR or "
            "lora-classify:DIR) for names of classes, or a file without labels"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _has_messages(*examples: Judged) -> bool:
    """Whether the answers are messages, and no texts."""
    return any(not isinstance(answer, str) for example in examples for _, answer in example.answers)


def _first_row(file: DataFile) -> tuple[str, dict[str, Any]]:
    """Return (place, row) of the first row of a file. Raises ValueError: it is no JSON object, or there is none."""
    for place, row in rows_of_file(file):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, {place}: expected a JSON object, given {type(row).__name__}")
        return place, row
    raise ValueError(f"{file} holds no rows")


def _is_conversation(row: dict[str, Any]) -> bool:
    """Whether ChatSource reads a row."""
    try:
        conversation(row)
    except (ValueError, TypeError):
        return False
    return True


def _source(kind: Kind, rows: _Rows, paths: Sequence[str], part: _Part | None) -> Config:
    """The config of a source: of one part of the files, or of all of them."""
    part_fields = part._asdict() if part else {}
    if kind == "tokens":
        if len(paths) > 1:
            raise ValueError(f"{len(paths)} token files: name them by one glob in --config.data.source.path")
        return config_for(TokenPart if part else TokenMemmap, path=paths[0], **part_fields)
    if rows.examples is not None:
        return config_for(rows.examples, paths=list(paths), **part_fields)
    if kind == "JSON lines":
        documents = config_for(JsonLines, paths=list(paths), field=rows.text_field)
    elif kind == "Parquet":
        documents = config_for(Parquet, paths=list(paths), column=rows.text_field)
    elif kind == "CSV":
        documents = config_for(Csv, paths=list(paths), column=rows.text_field)
    else:
        documents = config_for(TextFiles, paths=list(paths))
    return config_for(TextPart, source=documents, **part_fields) if part else documents
