"""Data sources: one class per kind of source, configured by its constructor.

A text source yields documents, a `TokenMemmap` already contains tokens, and a `Mixture` weights other sources. To add
a source, follow docs/data.md.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import math
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import annotated_types as at

from plimsoll.framework.config import Config, NonNegativeInt, component, did_you_mean
from plimsoll.framework.data.files import DataFile, FileHashes, compute_digest, fetch_local_copy, find
from plimsoll.framework.data.order import check_weights
from plimsoll.framework.data.packing import Examples, Windows
from plimsoll.framework.data.row_files import csv_rows, json_rows, parquet_rows, split_documents, text_field
from plimsoll.framework.data.token_files import TokenDType, TokenShard, TokenStream, sidecar_name
from plimsoll.framework.data.tokenizers import Tokenizer

# Folders of an installation that StdlibSource skips: tests, and packages that were added.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"})


class DataSource(abc.ABC):
    """A source of text, read file by file.

    The constructor only stores its arguments. Only the methods access disks and networks; they run before anything is
    compiled, and never in a training step.
    """

    paths: list[str]
    # Name of the class in digests, if it differs: a renamed class still finds the tokens that it wrote.
    digest_name: ClassVar[str | None] = None

    def files(self) -> list[DataFile]:
        """Returns the files that the source reads, in order."""
        return find(self.paths)

    @abc.abstractmethod
    def read(self, file: DataFile) -> Iterator[str]:
        """Yields the documents of one file, in order.

        Raises:
            ValueError: a document cannot be read. The message gives its location.
        """

    def codec(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer that encodes the documents, given the config's tokenizer."""
        return tokenizer

    def training_texts(self) -> Iterator[str]:
        """Returns an iterator over the texts for training a tokenizer: by default, the documents."""
        return self.documents()

    def settings(self) -> dict[str, object]:
        """Returns the JSON data that, in addition to the files' contents, determines the documents.

        These are the constructor's arguments, without `paths`.
        """
        return {name: value for name, value in vars(self).items() if name != "paths"}

    def documents(self) -> Iterator[str]:
        """Returns an iterator over all documents, in order."""
        # An expression rather than a generator method, so that a missing file raises in this call, and not in the first
        # `next`.
        return (document for file in self.files() for document in self.read(file))

    def contents(self, hashes: FileHashes) -> dict[str, object]:
        """Returns the metadata to store with the tokens.

        This is the kind of source, its settings, the sha256 of each file, and one sha256 over all of these.
        """
        files = []
        for file in self.files():
            files.append({"name": file.name, "sha256": hashes.sha256(file)})
        facts = {"kind": self.digest_name or type(self).__name__, "settings": self.settings()}
        # The digest excludes file names: a corpus that moved is the same corpus.
        file_digests = [file["sha256"] for file in files]
        digest = compute_digest({**facts, "files": file_digests})
        return {"sha256": digest, **facts, "files": files}


class ExampleSource(DataSource):
    """A source whose documents stay whole in a row, masked from their neighbors: conversations, preference pairs.

    Attributes:
        row_arrays: names of the arrays that its rows have in addition to tokens, targets, positions, segments and
            weights; all are float32.
    """

    row_arrays: ClassVar[tuple[str, ...]] = ()

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError if the tokenizer cannot encode the documents, as far as is known before reading them."""

    @abc.abstractmethod
    def rows(self, stream: TokenStream, seq_len: int, seed: int | None) -> Examples:
        """Returns the rows of the tokens that `codec` produced; the arguments are those of Examples.

        Raises:
            ValueError: a document does not fit, or none does.
        """


@component
class StdlibSource(DataSource):
    """The `.py` files of the running Python's standard library, one document per file, sorted by name.

    This is real text that is available on every machine. Test packages are excluded (they are repetitive), and so are
    packages added to the installation. A file belongs to "validation" if the sha256 of its relative path falls into 5
    of 100 buckets, otherwise to "train": the split depends only on names, and no file is in both.

    Args:
        split: which part to read.
        share: approximate fraction of the files of that part, chosen by the sha256 of their names, for runs that
            should see only a little text.
    """

    def __init__(
        self, *, split: Literal["train", "validation"] = "train", share: Annotated[float, at.Interval(gt=0, le=1)] = 1.0
    ):
        self.split = split
        self.share = share

    def settings(self) -> dict[str, object]:
        share = {} if self.share == 1.0 else {"share": self.share}
        return {"split": self.split, **share, "python": platform.python_version()}

    def files(self) -> list[DataFile]:
        # In a virtual environment too, this is the folder of the base interpreter.
        root = Path(sysconfig.get_path("stdlib"))
        names = [name for name in library_files(root) if assign_split(name) == self.split]
        if self.share < 1.0:
            # Hash a different text from `name`, because the hash of `name` has already decided the split.
            names = [name for name in names if assign_split(f"share {name}", self.share) == "validation"]
        if not names:
            raise FileNotFoundError(f"the standard library at {root} has no sources (is it zipped or stripped?)")
        return find(str(root / name) for name in names)

    def read(self, file: DataFile) -> Iterator[str]:
        # A module may declare an encoding other than UTF-8; that must not abort a run.
        yield file.read().decode("utf-8", errors="replace")


def library_files(root: Path) -> list[str]:
    """Returns the relative paths (with /) of the library's own modules below `root`, sorted."""
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        # The list is modified in place, which keeps os.walk out of the removed folders.
        for name in list(subfolders):
            # config-* holds the Makefile and settings of one build.
            if name in _LEFT_OUT or name.endswith("_tests") or name.startswith("config-"):
                subfolders.remove(name)
        relative_folder = Path(folder).relative_to(root)
        for file in files:
            # _sysconfigdata* describes one build of Python, and differs between machines.
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                names.append((relative_folder / file).as_posix())
    return sorted(names)


