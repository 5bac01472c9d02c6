"""Scoring: the log-probabilities of all rows of the data, by a model that is there before the run's own state."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np

from framework.companions.other_model import OtherModel
from framework.companions.stored import DAMAGED, FOLDER, StoredRows
from framework.data.batches import RowSet
from framework.data.files import FileHashes
from framework.data.order import Prefetcher
from framework.processes import distributed
from framework.program.companion import Tell
from framework.program.program import Program
from framework.terminal.phases import phase


class Scoring:
    """The stored values of a run.

    Args:
        program: of the run; its data is set up.
        model: whose values they are.
        workdir: has their folder.
    """

    def __init__(self, program: Program, model: OtherModel, workdir: Path):
        self._program = program
        self._data = program.experiment.data
        self._model = model
        self._folder = workdir / FOLDER
        self._sets = self._data.row_sets()

    def run(self, *, begins: bool, tell: Tell) -> None:
        """Computes what is not there yet, and has the data deliver it. Every process calls this.

        Args:
            begins: the run has no checkpoint yet: values of other weights or data are computed anew, not refused.
            tell: prints a line.

        Raises:
            ValueError: the folder holds values of other weights or data than those that the run goes on with.
        """
        stored = self._stored(keeps_hashes=True)
        difference = self._difference(stored)
        if not begins:
            self._check(difference)
        if difference == DAMAGED:
            tell(f"{self._folder} is damaged: the reference is computed again")
        elif difference:
            tell(f"{self._folder} holds a reference of other {difference}: it is computed again")
        self._begin(stored, anew=difference is not None)
        # Once there is a checkpoint, the trainer has compared the config with that of the steps before.
        if begins or not stored.is_complete:
            if not stored.is_complete:
                self._tell_surplus(tell)
            self._model.load()
            if not self._agrees(stored):
                tell(f"{self._folder} holds a reference by another program: it is computed again")
                self._begin(stored, anew=True)
            self._score(stored)
            self._model.unload()
        distributed.barrier("reference")
        if not distributed.everywhere(stored.difference is None):
            raise ValueError(
                f"{self._folder}: another process does not see what the first one wrote; expected a folder that all "
                "hosts have, or companion.kind = hosted"
            )
        self._data.attach("reference", stored.open())

    def _tell_surplus(self, tell: Tell) -> None:
        """Says so where most of what is computed is of rows that the run does not read, as in a run of few steps."""
        training_rows = self._data.num_rows
        num_steps = self._program.experiment.trainer.known_steps
        if num_steps is None:
            return
        rows_read = num_steps * self._data.global_batch_size
        if 2 * rows_read < training_rows:
            tell(
                f"the reference of all {training_rows:,} rows is computed, and the run reads {rows_read:,} of them; "
                "companion.kind=hosted computes these alone, in each step"
            )

    def check(self) -> None:
        """Looks at the folder of a run that goes on. Every process calls this.

        Raises:
            ValueError: it holds values of other weights or data than those that the run goes on with.
        """
        # The values themselves are compared with their checksums by `run`: damaged ones are no reason to refuse.
        self._check(distributed.from_primary(self._stored(keeps_hashes=True).difference))

    def _check(self, difference: str | None) -> None:
        if difference in (None, "", DAMAGED):
            return
        same = "data" if difference == "data" else "pretrained, companion.pretrained and trainer.seed"
        raise ValueError(
            f"{self._folder} holds a reference of other {difference} than those of this run, which has begun with it; "
            f"expected the same {same} as before, or another --workdir"
        )

    def _difference(self, stored: StoredRows) -> str | None:
        """`StoredRows.difference` of the files in the folder, whose values are compared with their checksums as well;
        that of the primary process."""
        difference = None
        if distributed.is_primary():
            difference = stored.difference
            if difference is None and stored.has_changed:
                difference = DAMAGED
        return distributed.from_primary(difference)

    def opened(self) -> bool:
        """Has the data deliver values that are there; False where they are not, or are of other weights or data."""
        stored = self._stored(keeps_hashes=False)
        if self._difference(stored) is not None:
            return False
        values = stored.open()
        if not stored.is_complete:
            return False
        self._data.attach("reference", values)
        return True

    def _stored(self, *, keeps_hashes: bool) -> StoredRows:
        weights = ""
        # One process reads files for their checksums.
        if distributed.is_primary():
            hashes = FileHashes(self._folder.with_name(".reference-hashes.json"))
            weights = self._model.weights_digest(hashes)
            if keeps_hashes:
                hashes.save()
        weights = distributed.from_primary(weights)
        return StoredRows(self._folder, self._sets, self._data.seq_len, weights)

    def _begin(self, stored: StoredRows, *, anew: bool) -> None:
        """Makes the files ready in the primary process; the others learn how far they are."""
        if distributed.is_primary():
            stored.begin(anew=anew)
        stored.done = distributed.from_primary(stored.done)

    def _agrees(self, stored: StoredRows) -> bool:
        """Whether the first rows that are stored are what the model gives for them, to the bit."""
        name = next((name for name, count in stored.done.items() if count), None)
        if name is None:
            return True
        count = min(stored.done[name], self._data.global_batch_size)
        values = self._gathered(self._model(self._program.put(self._batch(self._sets[name], 0)))["reference"])
        same = True
        if distributed.is_primary():
            same = bool(np.array_equal(values[:count], stored.rows(name, 0, count)))
        return distributed.from_primary(same)

    def _score(self, stored: StoredRows) -> None:
        """Computes all rows that are not done; the primary process writes them."""
        size = self._data.global_batch_size
        total = sum(rows.num_rows for rows in self._sets.values())
        with phase("computing the reference") as computing:
            for name, rows in self._sets.items():
                first_row = stored.done[name]
                count = -(-(rows.num_rows - first_row) // size)
                read = partial(self._batch_number, rows, first_row)
                with Prefetcher(read, 0, count, ahead=self._data.prefetch) as batches:
                    for number, batch in enumerate(batches):
                        results = self._model(self._program.put(batch))
                        values = self._gathered(results["reference"])
                        if distributed.is_primary():
                            stored.write(name, first_row + number * size, values)
                        else:
                            stored.done[name] = min(rows.num_rows, first_row + (number + 1) * size)
                        computing.progress(sum(stored.done.values()), total)

    def _batch_number(self, rows: RowSet, first_row: int, number: int) -> dict[str, np.ndarray]:
        return self._batch(rows, first_row + number * self._data.global_batch_size)

    def _batch(self, rows: RowSet, first_row: int) -> dict[str, np.ndarray]:
        """This process's rows of the batch that begins with a row of a set."""
        local_rows = [rows.row(first_row + int(row)) for row in self._program.rows]
        return {name: np.stack([row[name] for row in local_rows]) for name in self._data.arrays()}

    def _gathered(self, values: jax.Array) -> np.ndarray:
        """The whole array [B, S] in this process."""
        if jax.process_count() == 1:
            return np.asarray(values)
        everywhere = jax.jit(lambda x: x, out_shardings=self._program.replicated)(values)
        return np.asarray(everywhere.addressable_data(0))
