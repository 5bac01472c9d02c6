"""The input pipeline: from configured sources to global batches, each a pure function of (seed, step).

`setup` creates the tokenizer and token files, cached by content, and raises every data error. The global batch does
not depend on the number of processes or devices: each process requests the rows that its devices hold.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from plimsoll.framework.config import Config, PositiveInt, Seed, component
from plimsoll.framework.data.batches import Pipeline, RowSet, Shapes
from plimsoll.framework.data.files import FileHashes, compute_digest
from plimsoll.framework.data.order import BatchOrder, GlobalOrder
from plimsoll.framework.data.packing import Batch, Examples, Windows
from plimsoll.framework.data.scored_sequences import SequenceSource, check_classes
from plimsoll.framework.data.sources import (
    DataSource,
    ExampleSource,
    LeafSource,
    Mixture,
    TokenMemmap,
    flatten_sources,
    prefix_errors,
)
from plimsoll.framework.data.stages import Stage, build_orders, build_stages, find_stage, resolve_stages
from plimsoll.framework.data.token_files import TokenStream
from plimsoll.framework.data.tokenize import write_tokens
from plimsoll.framework.data.tokenizers import Tokenizer
from plimsoll.framework.data.vocabulary import training_text
from plimsoll.framework.files import durable
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.terminal.phases import phase
from plimsoll.framework.terminal.tables import human_bytes

# Increase this when a change to this package changes the batches of a config: a run then refuses to resume instead of
# continuing with other data.
_FINGERPRINT = 1


@dataclass(frozen=True)
class SourceReport:
    """One row of the startup table.

    Attributes:
        name: "train", "train.1", or a validation set's name.
        kind: class of the source.
        tokens: number of tokens in the source.
        documents: number of documents; None for token files without a sidecar.
        bytes: size of the UTF-8 text, if known.
        sequences: number of rows of seq_len.
        sha256: hash of the tokens.
        note: a remark on how examples were packed.
    """

    name: str
    kind: str
    tokens: int
    documents: int | None
    bytes: int | None
    sequences: int
    sha256: str
    note: str = ""

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.tokens:,} tokens", f"{self.sequences:,} sequences"]
        if self.documents is not None:
            parts.append(f"{self.documents:,} documents")
        if self.bytes is not None:
            parts.append(f"{human_bytes(self.bytes)} of text")
        if self.note:
            parts.append(self.note)
        parts.append(f"sha256 {self.sha256[:12]}")
        return ", ".join(parts)


@component
class DataPipeline(Pipeline):
    """Global batches of tokens from configured sources.

    A batch is a dict: tokens int32[B,S], targets int32[B,S] (the next tokens), weights float32[B,S] (0 = not
    counted), and with `document_mask` positions int32[B,S] (restart at 0 in each document) and segments int32[B,S]
    (1, 2, ... per row, 0 = padding). A PairSource or RankedSource adds ends float32[B,S]; an UnpairedSource or
    LabeledSource adds ends and labels, both float32[B,S].

    Args:
        source: config of the training source, from framework.data.sources or your own.
        validation: named validation sources; an evaluation reads each one once, in order.
        tokenizer: config of ByteTokenizer, BPETokenizer, PretrainedTokenizer or NoTokenizer.
        seq_len: S, tokens per sequence.
        global_batch_size: B, sequences per step over all processes and devices.
        seed: seed for the order of the training sequences, which are reshuffled each epoch.
        stages: changes of the training data by the step that they start at, such as {"20000": DataStage(seq_len=8192)}.
            Steps count batches; a batch that a rollback leaves out counts too. Batches of a later stage have other
            shapes; see `at_stage`.
        document_mask: restrict attention to documents instead of one causal stream per row. Always on with an
            ExampleSource, such as ChatSource, PairSource or UnpairedSource.
        prefetch: number of batches prepared in the background.
        cache_dir: folder for tokenized sources; None uses the workdir. A shared folder saves work across runs.
    """

    item = "token"
    loss_unit = "nats per token"

    def __init__(
        self,
        *,
        source: Config,
        validation: dict[str, Config] = {},  # noqa: B006  (never changed; a config's default must be data)
        tokenizer: Config,
        seq_len: PositiveInt,
        global_batch_size: PositiveInt,
        seed: Seed = 0,
        stages: dict[str, Config] = {},  # noqa: B006
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
        train_source = source.instantiate()
        self.train_leaves = list(flatten_sources(train_source, "data.source", "train"))
        # Weights of the sources inside of each source of a mixture.
        self._inner_weights: list[list[float]] = []
        if isinstance(train_source, Mixture):
            for child in train_source.sources:
                self._inner_weights.append([leaf.weight for leaf in flatten_sources(child, "data.source", "train")])
        self._changes = build_stages(stages)
        # Reading the property checks the stages.
        self.stages  # noqa: B018
        # The rows of all sources by sequence length, and the orders of all stages by origin.
        self._rows_by_length: dict[int, list[Windows | Examples]] = {}
        self._orders_by_origin: dict[int, list[GlobalOrder]] = {}
        self.validation_leaves: dict[str, LeafSource] = {}
        for name, config in validation.items():
            label = f"data.validation.{name}"
            if not re.fullmatch(r"[\w-]+", name) or name == "train":
                raise ValueError(f"{label}: expected a name of letters, digits, _ and -, and not 'train'")
            validation_source = config.instantiate()
            if isinstance(validation_source, Mixture):
                raise ValueError(f"{label}: a Mixture has no end; make each of its sources a separate validation set")
            self.validation_leaves[name] = next(flatten_sources(validation_source, label, name))
        self.validation_names = list(self.validation_leaves)
        # All sources, training sources first.
        self.leaves = [*self.train_leaves, *self.validation_leaves.values()]
        for leaf in self.leaves:
            if not isinstance(leaf.source, ExampleSource):
                continue
            with prefix_errors(leaf.label):
                leaf.source.check_tokenizer(self.tokenizer)
            # Several conversations share a row, so each must be masked from its neighbors.
            self.document_mask = True
        self._row_arrays = _row_arrays(self.leaves)
        first_source = self.train_leaves[0].source
        # Defines how sequences are encoded for scoring; None if the model does not score sequences.
        self.scored_source = first_source if isinstance(first_source, SequenceSource) else None
        # The class names of labeled sequences; None for other data.
        self.classes = None if self.scored_source is None else self.scored_source.classes
        # The seed, if it affects the contents of training rows and not only their order; else None.
        are_packed = any(isinstance(leaf.source, ExampleSource) for leaf in self.train_leaves)
        self.packing_seed = seed if are_packed else None
        check_classes({leaf.label: leaf.source for leaf in self.leaves})

    @property
    def base_stage(self) -> Stage:
        """The training data of a run without stages."""
        return Stage(0, self.seq_len, self.global_batch_size, tuple(leaf.weight for leaf in self.train_leaves))

    @property
    def stages(self) -> tuple[Stage, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Pipeline`. Batch sizes follow `global_batch_size`, which may change until training starts."""
        return self._resolve_stages(None)

    def _resolve_stages(self, num_batches: int | None) -> tuple[Stage, ...]:
        """Returns the stages of the first `num_batches` batches, None for all; empty if the data has no stages."""
        changes = self._changes
        if not changes:
            return ()
        if num_batches is not None:
            changes = {start: change for start, change in changes.items() if not start or start < num_batches}
        return resolve_stages(changes, self.base_stage, self._inner_weights)

    @property
    def batch_multiple(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Pipeline`: stages that keep the tokens of a step need a batch that their sequence lengths divide."""
        multiple = 1
        for start, change in self._changes.items():
            if change.global_batch_size is not None:
                break
            if change.seq_len is not None and start:
                multiple = math.lcm(multiple, change.seq_len // math.gcd(change.seq_len, self.seq_len))
        return multiple

    def at_stage(self, index: int) -> DataPipeline:
        """See `Pipeline`. Before `setup`, only its shapes are known."""
        stage = self.stages[index]
        view = copy.copy(self)
        view._changes = {}
        view.seq_len = stage.seq_len
        view.global_batch_size = stage.batch_size
        if self._rows_by_length:
            view.leaves = []
            for leaf, rows in zip(self.leaves, self._rows_by_length[stage.seq_len], strict=True):
                other = copy.copy(leaf)
                other.rows = rows
                view.leaves.append(other)
            count = len(self.train_leaves)
            view.train_leaves = view.leaves[:count]
            view.validation_leaves = dict(zip(self.validation_leaves, view.leaves[count:], strict=True))
        return view

    def setup(
        self, workdir: str | Path, *, is_primary: bool = True, barrier: Callable[[], object] = lambda: None
    ) -> None:
        """Finds, tokenizes and verifies everything, so that training reads only token files.

        Args:
            workdir: a local folder; it stores `tokenizer.json`, and without `cache_dir` also the tokens.
            is_primary: True in the one process that writes. The others open the files that it wrote, so all processes
                must see the same folders.
            barrier: waits for all processes; called once.

        Raises:
            FileNotFoundError, PermissionError, ValueError: the data or the tokenizer is not usable. The message
                begins with the config path.
        """
        if "://" in str(workdir):
            raise ValueError(f"the data pipeline stores files in the workdir and needs a local folder, given {workdir}")
        folder = Path(workdir)
        if self.cache_dir is None:
            cache = folder / "data"
        else:
            cache = Path(self.cache_dir).expanduser()
        if is_primary:
            folder.mkdir(parents=True, exist_ok=True)
            cache.mkdir(parents=True, exist_ok=True)
            # A workdir belongs to one job, so leftovers of a killed start can be deleted. In a shared cache_dir,
            # another run may be writing such a folder right now.
            if self.cache_dir is None:
                for leftover in cache.glob(".tokens-*"):
                    shutil.rmtree(leftover)
            tokenizer_file = folder / "tokenizer.json"
            is_new_tokenizer = not tokenizer_file.exists()
            try:
                self._open(folder, cache, write=True)
            except ValueError:
                # The data is rejected, for example because there is too little text. The next start must not use this
                # tokenizer on other text.
                if is_new_tokenizer:
                    tokenizer_file.unlink(missing_ok=True)
                raise
        # The other processes can open files only after the primary one has finished writing them.
        barrier()
        if not is_primary:
            self._open(folder, cache, write=False)

    def _open(self, folder: Path, cache: Path, *, write: bool) -> None:
        """Opens the tokenizer and the sources, and fixes the order of the training sequences."""
        # Check for missing files here, before spending hours on tokenizing the sources that do exist.
        for leaf in self.leaves:
            with prefix_errors(leaf.label):
                leaf.source.files()
        hashes = FileHashes(cache / "hashes.json")
        self.prepare_tokenizer(folder, write=write)
        for leaf in self.leaves:
            with prefix_errors(leaf.label):
                self._open_leaf(leaf, cache, hashes, write)
                leaf.rows = self._make_rows(leaf, self.seq_len)
        if write:
            hashes.save()
        self._rows_by_length = {self.seq_len: [leaf.rows for leaf in self.leaves]}
        self._orders_by_origin = {}
        for stage in self.stages[1:]:
            if stage.seq_len not in self._rows_by_length:
                try:
                    rows = [self._make_rows(leaf, stage.seq_len) for leaf in self.leaves]
                except ValueError as error:
                    raise ValueError(f"{stage.label}: {error}") from error
                self._rows_by_length[stage.seq_len] = rows
        # A source that only a later stage draws from is not part of the first epochs.
        weights = self.stages[0].weights if self.stages else self.base_stage.weights
        row_counts = [
            leaf.rows.num_whole if weight else 0 for leaf, weight in zip(self.train_leaves, weights, strict=True)
        ]
        num_rows = sum(row_counts)
        is_too_small = num_rows < (1 if self.allows_small_data else self.global_batch_size)
        if is_too_small and self._row_arrays:
            raise ValueError(
                f"data.source: its answers fill {num_rows} rows of data.seq_len={self.seq_len}, too few for one batch "
                f"with data.global_batch_size={self.global_batch_size}; reduce these, or set packed=false of the source"
            )
        if is_too_small:
            streams = [leaf.stream for leaf in self.train_leaves]
            raise ValueError(
                f"data.source: has {num_rows} sequences of data.seq_len={self.seq_len}, too few for one batch, "
                f"which needs {self._batch_needs(streams)}; add data, or reduce these"
            )
        self._num_rows = num_rows
        self._order = GlobalOrder(row_counts, weights, self.seed)

    def _open_leaf(self, leaf: LeafSource, cache: Path, hashes: FileHashes, write: bool) -> None:
        """Sets the token stream of a leaf."""
        source = leaf.source
        if isinstance(source, DataSource):
            leaf.stream = load_or_tokenize(source, self.tokenizer, cache, hashes, write=write, name=leaf.name)
        else:
            leaf.stream = source.open(self.tokenizer, hashes, self.cache_dir)

    def _make_rows(self, leaf: LeafSource, seq_len: int) -> Windows | Examples:
        """Returns the rows of a leaf whose stream is open."""
        source = leaf.source
        is_training = leaf in self.train_leaves
        if isinstance(source, ExampleSource):
            # A validation set is packed in the order of its files, regardless of the seed.
            packing_seed = self.seed if is_training else None
            return source.rows(leaf.stream, seq_len, packing_seed)
        num_tokens = leaf.stream.num_tokens
        # Training reads only rows with all S targets. An evaluation pads, so one target is enough: it takes two
        # tokens, because the first token of a stream is never predicted.
        min_tokens = seq_len + 1 if is_training else 2
        if num_tokens < min_tokens:
            problem = f"{num_tokens} tokens are too few: data.seq_len={seq_len} needs {min_tokens}"
            if seq_len != self.seq_len:
                raise ValueError(f"{leaf.label}: {problem}")
            raise ValueError(f"{problem} and a batch {self._batch_needs([leaf.stream])}" if is_training else problem)
        if self.document_mask and leaf.stream.eos_id is None:
            raise ValueError("data.document_mask needs a known separator; set eos_id of the source")
        return Windows(leaf.stream, seq_len, masked=self.document_mask)

    def _batch_needs(self, streams: Sequence[TokenStream]) -> str:
        """Describes the tokens that one batch needs, and the amount of text, by the sources' bytes per token."""
        # One token more than the batch has: the last target follows the last input.
        num_needed = self.global_batch_size * self.seq_len + 1
        text_amount = f"{num_needed:,} tokens with data.global_batch_size={self.global_batch_size}"
        num_bytes = sum(stream.num_bytes or 0 for stream in streams)
        num_tokens = sum(stream.num_tokens for stream in streams)
        if not num_bytes:
            return text_amount
        return f"{text_amount}: about {human_bytes(num_bytes * num_needed / num_tokens)} of text"

    def prepare_tokenizer(self, folder: Path, *, write: bool) -> None:
        """Loads the tokenizer, or trains it on the training sources and saves it in `folder` (only if `write`)."""
        # Only training sources count: a tokenizer must not see evaluation text.
        has_text = any(isinstance(leaf.source, DataSource) for leaf in self.train_leaves)
        texts = None
        if has_text:
            texts = functools.partial(training_text, self.train_leaves)
        with prefix_errors("data.tokenizer"):
            self.tokenizer.prepare(folder, texts, write=write)

    def fingerprint(self) -> str:
        """Returns the sha256 of everything that determines the training batches.

        Resuming with another fingerprint would change the data. It does not depend on the number of processes.
        """
        return self.fingerprint_before(None)

    def fingerprint_before(self, num_batches: int | None) -> str:
        """See `Pipeline`. A source that no stage has drawn from does not count, so that a resumed run may add one."""
        # Later stages are not resolved: their sequences need not divide the batch of an earlier part of the run.
        begun = self._resolve_stages(num_batches) or (self.base_stage,)
        is_read = [any(stage.weights[index] for stage in begun) for index in range(len(self.train_leaves))]
        # Sources after the last one that is read are left out; the number of a source seeds its order.
        leaves = self.train_leaves[: max(index for index, read in enumerate(is_read) if read) + 1]
        # Separators affect the batches only if documents are masked from each other.
        separators = None
        if self.document_mask:
            separators = [leaf.stream.eos_id if is_read[index] else None for index, leaf in enumerate(leaves)]
        sources = []
        for leaf, read, weight in zip(leaves, is_read, begun[0].weights, strict=False):
            sources.append([leaf.stream.digest, weight, *leaf.rows.facts] if read else None)
        facts = [_FINGERPRINT, sources, self.seq_len, self.global_batch_size, self.seed, separators]
        if len(begun) > 1:
            # No trailing zeros: they are the weights of sources that are left out.
            facts.append([[*dataclasses.astuple(stage)[:3], stage.weights[: len(leaves)]] for stage in begun[1:]])
        return compute_digest(facts)

    def train_batch(self, index: int, rows: Sequence[int] | np.ndarray, origin: int = 0) -> Batch:
        """See `Pipeline`. The batch has the shape of its stage."""
        stages = self.stages
        if not stages:
            return super().train_batch(index, rows, origin)
        number = find_stage(stages, index)
        stage = stages[number]
        first_number = (index - stage.start) * stage.batch_size + (0 if number else origin)
        view = self.at_stage(number)
        return view._read_rows(self._stage_orders(origin)[number], first_number, rows)

    def _stage_orders(self, origin: int) -> list[GlobalOrder]:
        """Returns the order of each stage; `origin` is that of the run's BatchOrder."""
        if origin not in self._orders_by_origin:
            stages = self.stages
            count = len(self.train_leaves)
            row_counts = []
            for stage in stages:
                row_counts.append([rows.num_whole for rows in self._rows_by_length[stage.seq_len][:count]])
            self._orders_by_origin[origin] = build_orders(stages, row_counts, self.seed, origin)
        return self._orders_by_origin[origin]

    def locate(self, sequence: int) -> tuple[int, int]:
        """See `Pipeline`."""
        first = 0
        stages = self.stages
        if not stages:
            return super().locate(sequence)
        for number, stage in enumerate(stages):
            is_last = number + 1 == len(stages)
            count = 0 if is_last else (stages[number + 1].start - stage.start) * stage.batch_size
            if is_last or sequence < first + count:
                return self._stage_orders(0)[number].locate(sequence - first)
            first += count
        raise AssertionError("the last stage has no end")

    def _epoch_pieces(self) -> list[tuple[int, Fraction]]:
        """Returns (first batch, epochs per batch) of each stage: an epoch reads every row of the sources drawn from."""
        pieces = []
        for stage in self.stages:
            rows = self._rows_by_length[stage.seq_len]
            num_rows = sum(rows[source].num_whole for source, weight in enumerate(stage.weights) if weight)
            pieces.append((stage.start, Fraction(stage.batch_size, num_rows)))
        return pieces

    def count_epochs(self, num_batches: int, origin: int = 0) -> float:
        """See `Pipeline`."""
        if not self.stages:
            return super().count_epochs(num_batches, origin)
        pieces = self._epoch_pieces()
        epochs = Fraction(origin, self._num_rows)
        for (start, rate), (stop, _) in itertools.pairwise([*pieces, (num_batches, Fraction(0))]):
            epochs += rate * max(0, min(stop, num_batches) - start)
        return float(epochs)

    def epoch_steps(self, epochs: float, origin: int = 0) -> int:
        """See `Pipeline`."""
        if not self.stages:
            return super().epoch_steps(epochs, origin)
        remaining = Fraction(epochs) - Fraction(origin, self._num_rows)
        pieces = self._epoch_pieces()
        for number, (start, rate) in enumerate(pieces):
            steps = math.ceil(remaining / rate)
            if number + 1 == len(pieces) or start + steps <= pieces[number + 1][0]:
                return start + steps
            remaining -= rate * (pieces[number + 1][0] - start)
        raise AssertionError("the last stage has no end")

    def count_items(self, num_steps: int, order: BatchOrder) -> int:
        """See `Pipeline`."""
        stages = self.stages
        if not stages:
            return super().count_items(num_steps, order)
        next_batch = order.batch_after(num_steps)
        num_items = order.origin * stages[0].seq_len
        borders = [*(stage.start for stage in stages[1:]), next_batch]
        for stage, stop in zip(stages, borders, strict=True):
            num_items += stage.tokens_per_step * max(0, min(stop, next_batch) - stage.start)
        for batch in order.left_out:
            if batch < next_batch:
                num_items -= stages[find_stage(stages, batch)].tokens_per_step
        return num_items

    def count_drawn(self, num_batches: int) -> list[int]:
        """Returns the number of sequences that the first `num_batches` batches draw from each source."""
        if not self.stages:
            assert self._order is not None, "setup() first"
            return self._order.positions_after(num_batches * self.global_batch_size)
        drawn = [0] * len(self.train_leaves)
        stops = [*(stage.start for stage in self.stages[1:]), num_batches]
        for stage, stop, order in zip(self.stages, stops, self._stage_orders(0), strict=True):
            count = max(0, min(stop, num_batches) - stage.start) * stage.batch_size
            pairs = zip(order.positions_after(count), order.positions_after(0), strict=True)
            drawn = [total + after - before for total, (after, before) in zip(drawn, pairs, strict=True)]
        return drawn

    def describe_course(self, num_steps: int | None) -> dict[str, str]:
        """See `Pipeline`: the sequences that the run draws from each source of a mixture, and its stages."""
        rows = {}
        if len(self.train_leaves) > 1 and num_steps:
            drawn = self.count_drawn(num_steps)
            for leaf, count in zip(self.train_leaves, drawn, strict=True):
                epochs = count / leaf.rows.num_whole
                share = f"{count:,} sequences, {count / sum(drawn):.2%} of the run"
                # With several lengths, an epoch of one source has no single number of rows.
                rows[f"{leaf.name} draws"] = share if len(self._rows_by_length) > 1 else f"{share}, {epochs:.3g} epochs"
        for stage in self.stages[1:]:
            is_late = num_steps is not None and stage.start >= num_steps
            rows[f"from step {stage.start:,}"] = stage.describe() + (", after the end of this run" if is_late else "")
        return rows

    def arrays(self, *, evaluation: bool = False) -> Shapes:
        names = ["tokens", "targets"]
        if self.document_mask:
            names += ["positions", "segments"]
        names += ["weights", *self._row_arrays]
        if evaluation and self.tokenizer.has_text:
            names.append("bytes")
        shape = (self.global_batch_size, self.seq_len)
        shapes: Shapes = {}
        for name in names:
            dtype = "float32" if name in ("weights", "bytes", *self._row_arrays) else "int32"
            shapes[name] = (shape, dtype)
        return shapes | dict.fromkeys(self._attached, (shape, "float32"))

    def row_sets(self) -> dict[str, RowSet]:
        """See `Pipeline`. Training sets include only whole rows, as batches do."""
        # The rows of a training source depend on the seed that packs them.
        training_digest = self.fingerprint_at(1)
        sets = {}
        for leaf in self.train_leaves:
            sets[leaf.name] = RowSet(leaf.rows.num_whole, leaf.rows.row, training_digest)
        for name, leaf in self.validation_leaves.items():
            facts = [leaf.stream.digest, self.seq_len, self.document_mask, leaf.rows.num_rows, *leaf.rows.facts]
            sets[name] = RowSet(leaf.rows.num_rows, leaf.rows.row, compute_digest(facts))
        return sets

    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        return self.train_leaves[source].rows.row(index)

    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        """See `Pipeline`. With a text tokenizer, batches also have bytes f32[B,S], the bytes of each counted target."""
        if name not in self.validation_leaves:
            valid_names = ", ".join(self.validation_leaves)
            raise ValueError(f"no validation set {name!r}; data.validation has {valid_names}")
        rows = self.validation_leaves[name].rows
        tokenizer = self.tokenizer

        def read(index: int) -> Batch:
            row = rows.row(index)
            if tokenizer.has_text:
                target_bytes = tokenizer.byte_lengths[row["targets"]]
                row["bytes"] = (target_bytes * row["weights"]).astype(np.float32)
            return row

        return rows.num_rows, read

    def document_text(self, name: str, limit: int | None = None) -> bytes:
        """Returns the text of validation set `name`: exactly the bytes of its targets, without separators.

        Args:
            name: the validation set.
            limit: as in `eval_batch_numbers`: return only the text of the batches that such an evaluation reads.
        """
        num_rows, read = self.evaluation_rows(name)
        row_texts = []
        for number in self.eval_batch_numbers(name, limit):
            first_row = number * self.global_batch_size
            for index in range(first_row, min(first_row + self.global_batch_size, num_rows)):
                row = read(index)
                counted_targets = row["targets"][row["weights"] > 0]
                row_texts.append(self.tokenizer.decode_bytes(counted_targets))
        return b"".join(row_texts)

    def source_report(self) -> list[SourceReport]:
        """Returns the rows of the startup table: the contents of the training sources and of each validation set."""
        report = []
        for leaf in self.leaves:
            stream = leaf.stream
            rows = leaf.rows
            is_validation = leaf.name in self.validation_leaves
            # The stream of an ExampleSource counts the bytes of its JSON records, not those of the rendered text.
            num_bytes = None if isinstance(leaf.source, ExampleSource) else stream.num_bytes
            entry = SourceReport(
                name=leaf.name,
                kind=type(leaf.source).__name__,
                tokens=stream.num_tokens,
                documents=stream.num_documents,
                bytes=num_bytes,
                sequences=rows.num_rows if is_validation else rows.num_whole,
                sha256=stream.digest,
                note=rows.note,
            )
            report.append(entry)
        return report

    def warnings(self) -> list[str]:
        """See `Pipeline`. Covers the sources whose rows are examples."""
        return [
            f"{leaf.label}: {warning}"
            for leaf in self.train_leaves
            if isinstance(leaf.rows, Examples)
            for warning in leaf.rows.warnings
        ]


def _row_arrays(leaves: Sequence[LeafSource]) -> tuple[str, ...]:
    """Returns the names of the sources' additional row arrays; raises ValueError if the sources differ."""
    names_by_label = {}
    for leaf in leaves:
        names_by_label[leaf.label] = leaf.source.row_arrays if isinstance(leaf.source, ExampleSource) else ()
    first = leaves[0]
    for leaf in leaves:
        if names_by_label[leaf.label] != names_by_label[first.label]:
            raise ValueError(
                f"{leaf.label} is a {type(leaf.source).__name__} and {first.label} a {type(first.source).__name__}: "
                "expected sources of one kind, because they share a batch"
            )
    return names_by_label[first.label]


def load_or_tokenize(
    source: DataSource, tokenizer: Tokenizer, cache: Path, hashes: FileHashes, *, write: bool, name: str = ""
) -> TokenStream:
    """Tokenizes `source`, or opens the tokens in `cache` for the same content and the same tokenizer.

    Args:
        source: the text source.
        tokenizer: the config's tokenizer, prepared.
        cache: folder with the tokens of all sources.
        hashes: hashes of files from earlier runs.
        write: whether this process may tokenize; other processes open the tokens that it wrote.
        name: name of the source in messages.

    Raises:
        FileNotFoundError: the tokens do not exist, and this process may not write them.
    """
    contents = source.contents(hashes)
    codec = source.codec(tokenizer)
    key = compute_digest([contents["sha256"], codec.digest])
    folder = cache / f"tokens-{key[:16]}"
    tokens = TokenMemmap(path=str(folder / "tokens.bin"))
    if folder.exists():
        return tokens.open(codec, hashes)
    if not write:
        raise FileNotFoundError(
            f"{folder} does not exist, but process 0 should have written it; check that all processes see the same "
            "folders and sources"
        )
    # A single rename creates the folder once it is complete. The random suffix separates two jobs that tokenize the
    # same content into a shared cache.
    temporary = cache / f".{folder.name}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        with phase(f"tokenizing {name}".rstrip()) as tokenizing:
            # write_tokens is a generator of progress reports, and works only as far as it is consumed.
            for progress in write_tokens(source, codec, temporary / "tokens.bin"):
                tokenizing.percent(progress.position / max(progress.total, 1))
        write_json(temporary / "source.json", contents)
        try:
            durable.rename(temporary, folder)
        except OSError:
            # If the folder exists by now, another job tokenized the same content first.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return tokens.open(codec, hashes)
