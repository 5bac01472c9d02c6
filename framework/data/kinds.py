"""The kind of a data file, and the part of the data that it belongs to, by its name."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Literal, NamedTuple

from framework.data.files import DataFile

Kind = Literal["text", "JSON lines", "Parquet", "CSV", "tokens"]
# Kinds whose files hold rows with named fields.
ROW_KINDS: tuple[Kind, ...] = ("JSON lines", "Parquet", "CSV")

# Endings that say what a file holds; .gz and the like behind them are for the reader. Others are text, or nothing.
KINDS: dict[str, Kind] = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".parquet": "Parquet",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".bin": "tokens",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst", ".lz4")
# Parts that somebody has made already, by the first word of a file's or folder's name.
_TRAIN = re.compile(r"(?i)train(ing)?(?![a-z])")
_VALIDATION = re.compile(r"(?i)(val|valid|validation|dev|held_?out|eval)(?![a-z])")
_TEST = re.compile(r"(?i)test(ing)?(?![a-z])")

# So much of a file is looked at: text has no zero byte, and is UTF-8.
SAMPLE_BYTES = 4096

PartName = Literal["train", "validation", "test"]


def kind_of_json(file: DataFile) -> Kind | None:
    """Lines of JSON under the name .json; one JSON value over many lines is no data."""
    sample = next(file.chunks(SAMPLE_BYTES, decompress=True), b"").lstrip()
    first_line = sample.partition(b"\n")[0].rstrip()
    return "JSON lines" if first_line.startswith(b"{") and first_line.endswith(b"}") else None


class Parts(NamedTuple):
    """Names of the files of the parts that somebody has made, and of those that are in no such part."""

    train: list[str]
    validation: list[str]
    test: list[str]
    others: list[str]


def ending_of(path: str) -> str:
    """Returns the ending of a file's name, without that of its compression."""
    stem, ending = os.path.splitext(path)
    return os.path.splitext(stem)[1] if ending in _COMPRESSED else ending


def part_of(name: str) -> PartName | None:
    """Returns the part that a name says, of a split or of a file with its folders; None where it says none."""
    words = name.split("/")
    if any(_VALIDATION.match(word) for word in words):
        return "validation"
    if any(_TEST.match(word) for word in words):
        return "test"
    return "train" if any(_TRAIN.match(word) for word in words) else None


def parts_by_name(names: list[str]) -> Parts:
    """Sorts the names of files into the parts that they say; the folder that all are in says nothing."""
    parts = Parts([], [], [], [])
    folder = os.path.commonpath([os.path.dirname(name) for name in names])
    for name in names:
        # In a folder of its own, "train/" may be the common one.
        relative = os.path.relpath(name, folder or ".").replace(os.sep, "/")
        part = part_of(relative)
        getattr(parts, part or "others").append(name)
    return parts


class DataListing(NamedTuple):
    """Somebody's own data, as its files are.

    Attributes:
        place: what messages call it.
        kind: of its files.
        first: the first file that is trained on, which is looked into.
        train: paths for the config: the files that are trained on, or all where nobody has made parts.
        validation: paths for the config of the files that are evaluated; empty where nobody has made parts.
        num_train: number of files that `train` names.
        num_validation: number of files that `validation` names.
        told_by: what says which file is in which part.
        left_out: how many files are not read, by ending.
    """

    place: str
    kind: Kind
    first: DataFile
    train: list[str]
    validation: list[str]
    num_train: int
    num_validation: int
    told_by: str
    left_out: Counter[str]
