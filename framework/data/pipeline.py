"""The input pipeline: from configured sources to global batches, each a pure function of (seed, step).

`setup` makes tokenizer and token files, cached by content, and raises every data error. The global batch is the same
whatever the number of processes or devices: a process asks for the rows its devices hold.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from framework.config import Config, PositiveInt, Seed, component
from framework.data.batches import Pipeline, Shapes
from framework.data.chats import ChatSource
from framework.data.files import FileHashes, digest_of
from framework.data.order import GlobalOrder
from framework.data.packing import Batch, Conversations, Windows
from framework.data.pretrained_tokenizer import PretrainedTokenizer
from framework.data.sources import Leaf, Mixture, TextSource, TokenMemmap, leaves_of, located
from framework.data.token_files import TokenStream
from framework.data.tokenize import write_tokens
from framework.data.tokenizers import Tokenizer
from framework.files.workdir import write_json
from framework.terminal.tables import human_bytes

_FINGERPRINT = 1  # raise when a change of this package changes the batches that a config gives


@dataclass(frozen=True)
class SourceReport:
    """One row of the start table."""

    name: str  # "train", "train.1", or a validation set's name
    kind: str  # class of the source
    tokens: int
    documents: int | None  # None where token files come without a sidecar
    bytes: int | None  # of UTF-8 text
    sequences: int  # rows of seq_len
    sha256: str  # of the tokens
    note: str = ""  # how conversations were packed

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.tokens:,} tokens", f"{self.sequences:,} sequences"]
        parts += [] if self.documents is None else [f"{self.documents:,} documents"]
        parts += [] if self.bytes is None else [f"{human_bytes(self.bytes)} of text"]
        return ", ".join([*parts, *filter(None, [self.note]), f"sha256 {self.sha256[:12]}"])


@component
class DataPipeline(Pipeline):
    """Documents in, batches out.

    A batch is a dict: tokens int32[B,S], targets int32[B,S] (the inputs' successors), weights float32[B,S] (0 = not
    counted), and with `document_mask` positions int32[B,S] (restart at 0 in each document) and segments int32[B,S] (1,
    2, ... per row, 0 = padding).

    Args:
        source: config of the training source, of framework.data.sources or your own.
        validation: named validation sources, each read once in order by an evaluation.
        tokenizer: config of ByteTokenizer, BPETokenizer, PretrainedTokenizer or NoTokenizer.
        seq_len: S, tokens per sequence.
        global_batch_size: B, sequences per step over all processes and devices.
        seed: decides the order of training sequences, which is reshuffled each epoch.
        document_mask: keep attention within documents, not one causal stream per row. Always on with a ChatSource.
        prefetch: batches that wait ready in the background.
        cache_dir: folder for tokenized sources; None puts them into the workdir. A shared one saves work across runs.
    """

    item, loss_unit = "token", "nats per token"

    def __init__(
        self,
        *,
        source: Config,
        validation: dict[str, Config] = {},  # noqa: B006  (never changed; a config's default must be data)
        tokenizer: Config,
        seq_len: PositiveInt,
        global_batch_size: PositiveInt,
        seed: Seed = 0,
        document_mask: bool = False,
        prefetch: PositiveInt = 2,
        cache_dir: str | None = None,
    ):
        self.seq_len, self.global_batch_size, self.seed = seq_len, global_batch_size, seed
        self.document_mask, self.prefetch, self.cache_dir = document_mask, prefetch, cache_dir
        self.tokenizer: Tokenizer = tokenizer.instantiate()
        self.train_leaves = list(leaves_of(source.instantiate(), "data.source", "train"))
        self.validation_leaves: dict[str, Leaf] = {}
        for name, config in validation.items():
            label = f"data.validation.{name}"
            if not re.fullmatch(r"[\w-]+", name) or name == "train":
                raise ValueError(f"{label}: expected a name of letters, digits, _ and -, and not 'train'")
            if isinstance(evaluated := config.instantiate(), Mixture):
                raise ValueError(f"{label}: a Mixture has no end; name its sources as validation sets of their own")
            self.validation_leaves[name] = next(leaves_of(evaluated, label, name))
        for leaf in (leaf for leaf in self.leaves if isinstance(leaf.source, ChatSource)):
            if not isinstance(self.tokenizer, PretrainedTokenizer):
                given = type(self.tokenizer).__name__
                raise ValueError(
                    f"{leaf.label}: ChatSource needs the chat template of a PretrainedTokenizer, given {given}"
                )
            self.document_mask = True  # conversations are packed together

    @property
    def validation_names(self) -> list[str]:
        """The validation sets, in the order in which they are configured."""
        return list(self.validation_leaves)

    @property
    def leaves(self) -> list[Leaf]:
        """All sources, those of training first."""
        return [*self.train_leaves, *self.validation_leaves.values()]

    def setup(
        self, workdir: str | Path, *, is_primary: bool = True, barrier: Callable[[], object] = lambda: None
    ) -> None:
        """Finds, tokenizes and verifies everything, so that training reads token files only.

        Args:
            workdir: a local folder; `tokenizer.json` is kept in it, and without `cache_dir` the tokens too.
            is_primary: the one process that writes; the others open what it wrote, so all must see the same folders.
            barrier: waits for all processes; called once.

        Raises:
            FileNotFoundError, PermissionError, ValueError: data or tokenizer are not usable, from which config path on.
        """
        if "://" in str(workdir):
            raise ValueError(f"the data pipeline keeps files in the workdir and needs a local folder, given {workdir}")
        folder = Path(workdir)
        cache = folder / "data" if self.cache_dir is None else Path(self.cache_dir).expanduser()
        if is_primary:
            folder.mkdir(parents=True, exist_ok=True)
            cache.mkdir(parents=True, exist_ok=True)
            for left in cache.glob(".tokens-*") if self.cache_dir is None else ():  # a workdir belongs to one job
                shutil.rmtree(left)
            self._open(folder, cache, write=True)
        barrier()
        if not is_primary:
            self._open(folder, cache, write=False)

    def _open(self, folder: Path, cache: Path, *, write: bool) -> None:
        for leaf in self.leaves:  # what is missing is found out before hours of tokenizing
            with located(leaf.label):
                leaf.source.files()
        hashes = FileHashes(cache / "hashes.json")
        self.prepare_tokenizer(folder, write=write)
        for leaf in self.leaves:
            with located(leaf.label):
                self._open_leaf(leaf, cache, hashes, write)
        if write:
            hashes.save()
        counts = [leaf.rows.num_whole for leaf in self.train_leaves]
        if sum(counts) < self.global_batch_size:
            raise ValueError(
                f"data.source: holds {sum(counts)} sequences of data.seq_len={self.seq_len}, too few for one batch of "
                f"data.global_batch_size={self.global_batch_size}"
            )
        self._num_rows = sum(counts)
        self._order = GlobalOrder(counts, [leaf.weight for leaf in self.train_leaves], self.seed)

    def _open_leaf(self, leaf: Leaf, cache: Path, hashes: FileHashes, write: bool) -> None:
        source, is_training = leaf.source, leaf in self.train_leaves
        if isinstance(source, TextSource):
            leaf.stream = cached_tokens(source, self.tokenizer, cache, hashes, write=write)
        else:
            leaf.stream = source.open(self.tokenizer, hashes, self.cache_dir)
        num_tokens, least = leaf.stream.num_tokens, self.seq_len + 1 if is_training else 2
        if isinstance(source, ChatSource):
            leaf.rows = Conversations(leaf.stream, self.seq_len, self.seed if is_training else None)
            if not leaf.rows.num_rows:
                raise ValueError(f"no conversation has an answer within data.seq_len={self.seq_len}")
            return
        if num_tokens < least:
            raise ValueError(f"{num_tokens} tokens are too few: data.seq_len={self.seq_len} needs {least}")
        if self.document_mask and leaf.stream.eos_id is None:
            raise ValueError("data.document_mask needs to know the separator: set its eos_id")
        leaf.rows = Windows(leaf.stream, self.seq_len, masked=self.document_mask)

    def prepare_tokenizer(self, folder: Path, *, write: bool) -> None:
        """Loads the tokenizer, or trains it on the training sources and keeps it in `folder` (only if `write`)."""
        has_text = any(isinstance(leaf.source, TextSource) for leaf in self.train_leaves)
        texts = functools.partial(training_text, self.train_leaves) if has_text else None
        with located("data.tokenizer"):
            self.tokenizer.prepare(folder, texts, write=write)

    def fingerprint(self) -> str:
        """sha256 of all that decides the training batches: a run that resumes under another one would see other data.
        The number of processes is no part of it."""
        separators = [leaf.stream.eos_id for leaf in self.train_leaves] if self.document_mask else None
        sources = [[leaf.stream.digest, leaf.weight] for leaf in self.train_leaves]
        return digest_of([_FINGERPRINT, sources, self.seq_len, self.global_batch_size, self.seed, separators])

    def arrays(self, *, evaluation: bool = False) -> Shapes:
        names = ["tokens", "targets", *(["positions", "segments"] if self.document_mask else []), "weights"]
        names += ["bytes"] if evaluation and self.tokenizer.has_text else []
        shape = (self.global_batch_size, self.seq_len)
        return {name: (shape, "float32" if name in ("weights", "bytes") else "int32") for name in names}

    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        return self.train_leaves[source].rows.row(index)

    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        """Where tokens stand for text, batches have an array more: bytes f32[B,S], of each target that is counted."""
        rows, tokenizer = self._validation(name).rows, self.tokenizer

        def read(index: int) -> Batch:
            row = rows.row(index)
            if tokenizer.has_text:
                row["bytes"] = (tokenizer.byte_lengths[row["targets"]] * row["weights"]).astype(np.float32)
            return row

        return rows.num_rows, read

    def document_text(self, name: str) -> bytes:
        """The text of validation set `name`: exactly the bytes that its targets stand for, separators left out."""
        rows = self._validation(name).rows
        read = (rows.row(index) for index in range(rows.num_rows))
        return b"".join(self.tokenizer.decode_bytes(row["targets"][row["weights"] > 0]) for row in read)

    def source_report(self) -> list[SourceReport]:
        """What training and each validation set hold: rows for the start table."""
        report = []
        for leaf in self.leaves:
            stream, rows = leaf.stream, leaf.rows
            size = None if isinstance(leaf.source, ChatSource) else stream.num_bytes
            count = rows.num_rows if leaf.name in self.validation_leaves else rows.num_whole
            facts = (stream.num_tokens, stream.num_documents, size, count, stream.digest, rows.note)
            report.append(SourceReport(leaf.name, type(leaf.source).__name__, *facts))
        return report

    def _validation(self, name: str) -> Leaf:
        if name not in self.validation_leaves:
            raise ValueError(f"no validation set {name!r}; data.validation has {', '.join(self.validation_leaves)}")
        return self.validation_leaves[name]


def cached_tokens(
    source: TextSource, tokenizer: Tokenizer, cache: Path, hashes: FileHashes, *, write: bool
) -> TokenStream:
    """The tokens of `source`, from `cache` when the same content was tokenized before with the same tokenizer.

    Only a process that may `write` tokenizes; another finds what was written (else FileNotFoundError).
    """
    contents, tokenizer = source.contents(hashes), source.codec(tokenizer)
    folder = cache / f"tokens-{digest_of([contents['sha256'], tokenizer.digest])[:16]}"
    if not folder.exists() and not write:
        raise FileNotFoundError(
            f"{folder} does not exist: the first process was to write it; do all see that folder and equal sources?"
        )
    if not folder.exists():
        temporary = cache / f".{folder.name}-{uuid.uuid4().hex[:8]}"
        temporary.mkdir()
        try:
            list(write_tokens(source, tokenizer, temporary / "tokens.bin"))
            write_json(temporary / "source.json", contents)
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.exists():  # else another job tokenized the same content first
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return TokenMemmap(path=str(folder / "tokens.bin")).open(tokenizer, hashes)


def training_text(leaves: Sequence[Leaf], budget: int) -> Iterator[str]:
    """The first documents of each source of text, `budget` bytes in all, shared by weight."""
    texts = [(leaf, leaf.source) for leaf in leaves if isinstance(leaf.source, TextSource)]
    total = sum(leaf.weight for leaf, _ in texts)
    for leaf, source in texts:
        left = budget * leaf.weight / total
        with located(leaf.label):
            for document in source.documents():
                yield document
                left -= len(document.encode("utf-8"))
                if left <= 0:
                    break
