"""Scoring: computes the log-probabilities of all data rows with a model loaded before the run's own state exists."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np

from plimsoll.framework.batch_transforms.auxiliary_model import AuxiliaryModel
from plimsoll.framework.batch_transforms.stored_reference import DAMAGED, FOLDER, StoredRows
from plimsoll.framework.data.batches import RowSet
from plimsoll.framework.data.files import FileHashes
from plimsoll.framework.data.order import Prefetcher
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.batch_transform import Log
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import phase


class ReferenceScoring:
    """Computes and checks the stored reference values of a run.

    Args:
        program: program of the run; its data must be set up.
        model: model that computes the values.
        workdir: folder of the run, which contains the folder of the values.
    """

    def __init__(self, program: Program, model: AuxiliaryModel, workdir: Path):
        self._program = program
        self._data = program.experiment.data
        self._model = model
        self._folder = workdir / FOLDER
        self._sets = self._data.row_sets()

    def run(self, *, is_new_run: bool, log: Log) -> None:
        """Compute the missing values and attach them to the data. Every process calls this.

        Args:
            is_new_run: the run has no checkpoint yet, so values of different weights or data are recomputed instead of
                refused.
            log: prints a line.

        Raises:
            ValueError: the folder holds values for different weights or data than those of the resumed run.
        """
        stored = self._make_stored_rows(save_hashes=True)
        difference = self._difference(stored)
        if not is_new_run:
            self._check(difference)
        if difference == DAMAGED:
            log(f"{self._folder} is damaged; computing the reference again")
        elif difference:
            log(f"{self._folder} holds a reference for different {difference}; computing it again")
        self._begin(stored, restart=difference is not None)
        # If there is a checkpoint, the trainer has already compared the config with that of the earlier steps.
        if is_new_run or not stored.is_complete:
            if not stored.is_complete:
                self._warn_unused_rows(log)
            self._model.load()
            if not self._is_reproduced(stored):
                log(f"{self._folder} holds a reference computed by a different program; computing it again")
                self._begin(stored, restart=True)
            self._score(stored)
            self._model.unload()
        # Wait until process 0 has written all values, because every process opens the files below.
        distributed.barrier("reference")
        if not distributed.is_true_on_all(stored.difference is None):
            raise ValueError(
                f"{self._folder}: another process does not see the files that process 0 wrote; expected a folder "
                "that all hosts share, or batch_transform.kind = offloaded"
            )
        self._data.attach("reference", stored.open())

    def _warn_unused_rows(self, log: Log) -> None:
        """Print a hint if the run reads less than half of the training rows, as in a run of few steps."""
        training_rows = self._data.num_rows
        num_steps = self._program.experiment.trainer.known_steps
        if num_steps is None:
            return
        rows_read = num_steps * self._data.global_batch_size
        if 2 * rows_read < training_rows:
            log(
                f"computing the reference of all {training_rows:,} rows, but the run reads only {rows_read:,} of "
                "them; batch_transform.kind=offloaded computes only those, in each step"
            )

    def check(self) -> None:
        """Check the folder of a resumed run. Every process calls this.

        Raises:
            ValueError: it holds values for different weights or data than those of the resumed run.
        """
        # `run` verifies the checksums of the values. Damaged values are recomputed, so they are no reason to refuse.
        self._check(distributed.broadcast_from_primary(self._make_stored_rows(save_hashes=True).difference))

    def _check(self, difference: str | None) -> None:
        if difference in (None, "", DAMAGED):
            return
        same = "data" if difference == "data" else "pretrained, batch_transform.pretrained and trainer.seed"
        raise ValueError(
            f"{self._folder} holds a reference for different {difference} than those that this run started with; "
            f"expected the same {same} as before, or another --workdir"
        )

    def _difference(self, stored: StoredRows) -> str | None:
        """Return `StoredRows.difference` of the files in the folder, as seen by the primary process.

        This also compares the values with their checksums.
        """
        difference = None
        if distributed.is_primary():
            difference = stored.difference
            if difference is None and stored.has_changed:
                difference = DAMAGED
        return distributed.broadcast_from_primary(difference)

    def attach_stored(self) -> bool:
        """Attach the stored values to the data.

        Returns:
            False if they are incomplete, missing, damaged, or were computed for different weights or data.
        """
        stored = self._make_stored_rows(save_hashes=False)
        if self._difference(stored) is not None:
            return False
        values = stored.open()
        if not stored.is_complete:
            return False
        self._data.attach("reference", values)
        return True

    def _make_stored_rows(self, *, save_hashes: bool) -> StoredRows:
        weights = ""
        # Only one process reads the weight files to hash them.
        if distributed.is_primary():
            hashes = FileHashes(self._folder.with_name(".reference-hashes.json"))
            weights = self._model.weights_digest(hashes)
            if save_hashes:
                hashes.save()
        weights = distributed.broadcast_from_primary(weights)
        return StoredRows(self._folder, self._sets, self._data.seq_len, weights)

    def _begin(self, stored: StoredRows, *, restart: bool) -> None:
        """Prepare the files in the primary process; the others receive the number of finished rows."""
        if distributed.is_primary():
            stored.begin(restart=restart)
        stored.done = distributed.broadcast_from_primary(stored.done)

    def _is_reproduced(self, stored: StoredRows) -> bool:
        """Return whether the model reproduces the first stored rows bit for bit."""
        name = next((name for name, count in stored.done.items() if count), None)
        if name is None:
            return True
        count = min(stored.done[name], self._data.global_batch_size)
        values = self._gather(self._model(self._program.put(self._batch(self._sets[name], 0)))["reference"])
        same = True
        if distributed.is_primary():
            same = bool(np.array_equal(values[:count], stored.rows(name, 0, count)))
        return distributed.broadcast_from_primary(same)

    def _score(self, stored: StoredRows) -> None:
        """Compute all remaining rows; the primary process writes them."""
        size = self._data.global_batch_size
        total = sum(rows.num_rows for rows in self._sets.values())
        with phase("computing the reference") as computing:
            for name, rows in self._sets.items():
                first_row = stored.done[name]
                count = -(-(rows.num_rows - first_row) // size)
                read = partial(self._batch_number, rows, first_row)
                with Prefetcher(read, 0, count, depth=self._data.prefetch) as batches:
                    for number, batch in enumerate(batches):
                        results = self._model(self._program.put(batch))
                        values = self._gather(results["reference"])
                        if distributed.is_primary():
                            stored.write(name, first_row + number * size, values)
                        else:
                            stored.done[name] = min(rows.num_rows, first_row + (number + 1) * size)
                        computing.progress(sum(stored.done.values()), total)

    def _batch_number(self, rows: RowSet, first_row: int, number: int) -> dict[str, np.ndarray]:
        return self._batch(rows, first_row + number * self._data.global_batch_size)

    def _batch(self, rows: RowSet, first_row: int) -> dict[str, np.ndarray]:
        """Return this process's rows of the batch that starts at row `first_row` of a set."""
        local_rows = [rows.row(first_row + int(row)) for row in self._program.rows]
        return {name: np.stack([row[name] for row in local_rows]) for name in self._data.arrays()}

    def _gather(self, values: jax.Array) -> np.ndarray:
        """Gather the whole array [B, S] in this process."""
        if jax.process_count() == 1:
            return np.asarray(values)
        # Replicate first: a process can copy only its own shards to the host.
        everywhere = jax.jit(lambda x: x, out_shardings=self._program.replicated)(values)
        return np.asarray(everywhere.addressable_data(0))
