"""Has a teacher go once through the rows of some data, and stores what it says of each position."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from framework.companions import likeliest
from framework.companions.teacher_files import Facts, Rows, TeacherRows, TeacherWriter, data_digests, row_key
from framework.data.packing import Batch
from framework.data.pipeline import DataPipeline
from framework.data.sources import Leaf
from framework.inference.generation import Forward
from framework.layers.base import batch_shards
from framework.layout import Nested, flatten
from framework.program.experiment import Experiment
from framework.program.program import Program
from framework.terminal.phases import phase

# Rows begin to count after so many seconds: a kill costs no more than that.
_COMMIT_SECONDS = 5.0


def weights_digest(weights: Nested) -> str:
    """sha256 of all weights, by path, dtype and shape; one array at a time is on the host."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten(weights).items()):
        digest.update(f"{path} {leaf.dtype} {leaf.shape} ".encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


def digests_of(data: DataPipeline) -> dict[str, str]:
    """`data_digests` of all sources of a pipeline that is set up."""
    return data_digests(data.leaves, data.seq_len, masked=data.document_mask, packing_seed=data.packing_seed)


def check_teacher(teacher: Experiment, student: Experiment, data: DataPipeline, program: Program, top_k: int) -> int:
    """The number of ids over which teacher and student are compared.

    Raises:
        ValueError: the teacher does not read the data, or has another tokenizer; one line.
    """
    ours = data.tokenizer
    theirs = teacher.data.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    if ours.digest != theirs.digest:
        raise ValueError(
            f"the teacher's tokenizer is another one than data.tokenizer ({_digest(theirs.digest)}, not "
            f"{_digest(ours.digest)}): its tokens mean other texts; expected a teacher with the same tokenizer"
        )
    teacher.language_model.check(program.mesh, data)
    # Tables may be padded, and differently: no text has the ids of these rows.
    vocab_size = min(teacher.language_model.vocab_size, student.language_model.vocab_size)
    if not 0 < top_k <= vocab_size:
        raise ValueError(f"--top_k={top_k}: expected 1 to {vocab_size}, the ids of teacher and student")
    return vocab_size


def _digest(value: str | None) -> str:
    return "of ids without text" if value is None else value[:12]


class RowList(NamedTuple):
    """Rows of data to be read one after the other.

    Attributes:
        leaves: the sources of training, and after them those of validation.
        places_N2: int64, of each row the number of its source and its number in there.
    """

    leaves: list[Leaf]
    places_N2: np.ndarray

    def read(self, number: int) -> Batch:
        """Row `number` of the list: arrays [S]."""
        source, index = self.places_N2[number].tolist()
        return self.leaves[source].rows.row(index)


def rows_of(
    experiment: Experiment, data: DataPipeline, which: Literal["run", "all"], *, at_most: int | None = None
) -> RowList:
    """The rows that a teacher is to see, each once: those that the experiment's run reads, in its order, or all.

    Args:
        experiment: whose run it is.
        data: its data, set up.
        which: "run": the sequences of trainer.max_steps steps or trainer.max_epochs, and the batches of its
            evaluations; "all": every row of every source.
        at_most: of more rows of a run, so many of training and of each validation set, from the first to the last one,
            evenly spaced.
    """
    limit = None
    if which == "run":
        limit = experiment.trainer.eval_batches
        count = _num_steps(experiment, data) * data.global_batch_size
        numbers = _spaced(range(count), at_most)
        sequences = (data.locate(number) for number in numbers)
        places = [np.fromiter(sequences, np.dtype((np.int64, 2)), len(numbers))]
    else:
        places = [_places(source, range(leaf.rows.num_whole)) for source, leaf in enumerate(data.train_leaves)]
    for source, name in enumerate(data.validation_names, start=len(data.train_leaves)):
        num_rows, _ = data.evaluation_rows(name)
        for number in _spaced(data.eval_batch_numbers(name, limit), at_most):
            first_row = number * data.global_batch_size
            last_row = min(first_row + data.global_batch_size, num_rows)
            places.append(_places(source, range(first_row, last_row)))
    return RowList(data.leaves, np.concatenate(places))


def _spaced(numbers: Sequence[int], at_most: int | None) -> Sequence[int]:
    """The numbers, or so many of them, with the first and the last one."""
    if at_most is None or len(numbers) <= at_most:
        return numbers
    return [numbers[turn * (len(numbers) - 1) // (at_most - 1)] for turn in range(at_most)]


def _places(source: int, indices: range) -> np.ndarray:
    return np.stack([np.full(len(indices), source, np.int64), np.asarray(indices, np.int64)], axis=1)


def _num_steps(experiment: Experiment, data: DataPipeline) -> int:
    """The steps of the experiment's run."""
    options = experiment.trainer
    if options.max_epochs is None:
        return options.max_steps
    epoch_steps = data.epoch_steps(options.max_epochs)
    return min(epoch_steps, options.known_steps or epoch_steps)


class TeacherScorer:
    """Computes a teacher's likeliest tokens for rows of data.

    Args:
        program: the teacher's.
        state: with the groups parameter (or ema), frozen and buffer.
        facts: say K and the vocabulary.
        averaged: the moving averages are the teacher.
        batch_size: rows at a time, rounded up to what the mesh divides.
    """

    def __init__(self, program: Program, state: Nested, facts: Facts, *, averaged: bool, batch_size: int):
        weights = program.weights(state, averaged=averaged)
        self._arrays = (weights, state["buffer"])
        self.facts = facts
        shards = batch_shards(program.mesh.shape)
        self.batch_size = -(-batch_size // shards) * shards
        forward = Forward(program, weights)
        values_of = likeliest.likeliest(facts.top_k, facts.vocab_size)

        def score(arrays: Any, batch: Nested) -> dict[str, jax.Array]:
            ctx = program.evaluation_context(batch)
            x_BSD, head_weights, _ = forward(arrays, ctx)
            return values_of(forward.model.language_head, head_weights, x_BSD, ctx)

        self._score = program.jit(score, out_shardings=program.replicated)

    def __call__(self, rows: list[Batch]) -> Rows:
        """What is stored of at most `batch_size` rows."""
        # The last row comes again until the batch is full: one shape is one program.
        filled = [*rows, *[rows[-1]] * (self.batch_size - len(rows))]
        batch = {name: np.stack([row[name] for row in filled]) for name in rows[0]}
        arrays = jax.device_get(self._score(self._arrays, batch))
        stored = self.facts.empty(0)
        count = len(rows)
        keys = [np.frombuffer(row_key(row), np.uint8) for row in rows]
        return Rows(
            keys=np.stack(keys),
            ids=arrays[likeliest.IDS][:count].astype(stored.ids.dtype),
            log_probs=arrays[likeliest.LOG_PROBS][:count].astype(stored.log_probs.dtype),
            tails=arrays[likeliest.TAIL][:count].astype(stored.tails.dtype),
        )


def store(scorer: TeacherScorer, row_list: RowList, folder: Path) -> tuple[int, int]:
    """Stores what the teacher says of the rows that the folder does not have yet; (rows added, rows in all).

    Batches of rows are always the same ones, so what is written does not depend on kills in between.
    """
    writer = TeacherWriter(folder, scorer.facts)
    with writer.open():
        num_before = writer.num_rows
        last_commit = time.monotonic()
        with phase("scoring rows") as scoring:
            for num_done, rows in _batches(row_list, TeacherRows(folder), scorer.batch_size):
                writer.append(scorer(rows))
                scoring.progress(num_done, len(row_list.places_N2))
                if time.monotonic() - last_commit > _COMMIT_SECONDS:
                    writer.commit()
                    last_commit = time.monotonic()
        writer.commit()
    return writer.num_rows - num_before, writer.num_rows


def _batches(row_list: RowList, stored_rows: TeacherRows, batch_size: int) -> Iterator[tuple[int, list[Batch]]]:
    """(number of rows that are done by then, rows that are not stored yet), so many at a time, each row once."""
    seen: set[bytes] = set()
    rows: list[Batch] = []
    total = len(row_list.places_N2)
    for number in range(total):
        row = row_list.read(number)
        key = row_key(row)
        # A run of several epochs reads a row several times, and two rows may be equal.
        if key in seen or key in stored_rows:
            continue
        seen.add(key)
        rows.append(row)
        if len(rows) == batch_size:
            yield number + 1, rows
            rows = []
    if rows:
        yield total, rows
