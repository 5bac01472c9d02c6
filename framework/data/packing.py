"""Token streams -> rows of a batch: the only place where targets are shifted and documents are masked.

Text is cut into windows. Window i covers tokens [i*S, i*S + S], S + 1 of them: S inputs, and S targets that are the
inputs' successors. So the windows of a stream tile its targets: each token but the very first is predicted once.
Conversations stay whole.
May import: framework.data.token_files, numpy.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from framework.data.token_files import TokenStream

Batch = dict[str, np.ndarray]
_TOGETHER = 8192  # conversations that are packed with each other


def num_whole_windows(num_tokens: int, seq_len: int) -> int:
    """Windows with all S targets: what training uses (the rest, less than one window, is left out of an epoch)."""
    return max(0, (num_tokens - 1) // seq_len)


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Windows with at least one target: what evaluation uses."""
    return max(0, -(-(num_tokens - 1) // seq_len))


def read_window(stream: TokenStream, index: int, seq_len: int) -> np.ndarray:
    """int32[S + 1]; shorter for the stream's last window, empty past it."""
    start = min(index * seq_len, stream.num_tokens)
    return stream.read(start, min(start + seq_len + 1, stream.num_tokens))


def pack(windows: Sequence[np.ndarray], seq_len: int, *, separators: Sequence[int] | None) -> Batch:
    """Stacks windows into the rows of a batch.

    Args:
        windows: B arrays int32[n], n <= S + 1; a short one is padded with id 0 and weight 0.
        separators: B ids, the eos of each row's stream, to mask documents from each other; None for no masks.

    Returns:
        tokens int32[B,S], targets int32[B,S], weights float32[B,S]; with separators also positions int32[B,S] and
        segments int32[B,S]. The separator is position 0 of its document, whose first token is predicted from it alone:
        no target is lost to the masks, and bits per byte with and without them compare.
    """
    tokens = np.zeros((len(windows), seq_len), np.int32)
    targets = np.zeros((len(windows), seq_len), np.int32)
    weights = np.zeros((len(windows), seq_len), np.float32)
    for row, window in enumerate(windows):
        count = max(0, len(window) - 1)
        tokens[row, :count] = window[:-1]
        targets[row, :count] = window[1:]
        weights[row, :count] = 1.0
    batch = {"tokens": tokens, "targets": targets, "weights": weights}
    if separators is not None:
        batch["positions"], batch["segments"] = _documents(tokens, weights, np.asarray(separators, np.int32))
    return batch


def _documents(tokens: np.ndarray, weights: np.ndarray, separators: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(positions int32[B,S], segments int32[B,S]): where in its document a token stands, and which document it is."""
    index = np.arange(tokens.shape[1], dtype=np.int32)
    opens = tokens == separators[:, None]
    opens[:, :1] = True  # a row may begin inside a document: what is left of it counts from 0
    positions = index - np.maximum.accumulate(np.where(opens, index, 0), axis=1)
    segments = np.cumsum(opens, axis=1, dtype=np.int32)
    used = weights > 0
    return np.where(used, positions, 0).astype(np.int32), np.where(used, segments, 0).astype(np.int32)


class Windows:
    """The rows of a text's stream: `num_whole` without padding, of `num_rows`."""

    note = ""  # for the start table

    def __init__(self, stream: TokenStream, seq_len: int, *, masked: bool):
        self._stream, self._seq_len, self._masked = stream, seq_len, masked
        self.num_whole = num_whole_windows(stream.num_tokens, seq_len)
        self.num_rows = num_windows(stream.num_tokens, seq_len)

    def row(self, index: int) -> Batch:
        """Arrays [S], as `pack` makes them; nothing but padding from num_rows on."""
        separators: list[int] | None = [self._stream.eos_id or 0] if self._masked else None
        batch = pack([read_window(self._stream, index, self._seq_len)], self._seq_len, separators=separators)
        return {name: array[0] for name, array in batch.items()}


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
        self._starts, self._stops = starts[kept], stops[kept]
        lengths = self._stops - self._starts - 1
        count = len(lengths)
        order = np.arange(count) if seed is None else np.argsort(np.random.Philox(key=seed).random_raw(count))
        parts = (order[at : at + _TOGETHER] for at in range(0, count, _TOGETHER))
        self._rows = [part[row] for part in parts for row in _best_fit(lengths[part], seq_len)]
        self.num_whole = self.num_rows = len(self._rows)
        padding = 1 - lengths.sum() / max(1, self.num_rows * seq_len)
        self.note = (
            f"{padding:.1%} padding, {np.sum((ends > stops) & kept):,} conversations cut at {seq_len + 1:,} tokens, "
        )
        self.note += f"{np.sum(~kept):,} without an answer left out"

    def row(self, index: int) -> Batch:
        """Arrays [S]; nothing but padding from num_rows on."""
        names = ("tokens", "targets", "weights", "positions", "segments")
        row = {name: np.zeros(self._seq_len, np.float32 if name == "weights" else np.int32) for name in names}
        at = 0
        for number, which in enumerate(self._rows[index] if index < self.num_rows else [], start=1):
            values = self._stream.read(int(self._starts[which]), int(self._stops[which]))
            here = slice(at, at := at + len(values) - 1)
            row["tokens"][here], row["targets"][here], row["weights"][here] = (
                values[:-1] >> 1,
                values[1:] >> 1,
                values[1:] & 1,
            )
            row["positions"][here], row["segments"][here] = np.arange(len(values) - 1), number
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
