"""Token files: a headerless `.bin` of uint16 or uint32 token ids, as nanoGPT writes them, and a sidecar beside it.

    x.bin     the tokens, little-endian; each document is opened by the separator, `eos_id`
    x.json    counts, dtype, separator, tokenizer, sha256 of each block of 4 MiB

A `.bin` without a sidecar is read too; then dtype and separator are the reader's to know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from framework.data.files import BLOCK_BYTES, DataFile, FileHashes
from framework.data.tokenizers import Tokenizer

TokenDType = Literal["uint16", "uint32"]
FACTS = ("dtype", "num_tokens", "num_documents", "num_bytes", "eos_id", "tokenizer", "sha256")  # of a sidecar


def sidecar_name(name: str) -> str:
    """x.bin -> x.json"""
    return f"{name.removesuffix('.bin')}.json"


def scan(file: DataFile, dtype: str) -> list[list[Any]]:
    """[sha256, largest id] of each block of the file."""
    size = np.dtype(dtype).itemsize
    ids = ((block, np.frombuffer(block[: len(block) // size * size], dtype)) for block in file.chunks(BLOCK_BYTES))
    return [[hashlib.sha256(block).hexdigest(), int(tokens.max(initial=0))] for block, tokens in ids]


class TokenShard:
    """One token file, open for reading. ValueError, naming file and offset: it disagrees with its sidecar, with what
    the source asks for (dtype, eos_id, verify) or with the tokenizer (its digest, separator, vocab_size)."""

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
        self.file, self.vocab_size = file, tokenizer.vocab_size
        self._sidecar = self._read_sidecar()
        self._dtype = np.dtype(self._agreed("dtype", dtype) or "uint16").newbyteorder("<")
        self.eos_id: int | None = self._agreed("eos_id", tokenizer.separator_id if eos_id is None else eos_id)
        self._agreed("tokenizer", tokenizer.digest)
        self.num_tokens = self._count_tokens()
        self.num_documents: int | None = self._sidecar.get("num_documents")
        self.num_bytes: int | None = self._sidecar.get("num_bytes")  # of UTF-8 text
        known: list[str] = self._sidecar.get("sha256", [file.name.rpartition("/")[2], str(self.num_tokens)])
        self.digest = hashlib.sha256("".join(self._verify(hashes) if verify else known).encode()).hexdigest()
        self.read(0, 1)  # a file that may not be read must be found out before anything is compiled

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int32[stop - start]; ValueError: the file ends early, an id is out of range."""
        size = self._dtype.itemsize
        data = self.file.read(start * size, stop * size)
        if len(data) != (stop - start) * size:
            raise ValueError(
                f"{self.file}: ends at byte {start * size + len(data)}, but it held {self.num_tokens * size} bytes "
                "when it was opened: it was truncated meanwhile"
            )
        tokens = np.frombuffer(data, self._dtype)
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            at = int(np.argmax(tokens >= self.vocab_size))
            raise ValueError(
                f"{self.file}: token {tokens[at]} at index {start + at} (byte {(start + at) * size}) is out of range: "
                f"the vocabulary has {self.vocab_size} ids; wrong dtype, tokenizer or vocab_size?"
            )
        return tokens.astype(np.int32)

    def _read_sidecar(self) -> dict[str, Any]:
        file = DataFile(self.file.fs, sidecar_name(self.file.path))
        if file.path == self.file.path or not file.fs.exists(file.path):
            return {}
        try:
            facts = json.loads(file.read())
            return {name: facts[name] for name in FACTS}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}: not the sidecar of a token file: {error!r}") from error

    def _agreed(self, key: str, asked: Any) -> Any:
        recorded = self._sidecar.get(key)
        if asked is not None and recorded is not None and asked != recorded:
            hint = "; configure the tokenizer.json that it was prepared with" if key == "tokenizer" else ""
            raise ValueError(f"{self.file}: {key} is {recorded!r} by its sidecar, but {asked!r} is configured{hint}")
        return recorded if asked is None else asked

    def _count_tokens(self) -> int:
        size, item, name = self.file.size(), self._dtype.itemsize, self._dtype.name
        expected = self._sidecar.get("num_tokens", size // item) * item
        if size != expected:
            verb = "ends early" if size < expected else "goes on" if self._sidecar else "ends within a token"
            where = f"at byte {min(size, expected)} (token {min(size, expected) // item})"
            raise ValueError(
                f"{self.file}: {verb} {where}: it holds {size} bytes, expected {expected} of {name} tokens"
            )
        if size == 0:
            raise ValueError(f"{self.file}: empty, expected {name} tokens")
        return size // item

    def _verify(self, hashes: FileHashes) -> list[str]:
        """The sha256 of each block."""
        blocks = hashes.of(self.file, f"tokens {self._dtype.name}", lambda: scan(self.file, self._dtype.str))
        found, item = [digest for digest, _ in blocks], self._dtype.itemsize
        for number, (digest, largest) in enumerate(blocks):
            first, last = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.num_tokens * item)
            # Damage is reported as damage, not as the odd id that it happened to make.
            if [digest] != self._sidecar.get("sha256", found)[number : number + 1]:
                raise ValueError(f"{self.file}: garbled between byte {first} and byte {last}: not the sidecar's sha256")
            if largest >= self.vocab_size:
                self.read(first // item, last // item)  # raises: names the id and its place
        return found


class TokenStream:
    """Shards, in reading order and all of one separator, read as one sequence of tokens."""

    def __init__(self, shards: Sequence[TokenShard]):
        for shard in shards:
            if shard.eos_id != shards[0].eos_id:
                a, b = f"{shards[0].file} has eos_id={shards[0].eos_id}", f"{shard.file} eos_id={shard.eos_id}"
                raise ValueError(f"shards with different separators: {a}, {b}")
        self.shards, self.eos_id = list(shards), shards[0].eos_id
        self._ends = np.cumsum([shard.num_tokens for shard in shards])
        self.num_tokens = int(self._ends[-1])
        documents, sizes = [s.num_documents for s in shards], [s.num_bytes for s in shards]
        self.num_documents = None if None in documents else sum(filter(None, documents))  # None: no sidecar
        self.num_bytes = None if None in sizes else sum(filter(None, sizes))
        self.digest = hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int32[stop - start]; a window may span shards. Errors as `TokenShard.read`."""
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        pieces = [np.zeros(0, np.int32)]
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            base = int(self._ends[number]) - self.shards[number].num_tokens
            end = min(stop, int(self._ends[number]))
            pieces.append(self.shards[number].read(start - base, end - base))
            start, number = end, number + 1
        return np.concatenate(pieces)
