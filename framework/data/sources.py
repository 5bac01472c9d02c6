"""Where documents come from: one class per kind of source, each configured by its constructor.

A source of text yields documents, a `TokenMemmap` is tokens already, a `Mixture` weighs other sources. To add one,
follow docs/data.md.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import json
import math
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from framework.config import Config, NonNegativeInt, component, did_you_mean
from framework.data.files import DataFile, FileHashes, digest_of, fetched, find, readable
from framework.data.packing import Conversations, Windows
from framework.data.token_files import TokenDType, TokenShard, TokenStream, sidecar_name
from framework.data.tokenizers import Tokenizer

_CHUNK_BYTES = 1 << 20
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"})


class TextSource(abc.ABC):
    """Documents of text, read file by file. The constructor only keeps its arguments: disks and networks are touched by
    the methods, which run before anything is compiled, and never in a training step."""

    paths: list[str]

    def files(self) -> list[DataFile]:
        """The files that it reads, in order."""
        return find(self.paths)

    @abc.abstractmethod
    def read(self, file: DataFile) -> Iterator[str]:
        """The documents of one file, in order. One that cannot be read is a ValueError that says where it stands."""

    def codec(self, tokenizer: Tokenizer) -> Tokenizer:
        """What makes tokens of its documents, given the config's tokenizer."""
        return tokenizer

    def settings(self) -> dict[str, Any]:
        """JSON data that decides the documents beside the files' contents: the constructor's arguments, but `paths`."""
        return {name: value for name, value in vars(self).items() if name != "paths"}

    def documents(self) -> Iterator[str]:
        """All documents, in order."""
        return (document for file in self.files() for document in self.read(file))

    def contents(self, hashes: FileHashes) -> dict[str, Any]:
        """What is recorded beside the tokens: kind, settings, the sha256 of each file, and one over all of these but
        the files' names: a corpus that moved is the same corpus."""
        files = [{"name": file.name, "sha256": hashes.sha256(file)} for file in self.files()]
        facts = {"kind": type(self).__name__, "settings": self.settings()}
        digest = digest_of({**facts, "files": [file["sha256"] for file in files]})
        return {"sha256": digest, **facts, "files": files}


@component
class StdlibSource(TextSource):
    """The `.py` files of the standard library of the Python that runs, one document per file, sorted by name.

    Real text that every machine has. Test packages are left out (they repeat themselves), and so is what an
    installation adds. A file belongs to "validation" when the sha256 of its relative path falls into 5 of 100 buckets,
    otherwise to "train": the split depends on names alone, and no file is in both.

    Args:
        split: which part to read.
    """

    def __init__(self, *, split: Literal["train", "validation"] = "train"):
        self.split = split

    def settings(self) -> dict[str, Any]:
        return {"split": self.split, "python": platform.python_version()}

    def files(self) -> list[DataFile]:
        root = Path(sysconfig.get_path("stdlib"))  # in a virtual environment too, this is the base interpreter's
        names = [name for name in library_files(root) if split_of(name) == self.split]
        if not names:
            raise FileNotFoundError(f"the standard library at {root} has no sources (is it zipped or stripped?)")
        return find(str(root / name) for name in names)

    def read(self, file: DataFile) -> Iterator[str]:
        yield file.read().decode("utf-8", errors="replace")


