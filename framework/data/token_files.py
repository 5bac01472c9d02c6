"""Token files: a headerless `.bin` of uint16 or uint32 token ids, as written by nanoGPT, with a sidecar next to it.

    x.bin     the tokens, little-endian; each document starts with the separator, `eos_id`
    x.json    counts, dtype, separator, tokenizer, sha256 of each block of 4 MiB

A `.bin` without a sidecar can be read too; then the reader must know the dtype and the separator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, get_args

import numpy as np

from plimsoll.framework.data.files import BLOCK_BYTES, DataFile, FileHashes
from plimsoll.framework.data.tokenizers import Tokenizer
from plimsoll.framework.files.text_files import parse_json

TokenDType = Literal["uint16", "uint32"]


@dataclass(frozen=True)
class Sidecar:
    """Contents of a sidecar; its keys are written in this order.

    Attributes:
        dtype: dtype of the tokens.
        num_tokens: number of tokens, separators included.
        num_documents: number of documents.
        num_bytes: number of UTF-8 bytes of text that the tokens represent.
        eos_id: the separator.
        tokenizer: the tokenizer's digest.
        sha256: hash of each block of BLOCK_BYTES bytes.
    """

    dtype: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    eos_id: int | None
    tokenizer: str | None
    sha256: list[str]


_FIELD_TYPES: dict[str, type | UnionType] = {
    "dtype": str,
    "num_tokens": int,
    "num_documents": int,
    "num_bytes": int,
    "eos_id": int | None,
    "tokenizer": str | None,
    "sha256": list,
}


def sidecar_name(name: str) -> str:
    """Returns the name of a token file's sidecar: x.bin -> x.json."""
    return f"{name.removesuffix('.bin')}.json"


def scan(file: DataFile, dtype: str) -> list[tuple[str, int]]:
    """Returns (sha256, largest id) of each block of the file."""
    token_bytes = np.dtype(dtype).itemsize
    blocks = []
    for block in file.chunks(BLOCK_BYTES):
        # A file may end in the middle of a token, which numpy would reject.
        num_tokens = len(block) // token_bytes
        tokens = np.frombuffer(block[: num_tokens * token_bytes], dtype)
        digest = hashlib.sha256(block).hexdigest()
        blocks.append((digest, int(tokens.max(initial=0))))
    return blocks


