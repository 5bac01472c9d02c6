"""Local data files: which files hold data, their kind, and the train and validation splits from their names."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from plimsoll.framework.data.file_formats import (
    FORMAT_BY_EXTENSION,
    SAMPLE_BYTES,
    DataFormat,
    DataListing,
    detect_json_format,
    get_extension,
    group_by_split,
)
from plimsoll.framework.data.files import DataFile, find
from plimsoll.framework.files.remote import is_url

# A list of files is written into the config if it is short; otherwise a glob, if it names the same files.
_MAX_LISTED = 8


def data_listing(path: str) -> DataListing:
    """Inspects a file, a folder, a glob or an fsspec URL.

    Raises:
        FileNotFoundError, PermissionError: there are no such files, or they cannot be read.
        ValueError: no file holds data of a known kind.
    """
    files_by_format: dict[DataFormat, list[DataFile]] = {}
    left_out: Counter[str] = Counter()
    for file in _files(path):
        data_format = _detect_format(file)
        if data_format is None:
            left_out[get_extension(file.path) or file.name.rpartition("/")[2]] += 1
        else:
            files_by_format.setdefault(data_format, []).append(file)
    if not files_by_format:
        endings = ", ".join(left_out)
        raise ValueError(
            f"{path} has no data in a known format ({endings}): expected UTF-8 text, .jsonl, .parquet, .csv or .bin "
            "files"
        )
    # The kind with the most bytes is used.
    largest_format = max(files_by_format, key=lambda kind: sum(file.size() for file in files_by_format[kind]))
    for data_format, others in files_by_format.items():
        if data_format != largest_format:
            left_out.update(get_extension(file.path) or "files without an ending" for file in others)
    file_by_path = {file.path: file for file in files_by_format[largest_format]}
    parts = group_by_split(list(file_by_path))
    held_out_paths = sorted([*parts.validation, *parts.test], key=list(file_by_path).index)
    train_paths = parts.train
    # If even one file is in neither part, the names mean something else.
    if parts.others or not train_paths or not held_out_paths:
        train_paths = list(file_by_path)
        held_out_paths = []
    train_files = [file_by_path[name] for name in train_paths]
    held_out_files = [file_by_path[name] for name in held_out_paths]
    return DataListing(
        location=path,
        data_format=largest_format,
        first=train_files[0],
        train=_shorten_paths(path, train_files),
        validation=_shorten_paths(path, held_out_files) if held_out_files else [],
        num_train=len(train_files),
        num_validation=len(held_out_files),
        split_basis="by their names",
        left_out=left_out,
    )


def _files(path: str) -> list[DataFile]:
    """Returns the files that `path` names, sorted; a folder is searched recursively, without hidden files."""
    folder = Path(os.path.expanduser(path))
    if is_url(path) or not folder.is_dir():
        return find(path)
    names = []
    for parent, subfolders, file_names in os.walk(folder):
        # The list is modified in place, which keeps os.walk out of hidden folders.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        names += [os.path.join(parent, name) for name in sorted(file_names) if not name.startswith(".")]
    if not names:
        raise FileNotFoundError(f"the folder {path} has no files")
    return find(name for name in sorted(names) if os.path.isfile(name))


def _detect_format(file: DataFile) -> DataFormat | None:
    """Returns the kind of a file from its ending, or from its first bytes; None if it is not data."""
    ending = get_extension(file.path)
    if ending in FORMAT_BY_EXTENSION:
        return FORMAT_BY_EXTENSION[ending]
    if ending == ".json":
        return detect_json_format(file)
    if file.size() == 0:
        return None
    sample = next(file.chunks(SAMPLE_BYTES, decompress=True), b"")
    try:
        # A character may be split at the end of the sample.
        sample.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(sample) - 3:
            return None
    return None if b"\0" in sample else "text"


def _shorten_paths(path: str, files: list[DataFile]) -> list[str]:
    """Returns paths for the config: file names, or globs if there are many files and the globs match exactly these."""
    names = [file.name for file in files]
    if len(names) <= _MAX_LISTED or is_url(path):
        return names
    folder = os.path.commonpath([os.path.dirname(name) for name in names])
    endings = sorted({os.path.splitext(name)[1] for name in names})
    globs = [f"{folder}/**/*{ending}" for ending in endings if ending]
    if len(globs) == len(endings) and sorted(file.name for file in find(globs)) == sorted(names):
        return globs
    return names
