"""Windows of a token stream -> rows of a batch: the only place where targets are shifted and documents are masked.

Window i covers tokens [i*S, i*S + S], S + 1 of them: S inputs, and S targets that are the inputs' successors. So the
windows of a stream tile its targets: each token but the very first is predicted once.
May import: framework.data.token_files, numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from framework.data.token_files import TokenStream

Batch = dict[str, np.ndarray]


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
