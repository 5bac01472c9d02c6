"""Hand-made batches of preferences: sequences of ids, one after the other in each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.framework.data.batches import Pipeline, Shapes
from plimsoll.framework.data.packing import Batch
from plimsoll.framework.data.tokenizers import NoTokenizer
from tools.peers.preference_cases import PreferencePair, UnpairedExample


@dataclass(frozen=True)
class LabeledAnswer:
    """A prompt with an answer.

    Args:
        prompt, answer: token ids; a prompt has at least one.
        label: +1 desirable, -1 undesirable, 0 for an answer that only serves the KL estimate. Pairs have no labels, so
            theirs is 1.
    """

    prompt: list[int]
    answer: list[int]
    label: int = 1


class GivenBatches(Pipeline):
    """Placeholder for the data of an experiment whose caller makes the batches.

    Args:
        shape: [B, S].
        vocab_size: exclusive upper bound of all ids.
        extra: {name: dtype} of arrays in addition to tokens, targets, weights, positions, segments and ends.
    """

    item = "token"
    loss_unit = "nats"
    document_mask = True
    validation_names = ()

    def __init__(self, shape: tuple[int, int], vocab_size: int, extra: dict[str, str]):
        self.global_batch_size, self.seq_len = shape
        self.tokenizer = NoTokenizer(vocab_size=vocab_size)
        self._extra = extra

    def arrays(self, *, evaluation: bool = False) -> Shapes:
        """Return the shapes and dtypes of all arrays of a batch."""
        shape = (self.global_batch_size, self.seq_len)
        dtypes = dict.fromkeys(("tokens", "targets", "positions", "segments"), "int32")
        dtypes |= {"weights": "float32", "ends": "float32", **self._extra}
        return {name: (shape, dtype) for name, dtype in dtypes.items()}

    def training_row(self, sequence: int, source: int, index: int) -> Batch:
        """Fail, because there are no rows."""
        raise AssertionError("the caller makes the batches")

    def evaluation_rows(self, name: str) -> Any:
        """Fail, because there are no rows."""
        raise AssertionError("the caller makes the batches")


def to_sequences(example: PreferencePair | UnpairedExample) -> list[LabeledAnswer]:
    """Return the two sequences of an example: chosen and rejected, or the answer and the one for the KL estimate."""
    if isinstance(example, PreferencePair):
        return [LabeledAnswer(example.prompt, example.chosen), LabeledAnswer(example.prompt, example.rejected)]
    label = 1 if example.liked else -1
    return [
        LabeledAnswer(example.prompt, example.answer, label),
        LabeledAnswer(example.prompt, example.other_answer, 0),
    ]


def to_rows(examples: Sequence[PreferencePair | UnpairedExample], num_rows: int) -> list[list[LabeledAnswer]]:
    """Return the sequences of each row; all rows have the same number of examples."""
    per_row = len(examples) // num_rows
    rows = []
    for row in range(num_rows):
        members = examples[row * per_row : (row + 1) * per_row]
        rows.append([sequence for example in members for sequence in to_sequences(example)])
    return rows


def to_batch(rows: Sequence[Sequence[LabeledAnswer]], seq_len: int, *, labels: bool) -> Batch:
    """Return the arrays of a batch, [B, S], without `reference`; a sequence of n tokens takes n - 1 columns."""
    shape = (len(rows), seq_len)
    batch: Batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segments")}
    batch |= {name: np.zeros(shape, np.float32) for name in ("weights", "ends", "labels")}
    for row, sequences in enumerate(rows):
        start = 0
        for number, sequence in enumerate(sequences, start=1):
            ids = sequence.prompt + sequence.answer
            stop = start + len(ids) - 1
            columns = slice(start, stop)
            batch["tokens"][row, columns] = ids[:-1]
            batch["targets"][row, columns] = ids[1:]
            batch["positions"][row, columns] = np.arange(len(ids) - 1)
            batch["segments"][row, columns] = number
            batch["weights"][row, start + len(sequence.prompt) - 1 : stop] = 1.0
            batch["labels"][row, columns] = sequence.label
            batch["ends"][row, stop - 1] = float(sequence.label != 0)
            start = stop
    if not labels:
        del batch["labels"]
    return batch