class TokenShard:
    """One token file, open for reading.

    Args:
        file: the `.bin`.
        tokenizer: the config's tokenizer; its digest, separator and vocab_size must match the file.
        hashes: verification results from earlier runs.
        dtype: dtype that the source requires; None takes the sidecar's, or uint16.
        eos_id: separator that the source requires; None takes the tokenizer's, or the sidecar's.
        verify: whether to check hashes and ids now.

    Raises:
        ValueError: the file disagrees with its sidecar, with the source or with the tokenizer. The message names the
            file and the offset.
    """

    def __init__(
        self,
        file: DataFile,
        tokenizer: Tokenizer,
        hashes: FileHashes,
        *,
        dtype: TokenDType | None,
        eos_id: int | None,
        verify: bool,
    ):
        self.file = file
        self.vocab_size = tokenizer.vocab_size
        self._sidecar = self._read_sidecar()
        dtype_name = self._resolve_value("dtype", dtype) or "uint16"
        self._dtype = np.dtype(dtype_name).newbyteorder("<")
        if eos_id is None:
            eos_id = tokenizer.separator_id
        self.eos_id: int | None = self._resolve_value("eos_id", eos_id)
        self._resolve_value("tokenizer", tokenizer.digest)
        self.num_tokens = self._count_tokens()
        self.num_documents = self._sidecar.num_documents if self._sidecar else None
        # Bytes of UTF-8 text that the tokens represent.
        self.num_bytes = self._sidecar.num_bytes if self._sidecar else None
        if verify:
            digests = self._verify(hashes)
        elif self._sidecar:
            digests = self._sidecar.sha256
        else:
            # Without a sidecar and without reading the file, name and length identify the content.
            digests = [file.name.rpartition("/")[2], str(self.num_tokens)]
        self.digest = hashlib.sha256("".join(digests).encode()).hexdigest()
        # An unreadable file must raise an error before anything is compiled.
        self.read(0, 1)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) as int32[stop - start].

        Raises:
            ValueError: the file ends early, or an id is out of range.
        """
        token_bytes = self._dtype.itemsize
        data = self.file.read(start * token_bytes, stop * token_bytes)
        if len(data) != (stop - start) * token_bytes:
            end_byte = start * token_bytes + len(data)
            opened_bytes = self.num_tokens * token_bytes
            raise ValueError(
                f"{self.file}: ends at byte {end_byte}, but it had {opened_bytes} bytes "
                "when it was opened: it was truncated meanwhile"
            )
        tokens = np.frombuffer(data, self._dtype)
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            offset = int(np.argmax(tokens >= self.vocab_size))
            index = start + offset
            raise ValueError(
                f"{self.file}: token {tokens[offset]} at index {index} "
                f"(byte {index * token_bytes}) is out of range: "
                f"the vocabulary has {self.vocab_size} ids; wrong dtype, tokenizer or vocab_size?"
            )
        return tokens.astype(np.int32)

    def _read_sidecar(self) -> Sidecar | None:
        """Returns the sidecar; None if there is none, as with nanoGPT's files."""
        file = DataFile(self.file.fs, sidecar_name(self.file.path))
        # A token file may itself be named x.json; it is not its own sidecar.
        if file.path == self.file.path or not file.fs.exists(file.path):
            return None
        try:
            parsed = parse_json(file.read())
            facts = {name: parsed[name] for name in _FIELD_TYPES}
            for name, value in facts.items():
                if not isinstance(value, _FIELD_TYPES[name]) or isinstance(value, bool):
                    raise TypeError(f"{name} = {value!r}")
            if facts["dtype"] not in get_args(TokenDType):
                raise ValueError(f"dtype = {facts['dtype']!r}")
            return Sidecar(**facts)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}: not the sidecar of a token file: {error!r}") from error

    def _resolve_value(self, key: str, configured: Any) -> Any:
        """Returns the configured value, or the sidecar's if that is None.

        Raises:
            ValueError: both are set, and differ.
        """
        recorded = getattr(self._sidecar, key, None)
        if configured is None:
            return recorded
        if recorded is not None and configured != recorded:
            hint = ""
            if key == "tokenizer":
                hint = "; configure the tokenizer.json that it was prepared with"
            raise ValueError(
                f"{self.file}: {key} is {recorded!r} by its sidecar, but {configured!r} is configured{hint}"
            )
        return configured

    def _count_tokens(self) -> int:
        """Returns the number of tokens from the file's size, which must match the sidecar, or be whole tokens."""
        size = self.file.size()
        token_bytes = self._dtype.itemsize
        dtype_name = self._dtype.name
        num_tokens = self._sidecar.num_tokens if self._sidecar else size // token_bytes
        expected_size = num_tokens * token_bytes
        if size != expected_size:
            if size < expected_size:
                verb = "ends early"
            elif self._sidecar:
                verb = "does not end"
            else:
                verb = "ends within a token"
            end_byte = min(size, expected_size)
            raise ValueError(
                f"{self.file}: {verb} at byte {end_byte} (token {end_byte // token_bytes}): "
                f"it has {size} bytes, expected {expected_size} of {dtype_name} tokens"
            )
        if size == 0:
            raise ValueError(f"{self.file}: empty, expected {dtype_name} tokens")
        return size // token_bytes

    def _verify(self, hashes: FileHashes) -> list[str]:
        """Checks every block against the sidecar and the vocabulary, and returns the sha256 of each block."""
        # The dtype is part of the key: with another dtype, the same bytes have another largest id.
        kind = f"tokens {self._dtype.name}"
        blocks = hashes.get_or_compute(self.file, kind, lambda: scan(self.file, self._dtype.str))
        digests = [digest for digest, _ in blocks]
        recorded_digests = self._sidecar.sha256 if self._sidecar else digests
        token_bytes = self._dtype.itemsize
        for number, (digest, largest_id) in enumerate(blocks):
            first_byte = number * BLOCK_BYTES
            last_byte = min(first_byte + BLOCK_BYTES, self.num_tokens * token_bytes)
            # Check the hash first, so that damage is reported as damage and not as an invalid id. The slice is empty,
            # and so unequal, if the sidecar lists too few blocks.
            if [digest] != recorded_digests[number : number + 1]:
                raise ValueError(
                    f"{self.file}: corrupted between byte {first_byte} and byte {last_byte}: the sha256 differs from "
                    "the sidecar's"
                )
            if largest_id >= self.vocab_size:
                # Reading raises the error, which names the id and its position.
                self.read(first_byte // token_bytes, last_byte // token_bytes)
        return digests


class TokenStream:
    """Several shards that are read as one sequence of tokens.

    Args:
        shards: shards in reading order, all with the same separator.

    Raises:
        ValueError: two shards have different separators. The message names both.
    """

    def __init__(self, shards: Sequence[TokenShard]):
        first_shard = shards[0]
        for shard in shards:
            if shard.eos_id != first_shard.eos_id:
                raise ValueError(
                    "shards with different separators: "
                    f"{first_shard.file} has eos_id={first_shard.eos_id}, "
                    f"{shard.file} eos_id={shard.eos_id}"
                )
        self.shards = list(shards)
        self.eos_id = first_shard.eos_id
        # The stream's tokens [_ends[i - 1], _ends[i]) belong to shard i.
        self._ends = np.cumsum([shard.num_tokens for shard in shards])
        self.num_tokens = int(self._ends[-1])
        self.num_documents = _total([shard.num_documents for shard in shards])
        self.num_bytes = _total([shard.num_bytes for shard in shards])
        digests = "".join(shard.digest for shard in shards)
        self.digest = hashlib.sha256(digests.encode()).hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) as int32[stop - start]; a window may span shards.

        Raises the errors of `TokenShard.read`.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        # The empty array ensures that an empty range returns an int32 array too.
        parts = [np.zeros(0, np.int32)]
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            shard = self.shards[number]
            shard_end = int(self._ends[number])
            shard_start = shard_end - shard.num_tokens
            end = min(stop, shard_end)
            parts.append(shard.read(start - shard_start, end - shard_start))
            start = end
            number += 1
        return np.concatenate(parts)


class TokenRange(TokenStream):
    """The tokens [start, stop) of a stream, as a stream of its own. Its documents and text bytes are not counted.

    Args:
        stream: the stream that contains the range.
        start: index of the first token.
        stop: index after the last token.
    """

    def __init__(self, stream: TokenStream, start: int, stop: int):
        self._stream = stream
        self._start = start
        self.shards = stream.shards
        self.eos_id = stream.eos_id
        self.num_tokens = stop - start
        self.num_documents = None
        self.num_bytes = None
        self.digest = hashlib.sha256(f"{stream.digest} {start} {stop}".encode()).hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        return self._stream.read(self._start + start, self._start + stop)


def _total(counts: Sequence[int | None]) -> int | None:
    """Returns the sum, or None if a count is missing because a shard has no sidecar."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total
