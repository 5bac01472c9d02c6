"""--data=PATH: detects the kind of the user's data, and how to split it for training and evaluation.

detect_format("my_folder/")  # text, JSON lines, Parquet, token files, conversations, preference pairs, labeled answers

For a model that scores sequences, the data is preference pairs, or texts with labels:

detect_scored_format("pairs.jsonl", None, pairs=True, keeps_classes=False)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll.framework.config import Config, config_for
from plimsoll.framework.data import hub_data, local_data
from plimsoll.framework.data.chats import ChatSource, parse_conversation
from plimsoll.framework.data.file_formats import ROW_FORMATS, DataFormat, DataListing
from plimsoll.framework.data.held_out import TextPart, TokenPart
from plimsoll.framework.data.preference_formats import is_pair, is_unpaired, parse_pair, parse_unpaired
from plimsoll.framework.data.preferences import PairSource, UnpairedSource
from plimsoll.framework.data.prompts import PromptFiles
from plimsoll.framework.data.row_files import read_file_rows
from plimsoll.framework.data.scored import (
    LabeledSource,
    RankedSource,
    collect_class_names,
    get_class_name,
    parse_content,
    parse_sequences,
)
from plimsoll.framework.data.sources import Csv, ExampleSource, JsonLines, Parquet, TextFiles, TokenMemmap
from plimsoll.framework.files.hub_names import is_hub_url

# Columns that hold the text of a document, the most likely first.
_TEXT_FIELDS = ("text", "content", "document", "body", "story")
# Name of a source's examples in the startup message.
_NOUNS: dict[type[ExampleSource], str] = {
    ChatSource: "conversations",
    PairSource: "preference pairs",
    UnpairedSource: "labeled answers",
}

# Settings that a source keeps when it reads other files.
_KEPT_SETTINGS = ("append_eos", "pad_token_id", "template_variables")
# Maximum number of class names to show.
_NUM_SHOWN = 8


@dataclass(frozen=True)
class _Rows:
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


@dataclass(frozen=True)
class DetectedData:
    """The user's data, as config nodes.

    Attributes:
        source: config of the training source.
        held_out: config of the evaluation source.
        has_text: False for token files.
        needs_template: examples are messages, which need the chat template of a model.
        line: a summary of what was found and how it was split.
        kind: what the data is, such as "conversations", for messages.
        classes: class names of texts with labels; None for other data.
    """

    source: Config
    held_out: Config
    has_text: bool
    needs_template: bool
    line: str
    kind: str
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
    train_part: dict[str, object] = {}
    held_out_part: dict[str, object] = {}
    held_out_paths = listing.validation
    if not held_out_paths:
        # One set of files is split in two: each source reads one part of it.
        train_part = {"split": "train", "validation_fraction": validation_fraction}
        held_out_part = {"split": "validation", "validation_fraction": validation_fraction}
        held_out_paths = listing.train
    return DetectedData(
        source=_source(listing.data_format, rows, listing.train, train_part),
        held_out=_source(listing.data_format, rows, held_out_paths, held_out_part),
        has_text=listing.data_format != "tokens",
        needs_template=rows.needs_template,
        line=_line(listing, rows, validation_fraction),
        kind=_kind(listing, rows),
    )


def _kind(listing: DataListing, rows: _Rows) -> str:
    return listing.data_format if rows.examples is None else _NOUNS[rows.examples]


def _line(listing: DataListing, rows: _Rows, validation_fraction: float) -> str:
    """Returns a summary of the data and of its split."""
    what = _kind(listing, rows)
    noun = "file" if listing.num_train == 1 else "files"
    line = f"data: {what} from {listing.location}: {listing.num_train:,} {noun}"
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
    location, row = next(read_file_rows(listing.first), (None, None))
    if location is None:
        raise ValueError(f"{listing.first} has no rows")
    if not isinstance(row, dict):
        raise ValueError(f"{listing.first}, {location}: expected a JSON object, given {type(row).__name__}")
    try:
        # Check these first: their fields are more specific than those of a conversation, which such a row may also
        # have.
        examples = []
        if is_pair(row):
            examples = [parse_pair(row)]
        elif is_unpaired(row):
            examples = parse_unpaired(row)
        elif "label" in row:
            # A language model would learn the text of good and bad rows alike, as if the label were not there.
            raise ValueError(
                f"field 'label' is {str(row['label'])[:40]!r}, which the next-token loss does not use; expected true "
                "or false (1 or 0) with prompt and completion or with messages (KTO), a classifier "
                "(--config=classify:DIR or lora-classify:DIR) for class names, or a file without labels"
            )
    except ValueError as error:
        raise ValueError(f"{listing.first}, {location}: {error}") from error
    if examples:
        has_messages = any(not isinstance(answer, str) for example in examples for _, answer in example.answers)
        return _Rows(examples=PairSource if is_pair(row) else UnpairedSource, needs_template=has_messages)
    # A row that ChatSource cannot read is a document.
    with contextlib.suppress(ValueError, TypeError):
        parse_conversation(row)
        return _Rows(examples=ChatSource, needs_template=True)
    text_fields = tuple(name for name, value in row.items() if isinstance(value, str))
    if not text_fields:
        names = ", ".join(row) or "it has none"
        raise ValueError(f"{listing.first}: no field of its first row has text: {names}")
    usual_fields = [name for name in _TEXT_FIELDS if name in text_fields]
    longest_field = max(text_fields, key=lambda name: len(row[name]))
    return _Rows(text_field=[*usual_fields, longest_field][0], text_fields=text_fields)


def _source(data_format: DataFormat, rows: _Rows, paths: Sequence[str], part: Mapping[str, object]) -> Config:
    """Returns the config of a source of the files; `part` has the fields that select one part of them, if not all."""
    if data_format == "tokens":
        if len(paths) > 1:
            raise ValueError(f"{len(paths)} token files: select them with one glob in --config.data.source.path")
        return config_for(TokenPart if part else TokenMemmap, path=paths[0], **part)
    if rows.examples is not None:
        return config_for(rows.examples, paths=list(paths), **part)
    if data_format == "JSON lines":
        documents = config_for(JsonLines, paths=list(paths), field=rows.text_field)
    elif data_format == "Parquet":
        documents = config_for(Parquet, paths=list(paths), column=rows.text_field)
    elif data_format == "CSV":
        documents = config_for(Csv, paths=list(paths), column=rows.text_field)
    else:
        documents = config_for(TextFiles, paths=list(paths))
    return config_for(TextPart, source=documents, **part) if part else documents


def detect_scored_format(
    path: str, template: Config | None, *, pairs: bool, keeps_classes: bool, validation_fraction: float = 0.05
) -> DetectedData:
    """Inspects a file, a folder, a glob, an fsspec URL, or a Hub dataset, as `detect_format` does.

    Args:
        path: as for `detect_format`.
        template: config of a LabeledSource or a RankedSource, whose other settings stay; None for the defaults.
        pairs: rows are preference pairs; otherwise texts or conversations with labels.
        keeps_classes: use the classes of `template`; otherwise, those of the training files.
        validation_fraction: as for `detect_format`.

    Raises:
        FileNotFoundError, PermissionError, ValueError: as for `detect_format`, or a row has no label, or a field is
            missing. The message names the file, row and field.
    """
    listing = hub_data.data_listing(path) if is_hub_url(path) else local_data.data_listing(path)
    if listing.data_format not in ROW_FORMATS:
        wanted = "chosen and rejected" if pairs else "text (or messages) and label"
        raise ValueError(
            f"{listing.location} has {listing.data_format}; expected JSON lines, Parquet or CSV with {wanted}"
        )
    location, row = next(read_file_rows(listing.first), ("", None))
    if not location:
        raise ValueError(f"{listing.first} has no rows")
    try:
        content = parse_sequences(row)[0] if pairs else parse_content(row)
        if not pairs:
            get_class_name(row)
    except ValueError as error:
        raise ValueError(f"{listing.first}, {location}: {error}") from error
    needs_template = not isinstance(content, str)
    classes: list[str] | None = None
    if pairs:
        source = config_for(RankedSource, paths=list(listing.train))
        what = "pairs"
    else:
        names: list[str] = (
            template.classes if template is not None and keeps_classes else collect_class_names(listing.train)
        )
        classes = names
        source = config_for(LabeledSource, paths=list(listing.train), classes=names)
        more = ", ..." if len(names) > _NUM_SHOWN else ""
        what = f"texts of {len(names)} classes ({', '.join(names[:_NUM_SHOWN])}{more})"
    if template is not None:
        for name in _KEPT_SETTINGS:
            source[name] = template[name]
    # Copied after the settings are set, so that both sources have the same ones.
    held_out = source.copy()
    split = f"{validation_fraction:.0%} held out"
    if listing.validation:
        held_out.paths = list(listing.validation)
        split = f"{listing.num_validation} files held out, {listing.split_basis}"
    else:
        for config, part in ((source, "train"), (held_out, "validation")):
            config.split = part
            config.validation_fraction = validation_fraction
    line = f"data: {what} from {listing.location}: files for training: {listing.num_train}, {split}"
    kind = "pairs" if pairs else "texts with labels"
    return DetectedData(
        source, held_out, has_text=True, needs_template=needs_template, line=line, kind=kind, classes=classes
    )


@dataclass(frozen=True)
class DetectedPrompts:
    """The user's prompts, as config nodes.

    Attributes:
        source: config of the training prompts.
        held_out: config of the held-out prompts; None if there are too few.
        line: a summary of what was found and how it was split.
    """

    source: Config
    held_out: Config | None
    line: str


def detect_prompts(paths: Sequence[str], validation_fraction: float = 0.05) -> DetectedPrompts:
    """Inspects files with prompts, and holds out a part of them.

    Args:
        paths: files, folders, globs, fsspec URLs or Hub datasets; the prompts of all of them are used.
        validation_fraction: approximate fraction to hold out if the names of a single path indicate no splits.

    Raises:
        FileNotFoundError, PermissionError, ValueError: a file does not exist, or a row has no prompt.
    """
    listings = [hub_data.data_listing(path) if is_hub_url(path) else local_data.data_listing(path) for path in paths]
    for listing in listings:
        if listing.data_format not in ROW_FORMATS:
            raise ValueError(
                f'{listing.location} has {listing.data_format}; expected JSON lines, Parquet or CSV with "prompt"'
            )
    where = ", ".join(listing.location for listing in listings)
    train_files = [file for listing in listings for file in listing.train]
    held_out_files = [file for listing in listings for file in listing.validation]
    source = config_for(PromptFiles, paths=train_files)
    if held_out_files:
        held_out = config_for(PromptFiles, paths=held_out_files)
        counts = [sum(1 for _ in one.instantiate().rows()) for one in (source, held_out)]
        return DetectedPrompts(
            source, held_out, f"data: {counts[0]:,} prompts from {where}, {counts[1]:,} held out, by their names"
        )
    parts = []
    counts = []
    for split in ("train", "validation"):
        part = source.copy()
        part.split = split
        part.validation_fraction = validation_fraction
        parts.append(part)
        counts.append(sum(1 for _ in part.instantiate().rows()))
    if not all(counts):
        line = f"data: {sum(counts):,} prompts from {where}, too few to hold some out"
        return DetectedPrompts(source, None, line)
    return DetectedPrompts(parts[0], parts[1], f"data: {counts[0]:,} prompts from {where}, {counts[1]:,} held out")