def library_files(root: Path) -> list[str]:
    """Relative paths (with /) of the library's own modules below `root`, sorted."""
    names: list[str] = []
    for folder, children, files in os.walk(root):
        # In place, to keep os.walk out of these folders. config-* and _sysconfigdata* describe one build.
        children[:] = [c for c in children if c not in _LEFT_OUT and not c.endswith("_tests") and c[:7] != "config-"]
        inside = Path(folder).relative_to(root)
        names += [(inside / n).as_posix() for n in files if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    return sorted(names)


def split_of(content: str, validation_fraction: float = 0.05) -> Literal["train", "validation"]:
    """The part to which what is identified by that text (a file's relative path) belongs, by its sha256."""
    number = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
    percent = number % 100 + number // 100 % 1000 / 1000
    return "validation" if percent < 100 * validation_fraction else "train"


@component
class TextFiles(TextSource):
    """UTF-8 text files; each file is one document, or several between `separator`s.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; decompressed by their names' endings.
        separator: text between two documents of one file (for instance "<|endoftext|>"); it belongs to neither.
    """

    def __init__(self, *, paths: list[str], separator: str | None = None):
        if separator == "":
            raise ValueError("separator: expected text or None, given ''")
        self.paths, self.separator = paths, separator

    def read(self, file: DataFile) -> Iterator[str]:
        for offset, data in _pieces(file, self.separator.encode() if self.separator else None):
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: not UTF-8 at byte {offset + error.start}: {error.reason}") from error
            yield text


@component
class JsonLines(TextSource):
    """One JSON object per line; the text stands in `field`.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; decompressed by their names' endings.
        field: the key of the text in each object.
    """

    def __init__(self, *, paths: list[str], field: str = "text"):
        self.paths, self.field = paths, field

    def read(self, file: DataFile) -> Iterator[str]:
        for place, record in json_rows(file):
            try:
                yield text_field(record, self.field)
            except ValueError as error:  # Unicode errors are some
                raise ValueError(f"{file}, {place}: no JSON object with text: {error}") from error


def text_field(record: Any, field: str) -> str:
    """The text in that field of a JSON object; a ValueError says why there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, given {type(record).__name__}")
    if field not in record:
        raise ValueError(f"no field {field!r}{did_you_mean(field, record)}")
    if not isinstance(text := record[field], str):
        raise ValueError(f"field {field!r} is {type(text).__name__}, expected text")
    text.encode("utf-8")  # JSON can spell half of a surrogate pair, which no tokenizer takes
    return text


def json_rows(file: DataFile) -> Iterator[tuple[str, Any]]:
    """(place, value) of each line of JSON that is not blank."""
    for number, (offset, line) in enumerate(_pieces(file, b"\n"), start=1):
        place = f"line {number} (byte {offset})"
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:  # Unicode errors too
                raise ValueError(f"{file}, {place}: not JSON: {error}") from error
            yield place, value


def _pieces(file: DataFile, separator: bytes | None) -> Iterator[tuple[int, bytearray]]:
    """What stands between separators in the file's text (all of it without one), and the byte at which that begins."""
    rest, offset = bytearray(), 0
    for chunk in file.chunks(_CHUNK_BYTES, decompress=True):
        rest += chunk
        if separator is not None and separator in rest:
            *whole, rest = rest.split(separator)
            for piece in whole:
                yield offset, piece
                offset += len(piece) + len(separator)
    yield offset, rest


@component
class Parquet(TextSource):
    """A text column of Parquet files, each row a document; only a few rows of it are in memory.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order.
        column: the name of the text column.
    """

    def __init__(self, *, paths: list[str], column: str = "text"):
        self.paths, self.column = paths, column

    def read(self, file: DataFile) -> Iterator[str]:
        for place, row in parquet_rows(file, self.column):
            if not isinstance(text := row[self.column], str):
                raise ValueError(f"{file}, {place}: expected text, given {type(text).__name__}")
            yield text


def parquet_rows(file: DataFile, column: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of a Parquet file: of one column, or of all."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    row, size = 0, file.size()
    try:
        # Checksums of pages are verified where the writer stored them.
        options = {"filesystem": file.fs, "page_checksum_verification": True}
        with readable(file.name), ParquetFile(file.path, **options) as reader:
            if column is not None and column not in reader.schema_arrow.names:
                raise ValueError(f"{file}: no column {column!r}{did_you_mean(column, reader.schema_arrow.names)}")
            for batch in reader.iter_batches(256, columns=None if column is None else [column]):
                for values in batch.to_pylist():
                    yield f"row {row}", values
                    row += 1
                file.position = size * row // reader.metadata.num_rows
    except (FileNotFoundError, PermissionError):
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: damaged, truncated or not Parquet, after row {row}: {error}") from error


@component
class TokenMemmap:
    """Tokens that exist already: nanoGPT-style `.bin` files, and those that `launch.prepare` writes; read in ranges.

    Args:
        path: a `.bin`, a glob of shards (read in sorted order as one stream), or an fsspec URL of either (which is
            copied once: data.cache_dir, or ~/.cache/plimsoll).
        dtype: uint16 or uint32; None takes what the sidecar says, or uint16 without one.
        eos_id: the token between documents; None takes the sidecar's. Needed only to mask documents from each other.
        verify: read each file once before training, to check hashes and ids. False: sizes, and ids as they are read.
    """

    def __init__(
        self, *, path: str, dtype: TokenDType | None = None, eos_id: NonNegativeInt | None = None, verify: bool = True
    ):
        self.path, self.dtype, self.eos_id, self.verify = path, dtype, eos_id, verify

    def files(self) -> list[DataFile]:
        """The shards, in order."""
        return find(self.path)

    def open(self, tokenizer: Tokenizer, hashes: FileHashes, cache_dir: str | None = None) -> TokenStream:
        """All shards as one stream, remote ones by their copies in `cache_dir`. Errors are those of `find`, `fetched`
        and TokenShard."""
        shards = [fetched(file, cache_dir, sidecar_name(file.path)) for file in self.files()]
        asked = {"dtype": self.dtype, "eos_id": self.eos_id, "verify": self.verify}
        return TokenStream([TokenShard(file, tokenizer, hashes, **asked) for file in shards])


@component
class Mixture:
    """Several sources at once: of many sequences, the share of each source tends to its weight.

    Weights count sequences, not documents, and are resolved to 1% of the smallest one. Each source is shuffled on its
    own and begins its next epoch when it is through. Which source a sequence comes from follows from its index alone.

    Args:
        sources: configs of sources, of any kind, mixtures too.
        weights: one positive number per source; only their proportions matter.
    """

    def __init__(self, *, sources: list[Config], weights: list[float]):
        if not sources or len(sources) != len(weights):
            raise ValueError(f"Mixture: expected a weight per source, given {len(weights)} for {len(sources)} sources")
        if bad := [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]:
            raise ValueError(f"Mixture.weights: expected positive numbers, given {bad[0]}")
        self.sources = [source.instantiate() for source in sources]
        self.weights = [weight / sum(weights) for weight in weights]


@dataclass(eq=False)
class Leaf:
    """One source that is not a mixture."""

    label: str  # its dotted config path: data.source.sources.1
    name: str  # "train", "train.1", or a validation set's name
    weight: float  # its share of the training sequences; 1.0 for a validation set
    source: TextSource | TokenMemmap
    stream: TokenStream = field(init=False)  # set by DataPipeline.setup, as is
    rows: Windows | Conversations = field(init=False)  # what batches are made of


def leaves_of(source: object, label: str, name: str, weight: float = 1.0) -> Iterator[Leaf]:
    """The sources in `source`, mixtures (of mixtures) opened up; anything else is a ValueError."""
    if isinstance(source, Mixture):
        for i, (child, share) in enumerate(zip(source.sources, source.weights, strict=True)):
            yield from leaves_of(child, f"{label}.sources.{i}", f"{name}.{i}", weight * share)
    elif isinstance(source, TextSource | TokenMemmap):
        yield Leaf(label, name, weight, source)
    else:
        given = type(source).__name__
        raise ValueError(f"{label}: expected a source (TextSource, TokenMemmap or Mixture), given {given}")


@contextlib.contextmanager
def located(label: str) -> Iterator[None]:
    """Puts the config path in front of a data error."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, ValueError) as error:
        if str(error).startswith("data."):  # from further inside, where the place is known better
            raise
        kind = type(error) if isinstance(error, OSError) else ValueError  # a UnicodeError takes other arguments
        raise kind(f"{label}: {error}") from error
    except OSError as error:  # a full disk, say
        if error.errno is None or str(error.strerror).startswith("data."):
            raise
        raise OSError(error.errno, f"{label}: {error.strerror}", error.filename) from error
