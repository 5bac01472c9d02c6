"""What --data=PATH means: finds the kind of somebody's own data, and how it is split for training and evaluation.

recognized("my_folder/")          # text, JSON lines, Parquet, token files or conversations
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config import Config, config_for
from framework.data import hub_data
from framework.data.chats import ChatSource, conversation
from framework.data.files import DataFile, find
from framework.data.held_out import TextPart, TokenPart
from framework.data.kinds import KINDS, SAMPLE_BYTES, Found, Kind, ending_of, kind_of_json, parts_by_name
from framework.data.sources import JsonLines, Parquet, TextFiles, TokenMemmap, json_rows, parquet_rows
from framework.files.hub_names import is_hub_url
from framework.files.remote import is_url

# Columns that hold the text of a document, the likeliest first.
_TEXT_FIELDS = ("text", "content", "document", "body", "story")
# A list of files is written into the config as long as it is short, and a glob where that names the same files.
_MAX_LISTED = 8


@dataclass(frozen=True)
class Recognized:
    """Somebody's own data, as a config has it.

    Attributes:
        source: config of the source that is trained on.
        held_out: config of the source that is evaluated.
        has_text: False for token files.
        line: what was found, and how it was split.
    """

    source: Config
    held_out: Config
    has_text: bool
    line: str


def recognized(path: str, validation_fraction: float = 0.05) -> Recognized:
    """Looks at a file, a folder, a glob, an fsspec URL, or a data set of the Hub.

    A folder is searched with its subfolders; hidden files are left out. Where names say which files are for training
    and which for validation (train*, val*, test*, ...), that is how the data is split; otherwise about so much of it is
    held out as `validation_fraction` says.

    Raises:
        FileNotFoundError, PermissionError, ValueError: there is no such data, or none that can be read.
    """
    found = hub_data.found(path) if is_hub_url(path) else _found_locally(path)
    field, fields = None, []
    is_chat = False
    if found.kind in ("JSON lines", "Parquet"):
        row = _first_row(found.kind, found.first)
        is_chat = _is_conversation(row)
        if not is_chat:
            field, fields = _text_field(found.first, row)
    what = "conversations" if is_chat else found.kind
    if found.validation:
        source = _source(found.kind, is_chat, field, found.train, None)
        held_out = _source(found.kind, is_chat, field, found.validation, None)
        how = f"{_counted(found.num_train, 'file')} for training, {found.num_validation} held out, {found.told_by}"
    else:
        source = _source(found.kind, is_chat, field, found.train, ("train", validation_fraction))
        held_out = _source(found.kind, is_chat, field, found.train, ("validation", validation_fraction))
        how = f"{_counted(found.num_train, 'file')}, {validation_fraction:.0%} held out"
    line = f"data: {what} from {found.place}: {how}"
    if field is not None and len(fields) > 1:
        line += f"; the text is in {field!r} (of {', '.join(fields)})"
    if found.left_out:
        line += f"; left out: {', '.join(f'{count} {ending}' for ending, count in found.left_out.most_common(5))}"
    return Recognized(source, held_out, found.kind != "tokens", line)


def _found_locally(path: str) -> Found:
    """The files of a path, a glob or an fsspec URL, by kind and part."""
    files = _found(path)
    kind, files_of_kind, left_out = _kind_of(path, files)
    file_by_path = {file.path: file for file in files_of_kind}
    parts = parts_by_name(list(file_by_path))
    held_out_paths = sorted([*parts.validation, *parts.test], key=list(file_by_path).index)
    train_paths = parts.train
    # One file that is in neither part says that the names mean something else.
    if parts.others or not train_paths or not held_out_paths:
        train_paths = list(file_by_path)
        held_out_paths = []
    train_files = [file_by_path[name] for name in train_paths]
    held_out_files = [file_by_path[name] for name in held_out_paths]
    return Found(
        place=path,
        kind=kind,
        first=train_files[0],
        train=_named(path, train_files),
        validation=_named(path, held_out_files) if held_out_files else [],
        num_train=len(train_files),
        num_validation=len(held_out_files),
        told_by="by their names",
        left_out=left_out,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _found(path: str) -> list[DataFile]:
    """The files that are meant, by name; of a folder those in its subfolders too, hidden ones left out."""
    folder = Path(os.path.expanduser(path))
    if is_url(path) or not folder.is_dir():
        return find(path)
    names = []
    for parent, subfolders, file_names in os.walk(folder):
        # The list is changed in place, which keeps os.walk out of hidden folders.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        names += [os.path.join(parent, name) for name in sorted(file_names) if not name.startswith(".")]
    if not names:
        raise FileNotFoundError(f"the folder {path} holds no files")
    return find(name for name in sorted(names) if os.path.isfile(name))


def _kind_of(path: str, files: list[DataFile]) -> tuple[Kind, list[DataFile], Counter[str]]:
    """(the kind of which there are most bytes, its files, how many others there are by ending)."""
    files_by_kind: dict[Kind, list[DataFile]] = {}
    left_out: Counter[str] = Counter()
    for file in files:
        kind = _kind_of_file(file)
        if kind is None:
            left_out[ending_of(file.path) or file.name.rpartition("/")[2]] += 1
        else:
            files_by_kind.setdefault(kind, []).append(file)
    if not files_by_kind:
        endings = ", ".join(left_out)
        raise ValueError(
            f"{path} holds no data that is known ({endings}): expected UTF-8 text, .jsonl, .parquet or .bin files"
        )
    largest_kind = max(files_by_kind, key=lambda kind: sum(file.size() for file in files_by_kind[kind]))
    for kind, others in files_by_kind.items():
        if kind != largest_kind:
            left_out.update(ending_of(file.path) or "files without an ending" for file in others)
    return largest_kind, files_by_kind[largest_kind], left_out


def _kind_of_file(file: DataFile) -> Kind | None:
    """The kind of a file by its ending, or by its first bytes; None: no data."""
    ending = ending_of(file.path)
    if ending in KINDS:
        return KINDS[ending]
    if ending == ".json":
        return kind_of_json(file)
    if file.size() == 0:
        return None
    sample = next(file.chunks(SAMPLE_BYTES, decompress=True), b"")
    try:
        # A character may be cut in two at the end of the sample.
        sample.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(sample) - 3:
            return None
    return None if b"\0" in sample else "text"


def _named(path: str, files: list[DataFile]) -> list[str]:
    """Paths for the config: the files' names, or globs where these name the same files and are fewer."""
    names = [file.name for file in files]
    if len(names) <= _MAX_LISTED or is_url(path):
        return names
    folder = os.path.commonpath([os.path.dirname(name) for name in names])
    endings = sorted({os.path.splitext(name)[1] for name in names})
    globs = [f"{folder}/**/*{ending}" for ending in endings if ending]
    if len(globs) == len(endings) and sorted(file.name for file in find(globs)) == sorted(names):
        return globs
    return names