def assign_split(content: str, validation_fraction: float = 0.05) -> Literal["train", "validation"]:
    """Assigns an item to one of two disjoint parts, by the sha256 of a text.

    Args:
        content: the text that identifies the item, for instance a file's relative path.
        validation_fraction: approximate fraction of all items in "validation".
    """
    hashed = hashlib.sha256(content.encode()).digest()
    number = int.from_bytes(hashed[:8], "big")
    # The integer part is one of 100 buckets. The three decimals come from digits of the number that do not affect the
    # bucket. They divide a bucket if the fraction is not a whole percentage.
    percent = number % 100 + number // 100 % 1000 / 1000
    return "validation" if percent < 100 * validation_fraction else "train"


@component
class TextFiles(DataSource):
    """UTF-8 text files; each file is one document, or several separated by `separator`.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; decompressed by file extension.
        separator: text between two documents of one file (for instance "<|endoftext|>"); it belongs to neither.
    """

    def __init__(self, *, paths: list[str], separator: str | None = None):
        if separator == "":
            raise ValueError("separator: expected text or None, given ''")
        self.paths = paths
        self.separator = separator

    def read(self, file: DataFile) -> Iterator[str]:
        separator = self.separator.encode() if self.separator else None
        for offset, data in split_documents(file, separator):
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: not UTF-8 at byte {offset + error.start}: {error.reason}") from error
            yield text


@component
class JsonLines(DataSource):
    """JSON lines files with one object per line; the text is in `field`.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; decompressed by file extension.
        field: the key of the text in each object.
    """

    def __init__(self, *, paths: list[str], field: str = "text"):
        self.paths = paths
        self.field = field

    def read(self, file: DataFile) -> Iterator[str]:
        for location, record in json_rows(file):
            try:
                yield text_field(record, self.field)
            # A UnicodeEncodeError is a ValueError too.
            except ValueError as error:
                raise ValueError(f"{file}, {location}: not a JSON object with text: {error}") from error


@component
class Csv(DataSource):
    """A column of CSV or TSV files with a header; each row is a document.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order; decompressed by file extension.
        column: the name of the text column.
    """

    def __init__(self, *, paths: list[str], column: str = "text"):
        self.paths = paths
        self.column = column

    def read(self, file: DataFile) -> Iterator[str]:
        for location, row in csv_rows(file):
            if self.column not in row:
                raise ValueError(f"{file}, {location}: no column {self.column!r}{did_you_mean(self.column, row)}")
            yield row[self.column]


@component
class Parquet(DataSource):
    """A text column of Parquet files; each row is a document. Only a few rows are in memory at a time.

    Args:
        paths: local paths, globs or fsspec URLs, read in this order.
        column: the name of the text column.
    """

    def __init__(self, *, paths: list[str], column: str = "text"):
        self.paths = paths
        self.column = column

    def read(self, file: DataFile) -> Iterator[str]:
        for location, row in parquet_rows(file, self.column):
            text = row[self.column]
            if not isinstance(text, str):
                raise ValueError(f"{file}, {location}: expected text, given {type(text).__name__}")
            yield text


