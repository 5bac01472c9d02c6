"""The top-K next tokens of a teacher at each position: computes them, and stores them for the rows of a dataset."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from plimsoll.framework.batch_transforms.auxiliary_model import HeadFunction
from plimsoll.framework.batch_transforms.teacher_files import (
    TeacherFacts,
    TeacherOutputs,
    TeacherRows,
    TeacherWriter,
    row_key,
)
from plimsoll.framework.data.batches import Shapes
from plimsoll.framework.data.files import compute_digest
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.pipeline import DataPipeline
from plimsoll.framework.data.sources import LeafSource
from plimsoll.framework.inference.generation import InferenceForward, ModelArrays
from plimsoll.framework.layers.base import Context, batch_shards
from plimsoll.framework.layers.head import LMHead
from plimsoll.framework.layout import Nested, TrainState, flatten
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.phases import phase

IDS = "teacher_ids"
LOG_PROBS = "teacher_log_probs"
TAIL = "teacher_tail"
# The log of a probability too small to change a float32 sum with 1. An empty bucket gets this value, because minus
# infinity would make the divergence NaN.
_LEAST_TAIL = -50.0
# Interval between commits in seconds: the most work that a kill can lose.
_COMMIT_SECONDS = 5.0


def teacher_shapes(rows: int, length: int, top_k: int) -> Shapes:
    """Return the shapes of the arrays that a teacher adds to a batch; see `framework.objectives.distillation`."""
    return {
        IDS: ((rows, length, top_k), "int32"),
        LOG_PROBS: ((rows, length, top_k), "float32"),
        TAIL: ((rows, length), "float32"),
    }


def make_top_k_function(top_k: int, vocab_size: int) -> HeadFunction:
    """Return a head function that computes the arrays of `teacher_shapes` in chunks of positions.

    The full logits are never materialized.

    Args:
        top_k: K, the number of tokens to keep per position.
        vocab_size: the distribution covers the ids below this; a teacher's table may be padded to more rows.
    """

    def function(head: LMHead, weights: Nested, x_BSD: jax.Array, ctx: Context) -> dict[str, jax.Array]:
        compute_values = partial(_compute_top_k, top_k=top_k, vocab_size=vocab_size)
        return head.map_logits(compute_values, weights, x_BSD, ctx)

    return function


def _compute_top_k(logits_BSV: jax.Array, *, top_k: int, vocab_size: int) -> dict[str, jax.Array]:
    logits_BSV = logits_BSV[..., :vocab_size]
    lse_BS1 = jax.nn.logsumexp(logits_BSV, axis=-1, keepdims=True)
    values_BSK, ids_BSK = jax.lax.top_k(logits_BSV, top_k)
    # Sum over the other tokens: 1 minus the sum of the top K would lose all precision where the result is small.
    others_BSV = jnp.put_along_axis(logits_BSV, ids_BSK, -jnp.inf, axis=-1, inplace=False)
    tail_BS = jax.nn.logsumexp(others_BSV, axis=-1) - lse_BS1[..., 0]
    return {
        IDS: ids_BSK,
        LOG_PROBS: (values_BSK - lse_BS1).astype(jnp.float32),
        TAIL: jnp.maximum(tail_BS, _LEAST_TAIL).astype(jnp.float32),
    }


def weights_digest(weights: Nested) -> str:
    """Return the sha256 of all weights with their paths, dtypes and shapes; copies one array at a time to the host."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten(weights).items()):
        digest.update(f"{path} {leaf.dtype} {leaf.shape} ".encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


def hash_sources(data: DataPipeline) -> dict[str, str]:
    """Return {source name: digest of everything that determines its rows}; the data must be set up."""
    digests = {}
    for leaf in data.leaves:
        eos_id = leaf.stream.eos_id if data.document_mask else None
        digests[leaf.name] = compute_digest([leaf.stream.digest, data.seq_len, eos_id, data.packing_seed])
    return digests


def check_teacher(teacher: Experiment, student: Experiment, data: DataPipeline, program: Program, top_k: int) -> int:
    """Check that the teacher fits the student's data, and return the number of token ids shared with the student.

    Raises:
        ValueError: the teacher cannot read the data, has another tokenizer, or `top_k` is out of range. The message is
            one line.
    """
    ours = data.tokenizer
    theirs = teacher.data.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    if ours.digest != theirs.digest:
        digests = ["ids without text" if one.digest is None else one.digest[:12] for one in (theirs, ours)]
        raise ValueError(
            f"the teacher's tokenizer differs from data.tokenizer ({', not '.join(digests)}), so its token ids mean "
            "different text; expected a teacher with the same tokenizer"
        )
    teacher.language_model.check(program.mesh, data)
    # The embedding tables may be padded to different sizes; padded ids never occur in text.
    vocab_size = min(teacher.language_model.vocab_size, student.language_model.vocab_size)
    if not 0 < top_k <= vocab_size:
        raise ValueError(f"--top_k={top_k}: expected 1 to {vocab_size}, the ids of teacher and student")
    return vocab_size


@dataclass(frozen=True)
class RowList:
    """A list of data rows to read one after the other.

    Attributes:
        leaves: the training sources, followed by the validation sources.
        row_ids_N2: int64[N, 2], the source number of each row and its index in that source.
    """

    leaves: list[LeafSource]
    row_ids_N2: np.ndarray

    def read(self, number: int) -> Batch:
        """Read row `number` of the list: arrays [S]."""
        source, index = self.row_ids_N2[number].tolist()
        return self.leaves[source].rows.row(index)


def list_rows(
    experiment: Experiment, data: DataPipeline, which: Literal["run", "all"], *, at_most: int | None = None
) -> RowList:
    """Return the rows to score: those that the experiment's run reads, in the order of the run, or all rows.

    Args:
        experiment: experiment of the run.
        data: data of the run, set up.
        which: "run": the sequences of trainer.max_steps steps or trainer.max_epochs, and the batches of its
            evaluations; "all": every row of every source.
        at_most: keep at most this many training rows of a run and batches of each validation set, evenly spaced from
            the first to the last one; None keeps all.
    """
    limit = None
    if which == "run":
        options = experiment.trainer
        limit = options.eval_batches
        num_steps = options.max_steps
        if options.max_epochs is not None:
            epoch_steps = data.epoch_steps(options.max_epochs)
            num_steps = min(epoch_steps, options.known_steps or epoch_steps)
        numbers = _select_evenly(range(num_steps * data.global_batch_size), at_most)
        sequences = (data.locate(number) for number in numbers)
        row_ids = [np.fromiter(sequences, np.dtype((np.int64, 2)), len(numbers))]
    else:
        row_ids = [_make_row_ids(source, range(leaf.rows.num_whole)) for source, leaf in enumerate(data.train_leaves)]
    for source, name in enumerate(data.validation_names, start=len(data.train_leaves)):
        num_rows, _ = data.evaluation_rows(name)
        for number in _select_evenly(data.eval_batch_numbers(name, limit), at_most):
            first_row = number * data.global_batch_size
            last_row = min(first_row + data.global_batch_size, num_rows)
            row_ids.append(_make_row_ids(source, range(first_row, last_row)))
    return RowList(data.leaves, np.concatenate(row_ids))


def _select_evenly(numbers: Sequence[int], at_most: int | None) -> Sequence[int]:
    """Return the numbers, or `at_most` evenly spaced ones if there are more, including the first and the last."""
    if at_most is None or len(numbers) <= at_most:
        return numbers
    return [numbers[position * (len(numbers) - 1) // (at_most - 1)] for position in range(at_most)]


def _make_row_ids(source: int, indices: range) -> np.ndarray:
    return np.stack([np.full(len(indices), source, np.int64), np.asarray(indices, np.int64)], axis=1)


class TeacherScorer:
    """Computes a teacher's top-K tokens for rows of data.

    Args:
        program: program of the teacher.
        state: state with the groups parameter (or ema), frozen and buffer.
        facts: facts of the stored files; they give K and the vocabulary size.
        averaged: use the moving averages of the weights.
        batch_size: number of rows to score at a time, rounded up to a multiple of the mesh's batch shards.
    """

    def __init__(self, program: Program, state: TrainState, facts: TeacherFacts, *, averaged: bool, batch_size: int):
        weights = program.weights(state, averaged=averaged)
        self._arrays = (weights, state.buffer)
        self.facts = facts
        shards = batch_shards(program.mesh.shape)
        # The number of rows must be a multiple of the batch shards.
        self.batch_size = -(-batch_size // shards) * shards
        forward = InferenceForward(program, weights)
        top_k_function = make_top_k_function(facts.top_k, facts.vocab_size)

        def score(arrays: ModelArrays, batch: Nested) -> dict[str, jax.Array]:
            ctx = program.evaluation_context(batch)
            out = forward(arrays, ctx)
            return top_k_function(forward.model.language_head, out.head_weights, out.x_BSD, ctx)

        self._score = program.jit(score, out_shardings=program.replicated)

    def __call__(self, rows: list[Batch]) -> TeacherOutputs:
        """Compute the stored arrays of at most `batch_size` rows."""
        # Repeat the last row until the batch is full, so that there is one shape and one compiled program.
        filled = [*rows, *[rows[-1]] * (self.batch_size - len(rows))]
        batch = {name: np.stack([row[name] for row in filled]) for name in rows[0]}
        arrays = jax.device_get(self._score(self._arrays, batch))
        stored = self.facts.empty(0)
        count = len(rows)
        keys = [np.frombuffer(row_key(row), np.uint8) for row in rows]
        return TeacherOutputs(
            keys=np.stack(keys),
            ids=arrays[IDS][:count].astype(stored.ids.dtype),
            log_probs=arrays[LOG_PROBS][:count].astype(stored.log_probs.dtype),
            tails=arrays[TAIL][:count].astype(stored.tails.dtype),
        )


def store(scorer: TeacherScorer, row_list: RowList, folder: Path) -> tuple[int, int]:
    """Score the rows that the folder does not have yet, and store the results; returns (rows added, rows in total).

    The rows are always split into the same batches, so the written values do not depend on kills in between.
    """
    writer = TeacherWriter(folder, scorer.facts)
    with writer.open():
        num_before = writer.num_rows
        last_commit = time.monotonic()
        with phase("scoring rows") as scoring:
            for num_done, rows in _batches(row_list, TeacherRows(folder), scorer.batch_size):
                writer.append(scorer(rows))
                scoring.progress(num_done, len(row_list.row_ids_N2))
                if time.monotonic() - last_commit > _COMMIT_SECONDS:
                    writer.commit()
                    last_commit = time.monotonic()
        writer.commit()
    return writer.num_rows - num_before, writer.num_rows


def _batches(row_list: RowList, stored_rows: TeacherRows, batch_size: int) -> Iterator[tuple[int, list[Batch]]]:
    """Yield (number of rows read so far, next rows to score), in batches of `batch_size`; each row occurs once."""
    seen: set[bytes] = set()
    rows: list[Batch] = []
    total = len(row_list.row_ids_N2)
    for number in range(total):
        row = row_list.read(number)
        key = row_key(row)
        # A run of several epochs reads a row several times, and two rows may be equal.
        if key in seen or key in stored_rows.number_by_key:
            continue
        seen.add(key)
        rows.append(row)
        if len(rows) == batch_size:
            yield number + 1, rows
            rows = []
    if rows:
        yield total, rows