def _first_row(kind: Kind, file: DataFile) -> dict[str, Any]:
    """The first row of a file. Raises ValueError: it is no JSON object, or there is none."""
    rows = parquet_rows(file) if kind == "Parquet" else json_rows(file)
    for place, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{file}, {place}: expected a JSON object, given {type(row).__name__}")
        return row
    raise ValueError(f"{file} holds no rows")


def _is_conversation(row: dict[str, Any]) -> bool:
    """Whether ChatSource reads a row."""
    try:
        conversation(row)
    except (ValueError, TypeError):
        return False
    return True


def _text_field(file: DataFile, row: dict[str, Any]) -> tuple[str, list[str]]:
    """(the field that holds the text, all fields that hold some text). Raises ValueError: none does."""
    fields = [name for name, value in row.items() if isinstance(value, str)]
    if not fields:
        raise ValueError(f"{file}: no field of its first row holds text: {', '.join(row) or 'it has none'}")
    for name in _TEXT_FIELDS:
        if name in fields:
            return name, fields
    return max(fields, key=lambda name: len(row[name])), fields


def _source(
    kind: Kind,
    is_chat: bool,
    field: str | None,
    paths: Sequence[str],
    part: tuple[str, float] | None,
) -> Config:
    """The config of a source: of one part of the files, or of all of them."""
    if kind == "tokens":
        if len(paths) > 1:
            raise ValueError(f"{len(paths)} token files: name them by one glob in --config.data.source.path")
        if part is None:
            return config_for(TokenMemmap, path=paths[0])
        split, fraction = part
        return config_for(TokenPart, path=paths[0], split=split, validation_fraction=fraction)
    if is_chat:
        if part is None:
            return config_for(ChatSource, paths=list(paths))
        split, fraction = part
        return config_for(ChatSource, paths=list(paths), split=split, validation_fraction=fraction)
    if kind == "JSON lines":
        documents = config_for(JsonLines, paths=list(paths), field=field)
    elif kind == "Parquet":
        documents = config_for(Parquet, paths=list(paths), column=field)
    else:
        documents = config_for(TextFiles, paths=list(paths))
    if part is None:
        return documents
    split, fraction = part
    return config_for(TextPart, source=documents, split=split, validation_fraction=fraction)