@component
class TokenMemmap:
    """Existing token files: nanoGPT-style `.bin` files, and those that `plimsoll prepare` writes; read in ranges.

    Args:
        path: a `.bin`, a glob of shards (read in sorted order as one stream), or an fsspec URL of either (which is
            copied once, to data.cache_dir or ~/.cache/plimsoll).
        dtype: uint16 or uint32; None takes the sidecar's, or uint16 without one.
        eos_id: the token between documents; None takes the sidecar's. Needed only to mask documents from each other.
        verify: read each file once before training, to check hashes and ids. If False, only sizes are checked, and
            ids as they are read.
    """

    def __init__(
        self, *, path: str, dtype: TokenDType | None = None, eos_id: NonNegativeInt | None = None, verify: bool = True
    ):
        self.path = path
        self.dtype: TokenDType | None = dtype
        self.eos_id = eos_id
        self.verify = verify

    def files(self) -> list[DataFile]:
        """Returns the shards, in order."""
        return find(self.path)

    def open(self, tokenizer: Tokenizer, hashes: FileHashes, cache_dir: str | None = None) -> TokenStream:
        """Opens all shards as one stream; remote shards are read from their copies in `cache_dir`.

        Raises the errors of `find`, `fetch_local_copy` and TokenShard.
        """
        # Fetch everything before verifying the first shard.
        local_files = []
        for file in self.files():
            local_files.append(fetch_local_copy(file, cache_dir, sidecar_name(file.path)))
        shards = []
        for file in local_files:
            shard = TokenShard(file, tokenizer, hashes, dtype=self.dtype, eos_id=self.eos_id, verify=self.verify)
            shards.append(shard)
        return TokenStream(shards)


@component
class Mixture:
    """A mixture of several sources: the fraction of sequences from each source converges to its weight.

    Weights count sequences, not documents, and have a resolution of 1% of the smallest one. Each source is shuffled
    separately, and starts its next epoch when it is exhausted. The source of a sequence depends only on its index.

    Args:
        sources: configs of sources, of any kind, including mixtures.
        weights: one positive number per source; only their proportions matter.
    """

    def __init__(self, *, sources: list[Config], weights: list[float]):
        if not sources or len(sources) != len(weights):
            raise ValueError(
                f"Mixture: expected one weight per source, given {len(weights)} for {len(sources)} sources"
            )
        for weight in weights:
            is_positive = math.isfinite(weight) and weight > 0
            if not is_positive:
                raise ValueError(f"Mixture.weights: expected positive numbers, given {weight}")
        try:
            check_weights(weights)
        except ValueError as error:
            raise ValueError(f"Mixture.weights: {error}") from None
        self.sources = [source.instantiate() for source in sources]
        # Normalized here, so that equal proportions give equal fingerprints.
        total_weight = sum(weights)
        self.weights = [weight / total_weight for weight in weights]


@dataclass(eq=False)
class LeafSource:
    """One source that is not a mixture.

    Attributes:
        label: its dotted config path, such as data.source.sources.1.
        name: "train", "train.1", or a validation set's name.
        weight: its fraction of the training sequences; 1.0 for a validation set.
        source: the source.
        stream: its tokens; set by DataPipeline.setup.
        rows: the rows that batches consist of; set by DataPipeline.setup.
    """

    label: str
    name: str
    weight: float
    source: DataSource | TokenMemmap
    stream: TokenStream = field(init=False)
    rows: Windows | Examples = field(init=False)


def flatten_sources(source: object, label: str, name: str, weight: float = 1.0) -> Iterator[LeafSource]:
    """Yields the sources in `source`, with (nested) mixtures expanded.

    Raises:
        ValueError: `source`, or something in it, is not a source. The message names its config path.
    """
    if isinstance(source, Mixture):
        weighted_sources = zip(source.sources, source.weights, strict=True)
        for i, (child, share) in enumerate(weighted_sources):
            child_label = f"{label}.sources.{i}"
            yield from flatten_sources(child, child_label, f"{name}.{i}", weight * share)
    elif isinstance(source, DataSource | TokenMemmap):
        yield LeafSource(label, name, weight, source)
    else:
        raise ValueError(
            f"{label}: expected a source (DataSource, TokenMemmap or Mixture), given {type(source).__name__}"
        )


@contextlib.contextmanager
def prefix_errors(label: str) -> Iterator[None]:
    """Prefixes data errors with the config path."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, ValueError) as error:
        # The error already has a prefix from further inside, which is more specific.
        if str(error).startswith("data."):
            raise
        # Subclasses of ValueError become plain ones: a UnicodeError cannot be constructed from a text.
        kind = type(error) if isinstance(error, OSError) else ValueError
        raise kind(f"{label}: {error}") from error
    except OSError as error:
        # For instance a full disk. Keep the error number and file name, because callers check them.
        if error.errno is None or str(error.strerror).startswith("data."):
            raise
        raise OSError(error.errno, f"{label}: {error.strerror}", error.filename) from error
