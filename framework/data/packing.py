"""Token streams -> rows of a batch: the only place where targets are shifted and documents are masked.

Text is cut into windows. Window i covers tokens [i*S, i*S + S], S + 1 of them: S inputs, and S targets that are the
inputs' successors. So the windows of a stream tile its targets: each token but the very first is predicted once.
Conversations stay whole.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from framework.data.token_files import TokenStream

Batch = dict[str, np.ndarray]
_TOGETHER = 8192  # conversations that are packed with each other


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Windows with at least one target."""
    return max(0, -(-(num_tokens - 1) // seq_len))


def pack(windows: Sequence[np.ndarray], seq_len: int, *, separators: Sequence[int] | None) -> Batch:
    """Stacks B windows int32[n], n <= S + 1, into the rows of a batch; a short one is padded with id 0 and weight 0.

    Returns:
        tokens int32[B,S], targets int32[B,S], weights float32[B,S]; with separators (the id of each row's stream) also
        positions int32[B,S] and segments int32[B,S]. The separator is position 0 of its document, whose first token is
        predicted from it alone: no target is lost to the masks, and bits per byte with and without them compare.
    """
    tokens, targets = np.zeros((2, len(windows), seq_len), np.int32)
    weights = np.zeros(tokens.shape, np.float32)
    for row, window in enumerate(windows):
        count = max(0, len(window) - 1)
        tokens[row, :count] = window[:-1]
        targets[row, :count] = window[1:]
        weights[row, :count] = 1.0
    batch = {"tokens": tokens, "targets": targets, "weights": weights}
    if separators is not None:
        index, used = np.arange(seq_len, dtype=np.int32), weights > 0
        opens = tokens == np.asarray(separators, np.int32)[:, None]
        opens[:, :1] = True  # a row may begin inside a document: what is left of it counts from 0
        batch["positions"] = used * (index - np.maximum.accumulate(opens * index, axis=1))
        batch["segments"] = used * np.cumsum(opens, axis=1, dtype=np.int32)
    return batch


class Windows:
    """The rows of a text's stream: `num_rows` with a target, of which `num_whole` have all S; training leaves out what
    is left after those."""

    note = ""  # for the start table

    def __init__(self, stream: TokenStream, seq_len: int, *, masked: bool = False):
        self._stream, self._seq_len, self._masked = stream, seq_len, masked
        self.num_whole = max(0, (stream.num_tokens - 1) // seq_len)
        self.num_rows = num_windows(stream.num_tokens, seq_len)

    def row(self, index: int) -> Batch:
        """Arrays [S], as `pack` makes them; nothing but padding from num_rows on."""
        start = min(index * self._seq_len, self._stream.num_tokens)
        window = self._stream.read(start, min(start + self._seq_len + 1, self._stream.num_tokens))
        separators: list[int] | None = [self._stream.eos_id or 0] if self._masked else None
        return {name: array[0] for name, array in pack([window], self._seq_len, separators=separators).items()}


class Conversations:
    """Rows of whole conversations, masked from each other; each is cut after S + 1 tokens, and needs a target.

    They are packed once, best fit decreasing among 8192 at a time, in an order drawn from `seed` (None: as they come).

    Args:
        stream: conversations behind separators, 2 * id + 1 where a token is a target and 2 * id elsewhere.
    """

    def __init__(self, stream: TokenStream, seq_len: int, seed: int | None):
        self._stream, self._seq_len = stream, seq_len
        values = stream.read(0, stream.num_tokens)
        starts = np.flatnonzero(values == stream.eos_id) + 1
        ends = np.append(starts[1:] - 1, len(values))
        stops = np.minimum(ends, starts + seq_len + 1)
        targets = np.append(0, np.cumsum(values & 1))
        kept = targets[stops] > targets[np.minimum(starts + 1, stops)]  # nothing predicts the first token
        self._spans = np.stack([starts, stops], 1)[kept]
        lengths = self._spans[:, 1] - self._spans[:, 0] - 1
        order = (
            np.argsort(np.random.Philox(key=seed).random_raw(len(lengths))) if seed is not None else range(len(lengths))
        )
        parts = (np.array(order[at : at + _TOGETHER]) for at in range(0, len(lengths), _TOGETHER))
        self._rows = [part[row] for part in parts for row in _best_fit(lengths[part], seq_len)]
        self.num_whole = self.num_rows = len(self._rows)
        padding, cut = 1 - lengths.sum() / max(1, self.num_rows * seq_len), np.sum((ends > stops) & kept)
        self.note = f"{padding:.1%} padding, {cut:,} conversations cut at {seq_len + 1:,} tokens, "
        self.note += f"{np.sum(~kept):,} without an answer left out"

    def row(self, index: int) -> Batch:
        """Arrays [S] as `pack` makes them, with weight 1 on answers; nothing but padding from num_rows on."""
        row = pack([np.zeros(0, np.int32)], self._seq_len, separators=[0])
        row, at = {name: array[0] for name, array in row.items()}, 0
        for number, which in enumerate(self._rows[index] if index < self.num_rows else [], start=1):
            values = self._stream.read(*self._spans[which].tolist())
            here = slice(at, at := at + len(values) - 1)
            row["tokens"][here], row["targets"][here] = values[:-1] >> 1, values[1:] >> 1
            row["weights"][here], row["segments"][here] = values[1:] & 1, number
            row["positions"][here] = np.arange(len(values) - 1)
        return row


def _best_fit(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Indices of `lengths` in groups of sums up to `size`: the longest first, each into the fullest that has room."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (what is free in a row, the row), sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        at = bisect.bisect_left(rooms, (length, 0))
        if at == len(rooms):
            rows.append([])
        free, row = (size, len(rows) - 1) if at == len(rooms) else rooms.pop(at)
        rows[row].append(index)
        bisect.insort(rooms, (free - length, row))
    return rows
