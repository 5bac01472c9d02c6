"""Detects the kind of a data file, and the split it belongs to, from its name."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from plimsoll.framework.data.files import DataFile

DataFormat = Literal["text", "JSON lines", "Parquet", "CSV", "tokens"]
# Kinds whose files hold rows with named fields.
ROW_FORMATS: tuple[DataFormat, ...] = ("JSON lines", "Parquet", "CSV")

# Endings that determine the content; compression endings such as .gz after them are left to the reader. A file with
# another ending is text or not data.
FORMAT_BY_EXTENSION: dict[str, DataFormat] = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".parquet": "Parquet",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".bin": "tokens",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst", ".lz4")
# Existing splits, recognized by how the name of a file or folder starts.
_TRAIN = re.compile(r"(?i)train(ing)?(?![a-z])")
_VALIDATION = re.compile(r"(?i)(val|valid|validation|dev|held_?out|eval)(?![a-z])")
_TEST = re.compile(r"(?i)test(ing)?(?![a-z])")

# Bytes of a file to inspect: text has no zero byte, and is valid UTF-8.
SAMPLE_BYTES = 4096

SplitName = Literal["train", "validation", "test"]


def detect_json_format(file: DataFile) -> DataFormat | None:
    """Returns "JSON lines" if a .json file has one object per line; None if not, as for a multi-line JSON value."""
    sample = next(file.chunks(SAMPLE_BYTES, decompress=True), b"").lstrip()
    first_line = sample.partition(b"\n")[0].rstrip()
    return "JSON lines" if first_line.startswith(b"{") and first_line.endswith(b"}") else None


def strip_extensions(name: str) -> str:
    """Returns a file name without its ending, and without the ending of its compression."""
    stem, ending = os.path.splitext(name)
    return os.path.splitext(stem)[0] if ending in _COMPRESSED else stem


@dataclass(frozen=True)
class FilesBySplit:
    """File names by existing split, and the names of files in no split."""

    train: list[str]
    validation: list[str]
    test: list[str]
    others: list[str]


def get_extension(path: str) -> str:
    """Returns the ending of a file name, without the ending of its compression."""
    stem, ending = os.path.splitext(path)
    return os.path.splitext(stem)[1] if ending in _COMPRESSED else ending


def detect_split(name: str) -> SplitName | None:
    """Returns the split that the name of a split or file (with its folders) indicates; None if it indicates none."""
    components = name.split("/")
    if any(_VALIDATION.match(component) for component in components):
        return "validation"
    if any(_TEST.match(component) for component in components):
        return "test"
    return "train" if any(_TRAIN.match(component) for component in components) else None


def group_by_split(names: list[str]) -> FilesBySplit:
    """Groups file names by the split they indicate; the common parent folder is ignored."""
    files_by_split = FilesBySplit([], [], [], [])
    folder = os.path.commonpath([os.path.dirname(name) for name in names])
    for name in names:
        # If all files are in one folder, that folder may be "train/".
        relative = os.path.relpath(name, folder or ".").replace(os.sep, "/")
        split = detect_split(relative)
        getattr(files_by_split, split or "others").append(name)
    return files_by_split


@dataclass(frozen=True)
class DataListing:
    """The files of the user's data.

    Attributes:
        location: location of the data, as shown in messages.
        data_format: kind of its files.
        first: the first training file, which is inspected.
        train: paths of the training files for the config; all files if there are no existing splits.
        validation: paths of the evaluation files for the config; empty if there are no existing splits.
        num_train: number of files that `train` names.
        num_validation: number of files that `validation` names.
        split_basis: the information that the split is based on, as shown in messages.
        left_out: number of ignored files, by ending.
    """

    location: str
    data_format: DataFormat
    first: DataFile
    train: list[str]
    validation: list[str]
    num_train: int
    num_validation: int
    split_basis: str
    left_out: Counter[str]
