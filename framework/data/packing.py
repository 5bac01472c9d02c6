"""Converts token streams into rows of a batch: the only place that shifts targets and masks documents.

Text is split into windows. Window i covers tokens [i*S, i*S + S], S + 1 of them: S inputs, and S targets, which are
the next tokens. So the windows of a stream tile its targets: each token except the very first is predicted once.
Conversations stay whole (`framework.data.preference_rows` has the rows of preference data).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from plimsoll.framework.data.token_files import TokenStream

Batch = dict[str, np.ndarray]

# Number of examples that are packed together. Rows depend on it, and with them the order of the data: changing it
# requires changing _FINGERPRINT in pipeline.py.
_PACKING_GROUP = 8192


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Returns the number of windows with at least one target."""
    # The first token of a stream is not a target; the division rounds up.
    num_targets = num_tokens - 1
    return max(0, -(-num_targets // seq_len))


def pack(windows: Sequence[np.ndarray], seq_len: int, *, separators: Sequence[int] | None) -> Batch:
    """Stacks B windows int32[n], n <= S + 1, into the rows of a batch; short ones are padded with id 0 and weight 0.

    Args:
        windows: the tokens of each row.
        seq_len: S.
        separators: the separator's id in each row's stream; None leaves documents unmasked.

    Returns:
        tokens int32[B,S], targets int32[B,S], weights float32[B,S]; with separators also positions int32[B,S] and
        segments int32[B,S]. The separator is position 0 of its document, and the only context for predicting the
        first token: masking loses no target, and bits per byte with and without it are comparable.
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
        column_S = np.arange(seq_len, dtype=np.int32)
        is_used = weights > 0
        opens_document = tokens == np.asarray(separators, np.int32)[:, None]
        # A row may start inside a document, whose remaining tokens then count from 0.
        opens_document[:, :1] = True
        # The running maximum is the column at which each token's document starts.
        document_start = np.maximum.accumulate(opens_document * column_S, axis=1)
        batch["positions"] = is_used * (column_S - document_start)
        batch["segments"] = is_used * np.cumsum(opens_document, axis=1, dtype=np.int32)
    return batch


class Windows:
    """The rows of a text stream.

    Attributes:
        num_rows: number of rows with at least one target.
        num_whole: number of rows with all S targets. Training skips the shorter last row.
        note: a remark for the startup table.
        facts: as for Examples; always empty.
    """

    note = ""
    facts: tuple[str, ...] = ()

    def __init__(self, stream: TokenStream, seq_len: int, *, masked: bool = False):
        self._stream = stream
        self._seq_len = seq_len
        self._masked = masked
        self.num_whole = max(0, (stream.num_tokens - 1) // seq_len)
        self.num_rows = num_windows(stream.num_tokens, seq_len)

    def row(self, index: int) -> Batch:
        """Returns arrays [S], as from `pack`; rows from num_rows on are padding only."""
        start = min(index * self._seq_len, self._stream.num_tokens)
        # One token more than S: the last one is only a target here, and is the first input of the next window.
        stop = min(start + self._seq_len + 1, self._stream.num_tokens)
        window = self._stream.read(start, stop)
        separators: list[int] | None = None
        if self._masked:
            separators = [self._stream.eos_id or 0]
        batch = pack([window], self._seq_len, separators=separators)
        return {name: array[0] for name, array in batch.items()}


class Examples:
    """Rows of whole examples; an example is one sequence, or several that stay together but are masked from each other.

    The examples are packed once, best fit decreasing among 8192 at a time.

    Args:
        stream: tokens, 2 * id + 1 for a target and 2 * id for any other token.
        seq_len: S.
        lengths: int[N], the columns that each example takes in a row, S at most: a sequence of n tokens takes n - 1,
            one for each pair of input and target.
        seed: seed for the order in which examples are packed; None packs them in stream order.
        packed: False puts each example into its own row.

    Attributes:
        num_rows, num_whole: number of rows; the two are equal, because training uses every row.
        padding: fraction of the columns that no example takes.
        facts: further settings that determine the rows, apart from the tokens and seq_len, for the data fingerprint.
        note: a remark for the startup table; a subclass sets it.
        warnings: warnings about the examples to show before training, one line each.
    """

    note: str
    warnings: tuple[str, ...] = ()

    def __init__(
        self, stream: TokenStream, seq_len: int, lengths: np.ndarray, seed: int | None, *, packed: bool = True
    ):
        self._stream = stream
        self._seq_len = seq_len
        # If a row is no longer than an example, there is no room for another one.
        row_len = seq_len if packed else 0
        order: Sequence[int] | np.ndarray = range(len(lengths))
        if seed is not None:
            # Sorted raw words of a counter-based generator: numpy guarantees a stable stream for a bit generator, but
            # not for Generator.permutation.
            random_words = np.random.Philox(key=seed).random_raw(len(lengths))
            order = np.argsort(random_words)
        # The examples (indices of `lengths`) of each row.
        self._rows: list[np.ndarray] = []
        for start in range(0, len(lengths), _PACKING_GROUP):
            group = np.array(order[start : start + _PACKING_GROUP])
            for members in _best_fit(lengths[group], row_len):
                self._rows.append(group[members])
        self.num_whole = self.num_rows = len(self._rows)
        self.padding = 1 - lengths.sum() / max(1, self.num_rows * seq_len)
        self.facts: tuple[str, ...] = () if packed else ("one example a row",)

    def sequences(self, example: int) -> list[np.ndarray]:
        """Returns the sequences of an example, int32[n] each, with values as in the stream."""
        raise NotImplementedError

    def get_examples(self, index: int) -> np.ndarray:
        """Returns the examples of a row, in order; empty from num_rows on."""
        return self._rows[index] if index < self.num_rows else np.zeros(0, np.int64)

    def row(self, index: int) -> Batch:
        """Returns arrays [S], as from `pack`, with weight 1 on answers.

        Rows from num_rows on are padding only.
        """
        padding_window = np.zeros(0, np.int32)
        batch = pack([padding_window], self._seq_len, separators=[0])
        row = {name: array[0] for name, array in batch.items()}
        start = 0
        segment = 0
        for example in self.get_examples(index).tolist():
            for values in self.sequences(example):
                # Each sequence has its own segment, so that attention does not cross sequences. 0 is padding.
                segment += 1
                length = len(values) - 1
                columns = slice(start, start + length)
                # The lowest bit marks a target; the higher bits are the id.
                row["tokens"][columns] = values[:-1] >> 1
                row["targets"][columns] = values[1:] >> 1
                row["weights"][columns] = values[1:] & 1
                row["segments"][columns] = segment
                row["positions"][columns] = np.arange(length)
                start += length
        return row


class Conversations(Examples):
    """Rows of whole conversations.

    Each conversation is truncated to S + 1 tokens, and needs a target within them.

    Args:
        stream: conversations, each preceded by a separator.
        seq_len: S.
        seed: as for Examples.

    Attributes:
        note: the padding, and how many conversations were truncated or skipped.
    """

    def __init__(self, stream: TokenStream, seq_len: int, seed: int | None):
        values = stream.read(0, stream.num_tokens)
        # Conversation i is values[starts[i] : ends[i]]; separators are excluded.
        starts = np.flatnonzero(values == stream.eos_id) + 1
        ends = np.append(starts[1:] - 1, len(values))
        stops = np.minimum(ends, starts + seq_len + 1)
        # Element i counts the targets before token i, so a difference counts those of a range.
        target_counts = np.append(0, np.cumsum(values & 1))
        # The first token of a conversation is not a target, because nothing in its row predicts it.
        first_targets = np.minimum(starts + 1, stops)
        has_target = target_counts[stops] > target_counts[first_targets]
        self._spans = np.stack([starts, stops], 1)[has_target]
        lengths = self._spans[:, 1] - self._spans[:, 0] - 1
        super().__init__(stream, seq_len, lengths, seed)
        num_cut = np.sum((ends > stops) & has_target)
        self.note = (
            f"{self.padding:.1%} padding, {num_cut:,} conversations truncated to {seq_len + 1:,} tokens, "
            f"{np.sum(~has_target):,} without an answer skipped"
        )

    def sequences(self, example: int) -> list[np.ndarray]:
        start, stop = self._spans[example].tolist()
        return [self._stream.read(start, stop)]


def _best_fit(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Groups the indices of `lengths` so that the lengths in each group sum to at most `size`.

    Best fit decreasing: the longest first, each into the fullest group that has room for it.
    """
    groups: list[list[int]] = []
    # (free columns, group) of each group, sorted.
    free_spaces: list[tuple[int, int]] = []
    # The sort is stable, so equal lengths keep their order and rows are the same on every machine.
    longest_first = np.argsort(-lengths, kind="stable")
    for index in longest_first.tolist():
        length = int(lengths[index])
        position = bisect.bisect_left(free_spaces, (length, 0))
        if position == len(free_spaces):
            groups.append([])
            # An item that is longer than a group gets its own group.
            free = max(size, length)
            group = len(groups) - 1
        else:
            free, group = free_spaces.pop(position)
        groups[group].append(index)
        bisect.insort(free_spaces, (free - length, group))
    return groups
