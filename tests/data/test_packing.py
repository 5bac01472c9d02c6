"""Windows tile the stream, targets are the next tokens, and document masks lose no target."""

from pathlib import Path

import numpy as np
import pytest

from plimsoll.framework.data.files import FileHashes
from plimsoll.framework.data.packing import Windows, pack
from plimsoll.framework.data.sources import TokenMemmap
from plimsoll.framework.data.token_files import TokenStream
from plimsoll.framework.data.tokenizers import NoTokenizer


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    """Tokens 0 .. 100: each equals its index, so any offset error shows."""
    np.arange(101, dtype="<u2").tofile(tmp_path / "x.bin")
    return TokenMemmap(path=str(tmp_path / "x.bin")).open(NoTokenizer(vocab_size=101), FileHashes())


@pytest.mark.parametrize("seq_len", [1, 3, 7, 10, 99, 100, 101, 200])
def test_windows_tile_the_targets_exactly(stream: TokenStream, seq_len: int):
    windows = Windows(stream, seq_len)
    rows = [windows.row(i) for i in range(windows.num_rows)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    used = batch["weights"] > 0
    assert batch["targets"][used].tolist() == list(range(1, 101))  # each token except the first, once, in order
    assert batch["tokens"][used].tolist() == list(range(100))
    assert [(name, array.dtype.name) for name, array in batch.items()] == [
        ("tokens", "int32"), ("targets", "int32"), ("weights", "float32"),
    ]  # fmt: skip
    assert not windows.row(windows.num_rows)["weights"].any()  # no target is left beyond the last window
    whole = windows.num_whole
    assert whole == 100 // seq_len
    assert used[:whole].all()


def test_short_and_empty_windows_are_padding():
    batch = pack(
        [np.array([5, 6, 7], np.int32), np.zeros(0, np.int32), np.array([5], np.int32)], 4, separators=[9, 9, 9]
    )
    assert batch["tokens"].tolist() == [[5, 6, 0, 0], [0] * 4, [0] * 4]
    assert batch["targets"].tolist() == [[6, 7, 0, 0], [0] * 4, [0] * 4]
    assert batch["weights"].tolist() == [[1, 1, 0, 0], [0] * 4, [0] * 4]
    assert batch["segments"].tolist() == [[1, 1, 0, 0], [0] * 4, [0] * 4]
    assert batch["positions"].tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4]


@pytest.mark.parametrize("seed", range(5))
def test_segments_agree_with_a_plain_loop(seed: int):
    windows = np.random.default_rng(seed).integers(0, 4, (6, 33)).astype(np.int32)
    separators = [0, 1, 2, 3, 0, 1]  # each row has its own
    batch = pack(list(windows), 32, separators=separators)
    assert batch["weights"].min() == 1.0  # a document's first token is predicted too, from its separator only
    assert batch["segments"].dtype == batch["positions"].dtype == np.int32
    for row, window in enumerate(windows):
        segment, position = 1, -1
        for i, token in enumerate(window[:32]):
            if token == separators[row] and i > 0:
                segment, position = segment + 1, -1
            position += 1
            assert (batch["segments"][row, i], batch["positions"][row, i]) == (segment, position)


def test_rows_of_a_million_tokens(tmp_path: Path):
    """Documents of hundreds of thousands of tokens, longer than the shards of a row and than the row itself."""
    seq_len = 1 << 20
    ends = [300_000, 1_048_576, 1_050_000, 3_000_000]  # the first tokens of documents, after the one at 0
    tokens = np.ones(3_200_001, "<u2")
    tokens[[0, *ends]] = 0
    tokens.tofile(tmp_path / "long.bin")
    source = TokenMemmap(path=str(tmp_path / "long.bin"), eos_id=0)
    stream = source.open(NoTokenizer(vocab_size=2), FileHashes())
    windows = Windows(stream, seq_len, masked=True)
    assert windows.num_whole == 3
    starts = np.array([0, *ends])
    for index in range(3):
        row = windows.row(index)
        column = np.arange(index * seq_len, (index + 1) * seq_len)
        # The last start of a document at or before each token; a row starts a new one.
        document_start = np.maximum(starts[np.searchsorted(starts, column, side="right") - 1], index * seq_len)
        assert row["positions"].dtype == np.int32
        np.testing.assert_array_equal(row["positions"], column - document_start)
        np.testing.assert_array_equal(row["segments"], np.unique(document_start, return_inverse=True)[1] + 1)
        assert row["weights"].all()
