"""The interface between trainer and data pipelines: global batches, each a pure function of (seed, step).

The global batch is the same whatever the number of processes or devices: a process asks for the rows its devices hold.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from framework.data.order import BatchOrder, GlobalOrder, Prefetcher
from framework.data.packing import Batch

Shapes = dict[str, tuple[tuple[int, ...], str]]  # {name: (shape, dtype)}


class RowSet(NamedTuple):
    """The rows of a training source or of a validation set, in order, for whoever computes something of each of them.

    Attributes:
        num_rows: how many there are.
        row: reads one by its index; rows from `num_rows` on are nothing but padding.
        digest: changes with the rows.
    """

    num_rows: int
    row: Callable[[int], Batch]
    digest: str


# The end of an iterator without end. The length of a sequence must fit in 63 bits in Python.
_ENDLESS = 1 << 62


class Pipeline(abc.ABC):
    """Batches of rows. A subclass says what a row is, and sets the attributes that are declared here.

    Attributes:
        item: the thing that throughput counts, such as "token".
        loss_unit: unit of its losses, such as "nats per token".
        seq_len: items per row.
        global_batch_size: B, rows of a batch over all processes.
        prefetch: batches that wait in the background.
        validation_names: in the order in which they are configured.
        source_report: returns the rows for the start table, each with a name and a text.
        setup: (workdir, *, is_primary, barrier) reads the data, and raises every data error.
        fingerprint: returns a hash of all that decides the training batches.
    """

    item: ClassVar[str]
    loss_unit: ClassVar[str]
    seq_len: int
    global_batch_size: int
    prefetch: int
    validation_names: Any
    source_report: Callable[[], list[Any]]
    setup: Callable[..., None]
    fingerprint: Callable[[], str]
    # `setup` sets the order of the training sequences, and the rows of an epoch.
    _order: GlobalOrder | None = None
    _num_rows: int
    # {name of an array: {name of a set: values}}, see `attach`.
    _attached: Mapping[str, dict[str, np.ndarray]] = MappingProxyType({})

    def warnings(self) -> list[str]:
        """Returns what a person should know of the training data before a run, a line each; after `setup`."""
        return []

    @abc.abstractmethod
    def arrays(self, *, evaluation: bool = False) -> Shapes:
        """Returns the arrays of a global batch of training, or of evaluation; the leading axis is the batch's."""

    def sequence_arrays(self) -> Shapes:
        """Returns the arrays of a global batch of training that a model runs over: its tokens, and what goes with them.

        These are delivered, but where a companion makes the sequences of what is delivered, as of prompts.
        """
        return self.arrays()

    @abc.abstractmethod
    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        """Returns sequence `sequence` of the run, which is row `index` of that source.

        The arrays have no batch axis.
        """

    @abc.abstractmethod
    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        """Returns (number of rows, function of an index that reads a row) of a validation set.

        Rows beyond its end have weight 0.
        """

    def row_sets(self) -> dict[str, RowSet]:
        """Returns the training sources, in order, and the validation sets, by name; known after `setup`.

        Raises:
            ValueError: rows are made at random or on the way, so that nothing can be stored of them.
        """
        raise ValueError(f"data is a {type(self).__name__}, whose rows are not numbered; nothing can be stored of them")

    def attach(self, name: str, values: Mapping[str, np.ndarray]) -> None:
        """Has each batch deliver one more array, f32[B, S], of what is stored of each row.

        Args:
            name: of the array.
            values: f32[rows, S] by the names of `row_sets`, all of them and in that order; they may be files
                (numpy.memmap). Rows of padding behind the last one have zeros.
        """
        # A new dict: that of the class is shared.
        self._attached = {**self._attached, name: dict(values)}

    def attached_shapes(self) -> Shapes:
        """Returns the arrays of `attach`, for a subclass's `arrays`."""
        shape = (self.global_batch_size, self.seq_len)
        return dict.fromkeys(self._attached, (shape, "float32"))

    def _with_attached(self, set_name: str, index: int, row: Batch) -> Batch:
        """Adds what `attach` has for row `index` of a set to the row."""
        for name, values_by_set in self._attached.items():
            values = values_by_set[set_name]
            row[name] = np.array(values[index]) if index < len(values) else np.zeros(self.seq_len, np.float32)
        return row

    @property
    def num_rows(self) -> int:
        """The rows of an epoch; known after `setup`."""
        return self._num_rows

    def epoch_steps(self, epochs: float, origin: int = 0) -> int:
        """Returns the steps in which all rows of the training sources are read that many times.

        The last batch is a whole one. `origin` is that of the run's BatchOrder.
        """
        return math.ceil((epochs * self._num_rows - origin) / self.global_batch_size)

    def epochs_of(self, num_batches: int, origin: int = 0) -> float:
        """Returns how often all rows of the training sources were read after that many batches."""
        return (num_batches * self.global_batch_size + origin) / self._num_rows

    def fingerprint_at(self, global_batch_size: int) -> str:
        """Returns the fingerprint that these data would have with batches of another size."""
        other = copy.copy(self)
        other.global_batch_size = global_batch_size
        return other.fingerprint()

    def locate(self, sequence: int) -> tuple[int, int]:
        """Returns (source, row of it) of sequence `sequence` of the run; known after `setup`."""
        assert self._order is not None, "setup() first"
        return self._order.locate(sequence)

    def train_batch(self, index: int, rows: Sequence[int] | np.ndarray, origin: int = 0) -> Batch:
        """Returns rows of the global batch of that index: arrays [b, ...].

        Args:
            index: number of the batch in the run, from 0.
            rows: b rows, each in [0, B); usually those that the devices of this process hold.
            origin: the sequence that batch 0 would begin with; see `BatchOrder`.

        Raises:
            ValueError: a token file changed since `setup`. The message names shard and offset.
        """
        order = self._order
        assert order is not None, "setup() first"
        first_number = origin + index * self.global_batch_size
        numbers = [first_number + int(row) for row in rows]
        batch_rows = []
        for number in numbers:
            source, source_row = order.locate(number)
            row = self.training_row(number, source, source_row)
            if self._attached:
                set_names = list(next(iter(self._attached.values())))
                row = self._with_attached(set_names[source], source_row, row)
            batch_rows.append(row)
        return _stacked(batch_rows)

    def train_iterator(
        self,
        start_step: int,
        rows: Sequence[int] | np.ndarray,
        order: BatchOrder = BatchOrder(),
    ) -> Prefetcher[tuple[int, Batch]]:
        """Returns an iterator over (index, train_batch(index, rows)), without end. Close it when done.

        At most `prefetch` batches wait in the background, beside the one handed out last.

        Args:
            start_step: steps that are done; the iterator begins with the batch after them.
            rows: as in `train_batch`.
            order: the batches that are left out, and where they begin.
        """

        def batch_after(num_steps: int) -> tuple[int, Batch]:
            index = order.batch_after(num_steps)
            return index, self.train_batch(index, rows, order.origin)

        return Prefetcher(batch_after, start_step, _ENDLESS, ahead=self.prefetch)

    def eval_batches(
        self,
        name: str,
        rows: Sequence[int] | np.ndarray,
        limit: int | None = None,
    ) -> Prefetcher[Batch]:
        """Returns an iterator over the given rows of each batch of validation set `name`, in order.

        Shapes are those of training. Rows beyond the end of the set, in the last batch, have weight 0 (a row may be
        padding from end to end). Prefetched as `train_iterator`.

        Args:
            name: the validation set.
            rows: as in `train_batch`.
            limit: as in `eval_batch_numbers`.
        """
        _, read_row = self.evaluation_rows(name)
        numbers = self.eval_batch_numbers(name, limit)

        def batch(turn: int) -> Batch:
            first_row = numbers[turn] * self.global_batch_size
            indices = [first_row + int(row) for row in rows]
            return _stacked([self._with_attached(name, index, read_row(index)) for index in indices])

        return Prefetcher(batch, 0, len(numbers), ahead=self.prefetch)

    def eval_batch_numbers(self, name: str, limit: int | None = None) -> Sequence[int]:
        """Returns the numbers of the batches that an evaluation takes of validation set `name`.

        Args:
            name: the validation set.
            limit: of more than `limit` batches, that many are taken from the first to the last, evenly spaced.
        """
        num_rows, _ = self.evaluation_rows(name)
        # The division rounds up: the last batch is padded, not left out.
        num_batches = -(-num_rows // self.global_batch_size)
        if limit is None or limit >= num_batches:
            return range(num_batches)
        # The first and the last batch are both among those that are taken.
        return [turn * (num_batches - 1) // max(1, limit - 1) for turn in range(limit)]


def _stacked(rows: list[Batch]) -> Batch:
    """Stacks rows into arrays with a leading batch axis."""
    batch = {}
    for name in rows[0]:
        batch[name] = np.stack([row[name] for row in rows])
    return batch
