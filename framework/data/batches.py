"""What the trainer asks of a data pipeline, whatever that reads: global batches, each a pure function of (seed, step).

The global batch is the same whatever the number of processes or devices: a process asks for the rows its devices hold.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from framework.data.order import BatchOrder, GlobalOrder, Prefetcher
from framework.data.packing import Batch

Shapes = dict[str, tuple[tuple[int, ...], str]]  # {name: (shape, dtype)}
_ENDLESS = 1 << 62


class Pipeline(abc.ABC):
    """Batches of rows. A subclass says what a row is, and sets what is declared here."""

    item: ClassVar[str]  # what throughput counts: "token"
    loss_unit: ClassVar[str]  # what its losses are in: "nats per token"
    seq_len: int  # items per row
    global_batch_size: int
    prefetch: int
    validation_names: Any  # in the order in which they are configured
    source_report: Callable[[], list[Any]]  # rows for the start table, each with a name and a text
    setup: Callable[..., None]  # (workdir, *, is_primary, barrier): reads, and raises every data error
    fingerprint: Callable[[], str]  # of all that decides the training batches
    _order: GlobalOrder | None = None  # set by setup
    _num_rows: int  # of an epoch; set by setup

    @abc.abstractmethod
    def arrays(self, *, evaluation: bool = False) -> Shapes:
        """The arrays of a global batch of training, or of evaluation; the leading axis is the batch's."""

    @abc.abstractmethod
    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        """Sequence `sequence` of the run, which is row `index` of that source: arrays without the batch's axis."""

    @abc.abstractmethod
    def evaluation_rows(self, name: str) -> tuple[int, Callable[[int], Batch]]:
        """(how many, row by index) of a validation set; rows beyond its end have weight 0."""

    def epoch_steps(self, epochs: float) -> int:
        """Steps in which all rows of the training sources are read that many times; the last batch is a whole one."""
        return math.ceil(epochs * self._num_rows / self.global_batch_size)

    def train_batch(self, index: int, rows: Sequence[int] | np.ndarray) -> Batch:
        """The given rows (b of them, each in [0, B)) of the global batch of that index >= 0: arrays [b, ...].
        ValueError: a token file changed since `setup` (naming shard and offset)."""
        order = self._order
        assert order is not None, "setup() first"
        numbers = [index * self.global_batch_size + int(row) for row in rows]
        return _stacked([self.training_row(number, *order.locate(number)) for number in numbers])

    def train_iterator(
        self, start_step: int, rows: Sequence[int] | np.ndarray, order: BatchOrder = BatchOrder()
    ) -> Prefetcher[tuple[int, Batch]]:
        """(index, train_batch(index, rows)) of the batches that come after `start_step` steps, without end; close it
        when done. At most `prefetch` batches wait in the background, beside the one handed out last."""

        def batch_after(num_steps: int) -> tuple[int, Batch]:
            index = order.batch_after(num_steps)
            return index, self.train_batch(index, rows)

        return Prefetcher(batch_after, start_step, _ENDLESS, ahead=self.prefetch)

    def eval_batches(self, name: str, rows: Sequence[int] | np.ndarray, limit: int | None = None) -> Prefetcher[Batch]:
        """The given rows of each batch of validation set `name`, in order; of more than `limit` batches, that many
        from the first to the last, evenly spaced.

        Shapes are those of training. What is left over in the last batch has weight 0 (a row may be padding from end to
        end). Prefetched as `train_iterator`.
        """
        (count, read), size = self.evaluation_rows(name), self.global_batch_size
        total = -(-count // size)
        stop = total if limit is None else min(limit, total)

        def batch(turn: int) -> Batch:
            number = turn if stop == total else turn * (total - 1) // max(1, stop - 1)
            return _stacked([read(number * size + int(row)) for row in rows])

        return Prefetcher(batch, 0, stop, ahead=self.prefetch)


def _stacked(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
