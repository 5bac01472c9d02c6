"""The input pipeline: from configured sources to global batches, each a pure function of (seed, step).

    setup(workdir)                       tokenizer and token files, cached by content; every data error is raised here
    train_batch(step, rows)              the given rows of the global batch of that step
    train_iterator(start_step, rows)     the same, prefetched
    eval_batches(name, rows)             a validation stream once, in order

The global batch is the same whatever the number of processes or devices: a process asks for the rows its devices hold.
May import: framework.config, framework.data, numpy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from framework.config import Config, NonNegativeInt, PositiveInt
from framework.data.encode import Progress, cached_tokens
from framework.data.leaves import Leaf, leaves_of, located, training_text
from framework.data.order import GlobalOrder
from framework.data.packing import Batch, num_whole_windows, num_windows, pack, read_window
from framework.data.prefetch import Prefetcher
from framework.data.sources import Mixture, TextSource
from framework.data.sources.base import digest_of
from framework.data.storage import FileHashes, clear_leftovers
from framework.data.token_files import TokenStream
from framework.data.tokenizers import Tokenizer

_ENDLESS = 1 << 62
_FINGERPRINT = 1  # raise when a change of this package changes the batches that a config gives


@dataclass(frozen=True)
class SourceReport:
    """One row of the start table."""

    name: str  # "train", "train[1]", or a validation set's name
    kind: str  # class of the source
    weight: float  # share of the training sequences; 1.0 for a validation set
    tokens: int
    documents: int | None  # None where token files come without a sidecar
    bytes: int | None  # of UTF-8 text
    sequences: int  # windows of seq_len
    sha256: str  # of the tokens


class DataPipeline:
    """Documents in, batches out.

    A batch is a dict: tokens int32[B,S], targets int32[B,S] (the inputs' successors), weights float32[B,S] (0 = not
    counted), and with `document_mask` positions int32[B,S] (restart at 0 in each document) and segments int32[B,S] (1,
    2, ... per row, 0 = padding).

    Args:
        source: config of the training source: StdlibSource, TextFiles, JsonLines, Parquet, TokenMemmap, Mixture, your
            own.
        validation: named validation sources, each read once in order by an evaluation.
        tokenizer: config of ByteTokenizer, BPETokenizer or NoTokenizer.
        seq_len: S, tokens per sequence.
        global_batch_size: B, sequences per step over all processes and devices.
        seed: decides the order of training sequences, which is reshuffled each epoch.
        document_mask: keep attention within documents; without it a sequence is one causal stream.
        prefetch: batches that wait ready in the background.
        cache_dir: folder for tokenized sources; None puts them into the workdir. A shared one saves work across runs.
    """

    def __init__(
        self,
        *,
        source: Config,
        validation: dict[str, Config] = {},  # noqa: B006  (never changed; a config's default must be data)
        tokenizer: Config,
        seq_len: PositiveInt,
        global_batch_size: PositiveInt,
        seed: NonNegativeInt = 0,
        document_mask: bool = False,
        prefetch: PositiveInt = 2,
        cache_dir: str | None = None,
    ):
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.document_mask = document_mask
        self.prefetch = prefetch
        self.cache_dir = cache_dir
        self.tokenizer: Tokenizer = tokenizer.instantiate()
        self.train_leaves = list(leaves_of(source.instantiate(), "data.source", "train", 1.0))
        self.validation_leaves: dict[str, Leaf] = {}
        for name, config in validation.items():
            label = f"data.validation.{name}"
            if not re.fullmatch(r"[\w-]+", name) or name == "train":
                raise ValueError(
                    f"{label}: expected a name of letters, digits, _ and -, and not 'train', given {name!r}"
                )
            if isinstance(evaluated := config.instantiate(), Mixture):
                raise ValueError(f"{label}: a Mixture has no end; name its sources as validation sets of their own")
            self.validation_leaves[name] = next(leaves_of(evaluated, label, name, 1.0))
        self._train: list[TokenStream] = []
        self._eval: dict[str, TokenStream] = {}
        self._order: GlobalOrder | None = None

    @property
    def vocab_size(self) -> int:
        """Known from the config alone, before `setup`."""
        return self.tokenizer.vocab_size

    @property
    def validation_names(self) -> list[str]:
        """The validation sets, in the order in which they are configured."""
        return list(self.validation_leaves)

    def setup(
        self,
        workdir: str | Path,
        *,
        is_primary: bool = True,
        barrier: Callable[[], object] = lambda: None,
        report: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Finds, tokenizes and verifies everything, so that training reads token files only.

        Args:
            workdir: a local folder; `tokenizer.json` is kept in it, and without `cache_dir` the tokens too.
            is_primary: the one process that writes; the others open what it wrote, so all must see the same folders.
            barrier: waits for all processes; called once.
            report: told how far the tokenization is.

        Raises:
            FileNotFoundError, PermissionError, ValueError: data or tokenizer missing, unreadable, damaged, or too short
                for one batch; each begins with the config path of its source.
        """
        if "://" in str(workdir):
            raise ValueError(f"the data pipeline keeps files in the workdir and needs a local folder, given {workdir}")
        folder = Path(workdir)
        cache = folder / "data" if self.cache_dir is None else Path(self.cache_dir).expanduser()
        if is_primary:
            for path in (folder, cache):
                try:
                    path.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise type(error)(f"cannot make the folder {path} for tokenizer and tokens: {error}") from error
            clear_leftovers(cache)
            self._open(folder, cache, write=True, report=report)
        barrier()
        if not is_primary:
            self._open(folder, cache, write=False, report=report)

    def _open(self, folder: Path, cache: Path, *, write: bool, report: Callable[[Progress], None]) -> None:
        hashes = FileHashes(cache / "hashes.json")
        self.prepare_tokenizer(folder, write=write)

        def stream(leaf: Leaf) -> TokenStream:
            with located(leaf.label):
                if isinstance(leaf.source, TextSource):
                    return cached_tokens(
                        leaf.source, self.tokenizer, cache, leaf.name, hashes=hashes, write=write, report=report
                    )
                return leaf.source.open(vocab_size=self.vocab_size, tokenizer=self.tokenizer.digest, hashes=hashes)

        self._train = [stream(leaf) for leaf in self.train_leaves]
        self._eval = {name: stream(leaf) for name, leaf in self.validation_leaves.items()}
        if write:
            hashes.save()
        self._check()
        counts = [num_whole_windows(tokens.num_tokens, self.seq_len) for tokens in self._train]
        self._order = GlobalOrder(counts, [leaf.weight for leaf in self.train_leaves], self.seed)

    def prepare_tokenizer(self, folder: Path, *, write: bool) -> None:
        """Loads the tokenizer, or trains it on the training sources and keeps it in `folder` (only if `write`)."""
        has_text = any(isinstance(leaf.source, TextSource) for leaf in self.train_leaves)
        texts = functools.partial(training_text, self.train_leaves) if has_text else None
        with located("data.tokenizer"):
            self.tokenizer.prepare(folder, texts, write=write)

    def _check(self) -> None:
        total = 0
        for leaf, stream in [*zip(self.train_leaves, self._train, strict=True), *self._eval_items()]:
            is_train = leaf.name not in self.validation_leaves
            least = self.seq_len + 1 if is_train else 2
            if stream.num_tokens < least:
                raise ValueError(
                    f"{leaf.label}: {stream.num_tokens} tokens are too few: one sequence of "
                    f"data.seq_len={self.seq_len} needs {least} tokens"
                )
            with located(leaf.label):
                self._separator(stream)
            total += num_whole_windows(stream.num_tokens, self.seq_len) if is_train else 0
        if total < self.global_batch_size:
            raise ValueError(
                f"data.source: holds {total} sequences of data.seq_len={self.seq_len}, too few for one batch of "
                f"data.global_batch_size={self.global_batch_size}"
            )

    def _separator(self, stream: TokenStream) -> int | None:
        """The id that opens documents in `stream`."""
        own, configured = stream.eos_id, self.tokenizer.eos_id
        if own is not None and configured is not None and own != configured:
            raise ValueError(f"its tokens are separated by eos_id={own}, but the tokenizer's eos_id is {configured}")
        separator = own if own is not None else configured
        if self.document_mask and separator is None:
            raise ValueError(
                "data.document_mask needs to know the separator: set eos_id of this TokenMemmap, or of data.tokenizer"
            )
        return separator

    def fingerprint(self) -> str:
        """sha256 of all that decides the training batches: tokens, weights, shape, seed, mask. The number of processes
        is not part of it. A run that resumes under another fingerprint would see other data."""
        self._ready()
        leaves = zip(self.train_leaves, self._train, strict=True)
        return digest_of(
            {
                "version": _FINGERPRINT,
                "sources": [[stream.digest, leaf.weight] for leaf, stream in leaves],
                "seq_len": self.seq_len,
                "global_batch_size": self.global_batch_size,
                "seed": self.seed,
                "separators": [self._separator(stream) for stream in self._train] if self.document_mask else None,
            }
        )

    def train_batch(self, step: int, rows: Sequence[int] | np.ndarray) -> Batch:
        """The given rows (b of them, each in [0, B)) of the global batch of `step` >= 0: arrays [b,S], as the class
        says.

        Raises:
            ValueError: a token file changed since `setup` (naming shard and offset).
        """
        order = self._ready()
        rows = self._checked(rows)
        places = [order.locate(step * self.global_batch_size + row) for row in rows]
        windows = [read_window(self._train[source], window, self.seq_len) for source, window in places]
        return self._pack(windows, [self._train[source] for source, _ in places])

    def train_iterator(self, start_step: int, rows: Sequence[int] | np.ndarray) -> Prefetcher[tuple[int, Batch]]:
        """(step, train_batch(step, rows)) from `start_step` on, without end; close it when done.

        At most `prefetch` batches wait in the background, beside the one handed out last.
        """
        self._ready()
        rows = self._checked(rows)
        return Prefetcher(lambda step: (step, self.train_batch(step, rows)), start_step, _ENDLESS, ahead=self.prefetch)

    def num_eval_batches(self, name: str) -> int:
        """Batches that hold the whole validation set `name`."""
        windows = num_windows(self._validation(name).num_tokens, self.seq_len)
        return -(-windows // self.global_batch_size)

    def eval_batches(self, name: str, rows: Sequence[int] | np.ndarray, limit: int | None = None) -> Prefetcher[Batch]:
        """The given rows of each batch of validation set `name`, in order, the first `limit` batches only if given.

        Shapes are those of training. Each token of the stream but its first is a target once; what is left over in the
        last batch has weight 0 (a row may be padding from end to end). Prefetched as `train_iterator`.
        """
        stream = self._validation(name)
        rows = self._checked(rows)

        def batch(number: int) -> Batch:
            first = number * self.global_batch_size
            windows = [read_window(stream, first + row, self.seq_len) for row in rows]
            return self._pack(windows, [stream] * len(rows))

        total = self.num_eval_batches(name)
        return Prefetcher(batch, 0, total if limit is None else min(limit, total), ahead=self.prefetch)

    def document_text(self, name: str) -> bytes:
        """The text of validation set `name`, exactly the bytes that its target tokens stand for, separators left out.

        Raises:
            ValueError: the tokenizer is NoTokenizer.
        """
        stream = self._validation(name)
        pieces = (
            stream.read(at, min(at + (1 << 20), stream.num_tokens)) for at in range(0, stream.num_tokens, 1 << 20)
        )
        return b"".join(self.tokenizer.decode_bytes(piece) for piece in pieces)

    def source_report(self) -> list[SourceReport]:
        """What training and each validation set hold: rows for the start table."""
        self._ready()
        rows = []
        for leaf, stream in [*zip(self.train_leaves, self._train, strict=True), *self._eval_items()]:
            count = num_windows if leaf.name in self.validation_leaves else num_whole_windows
            rows.append(
                SourceReport(
                    name=leaf.name, kind=type(leaf.source).__name__, weight=leaf.weight, tokens=stream.num_tokens,
                    documents=stream.num_documents, bytes=stream.num_bytes,
                    sequences=count(stream.num_tokens, self.seq_len), sha256=stream.digest,
                )
            )  # fmt: skip
        return rows

    def _pack(self, windows: Sequence[np.ndarray], streams: Sequence[TokenStream]) -> Batch:
        separators = [self._separator(stream) for stream in streams] if self.document_mask else None
        return pack(windows, self.seq_len, separators=[s for s in separators if s is not None] if separators else None)

    def _eval_items(self) -> Iterator[tuple[Leaf, TokenStream]]:
        return ((leaf, self._eval[name]) for name, leaf in self.validation_leaves.items())

    def _ready(self) -> GlobalOrder:
        assert self._order is not None, "setup() first"
        return self._order

    def _validation(self, name: str) -> TokenStream:
        self._ready()
        if name not in self._eval:
            raise ValueError(f"no validation set {name!r}; data.validation has {', '.join(self._eval) or 'none'}")
        return self._eval[name]

    def _checked(self, rows: Sequence[int] | np.ndarray) -> list[int]:
        given = [int(row) for row in rows]
        if bad := [row for row in given if not 0 <= row < self.global_batch_size]:
            raise ValueError(
                f"rows: expected indices below data.global_batch_size={self.global_batch_size}, given {bad[0]}"
            )
        return given
