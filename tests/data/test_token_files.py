"""Token files: written tokens are read back, over shards; truncated, damaged or foreign ones are reported by offset."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from plimsoll.framework.data.files import DataFile, FileHashes, find
from plimsoll.framework.data.sources import DataSource, TokenMemmap
from plimsoll.framework.data.token_files import TokenStream, sidecar_name
from plimsoll.framework.data.tokenize import write_tokens
from plimsoll.framework.data.tokenizers import NoTokenizer, Tokenizer

EOS = 999


class Numbers(DataSource):
    """Documents that are lists of numbers, as text; the file itself is not read."""

    def __init__(self, documents: list[list[int]]):
        self.lists = documents

    def files(self) -> list[DataFile]:
        return find(__file__)

    def read(self, file: DataFile) -> Iterator[str]:
        return (" ".join(map(str, numbers)) for numbers in self.lists)


class NumberTokenizer(Tokenizer):
    """A tokenizer whose ids are the numbers in the text."""

    def __init__(self, vocab_size: int = 1000, eos_id: int = EOS):
        self.vocab_size, self.eos_id, self.digest = vocab_size, eos_id, "t" * 64

    def encode_batch(self, texts):
        return [np.array(text.split(), np.uint32) for text in texts]


def write(path: Path, documents: list[list[int]], vocab_size: int = 1000, eos_id: int = EOS) -> Path:
    list(write_tokens(Numbers(documents), NumberTokenizer(vocab_size, eos_id), path))
    return path


def open_stream(path: Path | str, vocab_size: int = 1000, hashes: Any = None, **fields: Any) -> TokenStream:
    return TokenMemmap(path=str(path), **fields).open(NoTokenizer(vocab_size=vocab_size), hashes or FileHashes())


def test_written_documents_are_read_back(tmp_path: Path):
    path = write(tmp_path / "x.bin", [[1, 2, 3], [], [4], [5, 6]])
    stream = open_stream(path)
    expected = [EOS, 1, 2, 3, EOS, 4, EOS, 5, 6]
    assert (stream.num_tokens, stream.num_documents, stream.num_bytes, stream.eos_id) == (9, 3, 9, EOS)
    assert stream.read(0, 9).tolist() == expected
    assert stream.read(0, 9).dtype == np.int32
    assert np.fromfile(path, "<u2").tolist() == expected  # as nanoGPT reads it
    again, other = write(tmp_path / "a.bin", [[1, 2, 3], [4], [5, 6]]), write(tmp_path / "b.bin", [[1]])
    assert open_stream(again).digest == stream.digest == open_stream(path, verify=False).digest
    assert open_stream(other).digest != stream.digest


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_the_dtype_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str):
    path = write(tmp_path / "x.bin", [[vocab_size - 2]], vocab_size, eos_id=vocab_size - 1)
    assert open_stream(path, vocab_size).read(0, 2).tolist() == [vocab_size - 1, vocab_size - 2]
    assert path.stat().st_size == 2 * np.dtype(dtype).itemsize


def test_shards_read_as_one_stream_in_sorted_order(tmp_path: Path):
    lengths = [3, 1, 7, 2]
    for number, length in enumerate(lengths):
        write(tmp_path / f"s-{number:05d}.bin", [list(range(100 * number, 100 * number + length))])
    stream = open_stream(tmp_path / "s-*.bin")
    whole = [t for number, length in enumerate(lengths) for t in [EOS, *range(100 * number, 100 * number + length)]]
    assert stream.num_tokens == len(whole)
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert stream.read(start, stop).tolist() == whole[start:stop]


def test_a_bare_nanogpt_file_and_a_remote_one(tmp_path: Path):
    tokens = np.arange(50, dtype="<u2")
    tokens.tofile(tmp_path / "train.bin")
    fsspec.filesystem("memory").pipe("/token-files/train.bin", tokens.tobytes())
    for path in (tmp_path / "train.bin", "memory://token-files/train.bin"):
        stream = open_stream(path, eos_id=7)
        assert (stream.num_tokens, stream.num_documents, stream.eos_id) == (50, None, 7)
        assert stream.read(3, 6).tolist() == [3, 4, 5]
    wide = open_stream(tmp_path / "train.bin", vocab_size=1 << 31, dtype="uint32")
    assert wide.num_tokens == 25


# ---- errors, and their position


@pytest.mark.parametrize("verify", [True, False])
def test_file_with_a_wrong_length_is_named_with_its_end(tmp_path: Path, verify: bool):
    path = write(tmp_path / "x.bin", [[1, 2, 3], [4], [5, 6]])
    whole = path.read_bytes()
    for data, place in [
        (whole[:16], "ends early at byte 16 .token 8.: it has 16 bytes, expected 18"),
        (whole[:15], "ends early at byte 15 .token 7."),
        (b"", "ends early at byte 0 .token 0."),
        (whole + b"\1\0", "does not end at byte 18 .token 9."),
    ]:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{path}: {place}"):
            open_stream(path, verify=verify)
    Path(sidecar_name(str(path))).unlink()
    for data, place in [(whole[:5], "ends within a token at byte 4 .token 2.: it has 5 bytes"), (b"", "empty")]:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{path}: {place}"):
            open_stream(path, verify=verify)


def test_a_flipped_bit_is_located_to_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plimsoll.framework.data.token_files.BLOCK_BYTES", 64)
    path = write(tmp_path / "x.bin", [list(range(50))])
    data = bytearray(path.read_bytes())
    data[75] ^= 0x80  # also puts an id out of range, but the damage is what is reported
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{path}: corrupted between byte 64 and byte 102"):
        open_stream(path)
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"corrupted between byte 0 and byte 64"):
        open_stream(path)


def test_id_outside_the_vocabulary_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plimsoll.framework.data.token_files.BLOCK_BYTES", 64)
    tokens = np.zeros(100, "<u2")
    tokens[35] = 500
    tokens.tofile(tmp_path / "x.bin")
    where = rf"{tmp_path}/x.bin: token 500 at index 35 .byte 70. .*the vocabulary has 500 ids"
    with pytest.raises(ValueError, match=where):
        open_stream(tmp_path / "x.bin", vocab_size=500)
    stream = open_stream(tmp_path / "x.bin", vocab_size=500, verify=False)
    assert stream.read(0, 35).sum() == 0
    with pytest.raises(ValueError, match=where):
        stream.read(30, 40)


def test_verification_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, memo = write(tmp_path / "x.bin", [[1, 2, 3]]), tmp_path / "hashes.json"
    os.utime(path, (1e9, 1e9))
    hashes = FileHashes(memo)
    opened = open_stream(path, hashes=hashes)
    hashes.save()
    with monkeypatch.context() as patch:
        patch.setattr(DataFile, "chunks", lambda *a: pytest.fail("read again"))
        assert open_stream(path, hashes=FileHashes(memo)).digest == opened.digest
        with pytest.raises(ValueError, match=r"token 999 at index 0 .*has 500 ids"):  # always checked
            open_stream(path, vocab_size=500, hashes=FileHashes(memo))
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"corrupted"):
        open_stream(path, hashes=FileHashes(memo))


def test_a_sidecar_that_does_not_fit(tmp_path: Path):
    path = write(tmp_path / "x.bin", [[1, 2, 3]])
    sidecar = Path(sidecar_name(str(path)))
    facts = json.loads(sidecar.read_text())
    for content, message in [
        ({}, f"{sidecar}: not the sidecar of a token file: KeyError"),
        ({**facts, "sha256": []}, f"{path}: corrupted between byte 0 and byte 8"),
        ({**facts, "dtype": "uint32"}, f"{path}: ends early"),
    ]:
        sidecar.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            open_stream(path)
    sidecar.write_text('{"dty')
    with pytest.raises(ValueError, match=rf"{sidecar}: not the sidecar"):
        open_stream(path)


def test_the_config_and_the_sidecar_must_agree(tmp_path: Path):
    path = write(tmp_path / "x.bin", [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"dtype is 'uint16' by its sidecar, but 'uint32' is configured"):
        open_stream(path, dtype="uint32")
    with pytest.raises(ValueError, match=r"eos_id is 999 by its sidecar, but 5 is configured"):
        open_stream(path, eos_id=5)
    other = NumberTokenizer(eos_id=4)
    with pytest.raises(ValueError, match=r"eos_id is 999 by its sidecar, but 4 is configured"):
        TokenMemmap(path=str(path)).open(other, FileHashes())
    other.eos_id, other.digest = EOS, "u" * 64
    with pytest.raises(ValueError, match=r"tokenizer is 'ttt.*but 'uuu.*configure the tokenizer.json"):
        TokenMemmap(path=str(path)).open(other, FileHashes())
    write(tmp_path / "x2.bin", [[1]], eos_id=4)
    with pytest.raises(ValueError, match=r"x.bin has eos_id=999, .*x2.bin eos_id=4"):
        open_stream(tmp_path / "x*.bin")
