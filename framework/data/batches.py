"""The interface between the trainer and data pipelines: global batches, each a pure function of (seed, step).

The global batch does not depend on the number of processes or devices: each process requests the rows that its
devices hold.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np

from plimsoll.framework.data.order import BatchOrder, GlobalOrder, Prefetcher
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.stages import Stage

Shapes = dict[str, tuple[tuple[int, ...], str]]  # {name: (shape, dtype)}


@dataclass(frozen=True)
class RowSet:
    """The rows of a training source or validation set, in order, for code that computes a value for each row.

    Attributes:
        num_rows: number of rows.
        row: reads a row by its index; rows from `num_rows` on are padding only.
        digest: hash that changes when the rows change.
    """

    num_rows: int
    row: Callable[[int], Batch]
    digest: str


class ReportRow(Protocol):
    """One row of the startup table; `str` returns its text."""

    @property
    def name(self) -> str:
        """The name of a training source or validation set."""
        ...


# The end of an endless iterator. Python requires the length of a sequence to fit in 63 bits.
_ENDLESS = 1 << 62


class Pipeline(abc.ABC):
    """Batches of rows. A subclass defines a row, and sets the attributes declared here.

    Attributes:
        item: the item that throughput counts, such as "token".
        loss_unit: unit of the losses, such as "nats per token".
        seq_len: items per row.
        global_batch_size: B, rows per batch over all processes.
        prefetch: number of batches prepared in the background.
        validation_names: names of the validation sets, in config order.
        source_report: returns the rows for the startup table.
        setup: (workdir, *, is_primary, barrier) reads the data, and raises every data error.
        fingerprint: returns a hash of everything that determines the training batches.
        stages: stages of the training data, the first at batch 0; empty if the data never changes.
        batch_multiple: number that `global_batch_size` must be a multiple of.
        allows_small_data: whether `setup` accepts training data of fewer rows than a batch; the caller then reduces
            `global_batch_size`, see `framework.program.small_data`.
    """

    item: ClassVar[str]
    loss_unit: ClassVar[str]
    seq_len: int
    global_batch_size: int
    prefetch: int
    validation_names: Sequence[str]
    source_report: Callable[[], Sequence[ReportRow]]
    setup: Callable[..., None]
    fingerprint: Callable[[], str]
    # `setup` sets the order of the training sequences and the number of rows per epoch.
    _order: GlobalOrder | None = None
    _num_rows: int
    allows_small_data: bool = False
    # The stages of the training data, if it has any, and the factor of `global_batch_size` that rows need.
    stages: Sequence[Stage] = ()
    batch_multiple: int = 1
    # {array name: {set name: values}}, see `attach`.
    _attached: Mapping[str, dict[str, np.ndarray]] = MappingProxyType({})

    def warnings(self) -> list[str]:
        """Returns warnings about the training data to show before a run, one line each; available after `setup`."""
        return []

    @abc.abstractmethod
    def arrays(self, *, evaluation: bool = False) -> Shapes:
        """Returns the arrays of a global training or evaluation batch; the leading axis is the batch axis."""

    def sequence_arrays(self) -> Shapes:
        """Returns the arrays of a global training batch that a model runs on: tokens, and the arrays that go with them.

        They equal the arrays of a batch, unless an auxiliary model generates the sequences from the batch, as for
        prompts.
        """
        return self.arrays()

    @abc.abstractmethod
    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        """Returns sequence `sequence` of the run, which is row `index` of source `source`.

        The arrays have no batch axis.
        """

    @abc.abstractmethod
    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        """Returns (number of rows, function that reads a row by its index) of a validation set.

        Rows beyond its end have weight 0.
        """

    def row_sets(self) -> dict[str, RowSet]:
        """Returns the training sources, in order, and the validation sets, by name; available after `setup`.

        Raises:
            ValueError: rows are created randomly or on the fly, so no per-row values can be stored.
        """
        raise ValueError(
            f"data is a {type(self).__name__}, whose rows have no numbers, so no values can be stored for them"
        )

    def attach(self, name: str, values: Mapping[str, np.ndarray]) -> None:
        """Adds an array, f32[B, S], to each batch, with stored values for each row.

        Args:
            name: name of the array.
            values: f32[rows, S] by the names of `row_sets`, all of them and in that order; they may be files
                (numpy.memmap). Padding rows after the last one get zeros.
        """
        # A new dict: the class attribute is shared.
        self._attached = {**self._attached, name: dict(values)}

    def _attach_values(self, set_name: str, index: int, row: Batch) -> Batch:
        """Adds the `attach` values of row `index` of a set to the row."""
        for name, values_by_set in self._attached.items():
            values = values_by_set[set_name]
            row[name] = np.array(values[index]) if index < len(values) else np.zeros(self.seq_len, np.float32)
        return row

    @property
    def num_rows(self) -> int:
        """The number of rows per epoch; available after `setup`."""
        return self._num_rows

    def epoch_steps(self, epochs: float, origin: int = 0) -> int:
        """Returns the number of steps that read all rows of the training sources `epochs` times.

        Args:
            epochs: number of epochs; the result rounds up to a whole last batch.
            origin: origin of the run's BatchOrder.
        """
        return math.ceil((epochs * self._num_rows - origin) / self.global_batch_size)

    def count_epochs(self, num_batches: int, origin: int = 0) -> float:
        """Returns the number of epochs in `num_batches` batches; `origin` is that of the run's BatchOrder."""
        return (num_batches * self.global_batch_size + origin) / self._num_rows

    def fingerprint_at(self, global_batch_size: int, num_batches: int | None = None) -> str:
        """Returns the fingerprint of this data with another global batch size.

        Args:
            global_batch_size: the batch size.
            num_batches: number of batches that count; a stage that starts later does not. None for all.
        """
        # A shallow copy shares the data, so this costs no memory.
        other = copy.copy(self)
        other.global_batch_size = global_batch_size
        return other.fingerprint_before(num_batches)

    def fingerprint_before(self, num_batches: int | None) -> str:
        """Returns the fingerprint of the first `num_batches` batches: without stages that start later."""
        return self.fingerprint()

    def count_items(self, num_steps: int, order: BatchOrder) -> int:
        """Returns the number of items (tokens, images) that `num_steps` steps train on, padding included."""
        return (num_steps * self.global_batch_size + order.origin) * self.seq_len

    def at_stage(self, index: int) -> Pipeline:
        """Returns the data of a stage, as a pipeline without stages; it shares everything with this one."""
        raise ValueError(f"data is a {type(self).__name__}, which has no stages")

    def describe_course(self, num_steps: int | None) -> dict[str, str]:
        """Returns rows of the startup table about the sources and stages of a run; available after `setup`."""
        return {}

    def locate(self, sequence: int) -> tuple[int, int]:
        """Returns (source, row in that source) of sequence `sequence` of the run; available after `setup`."""
        assert self._order is not None, "setup() first"
        return self._order.locate(sequence)

    def train_batch(self, index: int, rows: Sequence[int] | np.ndarray, origin: int = 0) -> Batch:
        """Returns rows of global batch `index`: arrays [b, ...].

        Args:
            index: number of the batch in the run, from 0.
            rows: b rows, each in [0, B); usually those that the devices of this process hold.
            origin: the sequence that batch 0 would start with; see `BatchOrder`.

        Raises:
            ValueError: a token file changed since `setup`. The message names the shard and the offset.
        """
        assert self._order is not None, "setup() first"
        return self._read_rows(self._order, origin + index * self.global_batch_size, rows)

    def _read_rows(self, order: GlobalOrder, first_number: int, rows: Sequence[int] | np.ndarray) -> Batch:
        """Returns rows of the batch that starts with sequence `first_number` of an order."""
        batch_rows = []
        for number in [first_number + int(row) for row in rows]:
            source, source_row = order.locate(number)
            row = self.training_row(number, source, source_row)
            if self._attached:
                # `attach` gets the values in the order of `row_sets`, so the training sources come first.
                set_names = list(next(iter(self._attached.values())))
                row = self._attach_values(set_names[source], source_row, row)
            batch_rows.append(row)
        return _stack_rows(batch_rows)

    def train_iterator(
        self, start_step: int, rows: Sequence[int] | np.ndarray, order: BatchOrder = BatchOrder()
    ) -> Prefetcher[tuple[int, Batch]]:
        """Returns an iterator over (index, train_batch(index, rows)). Close it when done.

        It is endless, unless the data has stages: it ends with the stage, because the next one may have other rows.

        At most `prefetch` batches are prepared in the background, in addition to the one returned last.

        Args:
            start_step: number of completed steps; the iterator starts with the batch after them.
            rows: as in `train_batch`.
            order: the batches to skip, and the origin of the batches.
        """

        def batch_after(num_steps: int) -> tuple[int, Batch]:
            index = order.batch_after(num_steps)
            return index, self.train_batch(index, rows, order.origin)

        border = self.find_border(start_step, order)
        return Prefetcher(batch_after, start_step, _ENDLESS if border is None else border, depth=self.prefetch)

    def find_border(self, num_steps: int, order: BatchOrder = BatchOrder()) -> int | None:
        """Returns the step after which the next stage starts, given the completed steps; None in the last stage."""
        batch = order.batch_after(num_steps)
        starts = [stage.start for stage in self.stages if stage.start > batch]
        return order.first_step_of(starts[0]) if starts else None

    def eval_batches(self, name: str, rows: Sequence[int] | np.ndarray, limit: int | None = None) -> Prefetcher[Batch]:
        """Returns an iterator over the given rows of each batch of validation set `name`, in order.

        Shapes are those of training. Rows beyond the end of the set, in the last batch, have weight 0 (a row may be
        all padding). Batches are prefetched as in `train_iterator`.

        Args:
            name: the validation set.
            rows: as in `train_batch`.
            limit: as in `eval_batch_numbers`.
        """
        _, read_row = self.evaluation_rows(name)
        numbers = self.eval_batch_numbers(name, limit)

        def batch(position: int) -> Batch:
            first_row = numbers[position] * self.global_batch_size
            indices = [first_row + int(row) for row in rows]
            return _stack_rows([self._attach_values(name, index, read_row(index)) for index in indices])

        return Prefetcher(batch, 0, len(numbers), depth=self.prefetch)

    def eval_batch_numbers(self, name: str, limit: int | None = None) -> Sequence[int]:
        """Returns the numbers of the batches that an evaluation reads from validation set `name`.

        Args:
            name: the validation set.
            limit: if the set has more than `limit` batches, read this many, evenly spaced from the first to the last.
        """
        num_rows, _ = self.evaluation_rows(name)
        # The division rounds up: the last batch is padded, not dropped.
        num_batches = -(-num_rows // self.global_batch_size)
        if limit is None or limit >= num_batches:
            return range(num_batches)
        # Both the first and the last batch are included.
        return [position * (num_batches - 1) // max(1, limit - 1) for position in range(limit)]


def _stack_rows(rows: list[Batch]) -> Batch:
    """Stacks rows into arrays with a leading batch axis."""
    batch = {}
    for name in rows[0]:
        batch[name] = np.stack([row[name] for row in rows])
    return batch
