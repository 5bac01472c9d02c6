"""Token files: a headerless `.bin` of uint16 or uint32 token ids, as nanoGPT writes them, and what stands beside it.

    x.bin             the tokens, little-endian
    x.json            sidecar: counts, dtype, tokenizer, sha256 of each block of 4 MiB; written last
    x.documents.npy   int64: where each document begins (the index of the separator that opens it)

In files that we write each document is `eos_id` followed by its tokens: the separator opens the document. A `.bin` that
comes without a sidecar is read too; then dtype and separator are the reader's to know.
May import: framework.data.storage, numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from framework.data.storage import BLOCK_BYTES, DataFile, FileHashes

FORMAT = 1
TokenDType = Literal["uint16", "uint32"]


def dtype_for(vocab_size: int) -> TokenDType:
    """The narrowest of the two dtypes that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def sidecar_name(name: str) -> str:
    """x.bin -> x.json"""
    return f"{name.removesuffix('.bin')}.json"


def documents_name(name: str) -> str:
    """x.bin -> x.documents.npy"""
    return f"{name.removesuffix('.bin')}.documents.npy"


class TokenWriter:
    """Writes one token file with its sidecar and document index, in a folder that the caller renames when all is there.

    Args:
        path: the `.bin` to write.
        vocab_size: decides the dtype; ids must be below it.
        eos_id: the separator that opens each document.
        tokenizer: digest of the tokenizer, None where unknown.
    """

    def __init__(self, path: Path, *, vocab_size: int, eos_id: int, tokenizer: str | None):
        self.path = path
        self.num_tokens = 0
        self.num_bytes = 0
        self._dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        self._facts = {"vocab_size": vocab_size, "eos_id": eos_id, "tokenizer": tokenizer}
        self._starts: list[int] = []
        self._blocks: list[str] = []
        self._pending = bytearray()  # less than a block
        self._stream: BinaryIO = open(path, "wb")  # noqa: SIM115  (closed by `finish` or `close`)

    def add(self, tokens: np.ndarray, num_bytes: int) -> None:
        """Appends one document: the separator, then `tokens` (integers [n]); `num_bytes` is its length as UTF-8."""
        assert len(tokens)
        assert int(tokens.max()) < self._facts["vocab_size"]
        document = np.empty(len(tokens) + 1, self._dtype)
        document[0] = self._facts["eos_id"]
        document[1:] = tokens
        self._starts.append(self.num_tokens)
        self.num_tokens += len(document)
        self.num_bytes += num_bytes
        self._pending += document.tobytes()
        while len(self._pending) >= BLOCK_BYTES:
            self._write(bytes(self._pending[:BLOCK_BYTES]))
            del self._pending[:BLOCK_BYTES]

    def _write(self, block: bytes) -> None:
        self._blocks.append(hashlib.sha256(block).hexdigest())
        self._stream.write(block)

    def finish(self) -> None:
        """Completes the file, then its index, then its sidecar; all are on the disk when this returns."""
        if self._pending:
            self._write(bytes(self._pending))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        starts = np.asarray(self._starts, np.int64)
        np.save(documents_name(str(self.path)), starts)
        facts = {
            "format": FORMAT, "dtype": self._dtype.name, "num_tokens": self.num_tokens, "num_documents": len(starts),
            "num_bytes": self.num_bytes, **self._facts,
            "documents_sha256": hashlib.sha256(starts.tobytes()).hexdigest(),
            "sha256": self._blocks,
        }  # fmt: skip
        with open(sidecar_name(str(self.path)), "w") as stream:
            json.dump(facts, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Closes the stream of a file that will not be finished."""
        self._stream.close()


class TokenShard:
    """One token file, open for reading.

    Args:
        file: the `.bin`.
        dtype: None takes the sidecar's, or uint16 without one.
        eos_id: None takes the sidecar's; without one the file has no known separator.
        vocab_size: every id must be below it.
        tokenizer: digest of the tokenizer that must have written the file; None where there is none to compare.
        verify: read the whole file once (per size and time of change, see FileHashes): each block's sha256 against the
            sidecar's, each id against `vocab_size`. Otherwise only the size is checked, and ids as they are read.

    Raises:
        ValueError: the file and its sidecar disagree, naming the file and the offset; or an id is out of range.
    """

    def __init__(
        self,
        file: DataFile,
        *,
        dtype: TokenDType | None,
        eos_id: int | None,
        vocab_size: int,
        tokenizer: str | None,
        verify: bool,
        hashes: FileHashes,
    ):
        self.file = file
        self.vocab_size = vocab_size
        self.sidecar = self._read_sidecar()
        self._dtype = np.dtype(self._agreed("dtype", dtype) or "uint16").newbyteorder("<")
        self.eos_id: int | None = self._agreed("eos_id", eos_id)
        self._check_tokenizer(tokenizer)
        self.num_tokens = self._count_tokens()
        self.digest = self._verify(hashes) if verify else self._trusted_digest()

    @property
    def num_documents(self) -> int | None:
        return self.sidecar.get("num_documents")

    @property
    def num_bytes(self) -> int | None:
        """Bytes of UTF-8 text that the tokens stand for."""
        return self.sidecar.get("num_bytes")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int32[stop - start].

        Raises:
            ValueError: the file ends before `stop` or holds an id that is out of range, naming shard and offset.
        """
        size = self._dtype.itemsize
        data = self.file.read(start * size, stop * size)
        if len(data) != (stop - start) * size:
            raise ValueError(
                f"{self.file}: ends at byte {start * size + len(data)}, but it held {self.num_tokens * size} bytes "
                "when it was opened: it was truncated meanwhile"
            )
        tokens = np.frombuffer(data, self._dtype).astype(np.int64 if size > 2 else np.int32)
        self._check_range(tokens, start)
        return tokens.astype(np.int32, copy=False)

    def document_starts(self) -> np.ndarray:
        """int64[num_documents]: where each document begins.

        Raises:
            ValueError: there is no index, or it is not the one that was written with the tokens.
        """
        name = documents_name(self.file.path)
        index = DataFile(self.file.fs, name)
        if not self.file.fs.exists(name):
            raise ValueError(f"{self.file}: no document index beside it ({index})")
        with index.open() as stream:
            starts = np.load(stream, allow_pickle=False)
        if hashlib.sha256(starts.tobytes()).hexdigest() != self.sidecar.get("documents_sha256"):
            raise ValueError(f"{index}: does not match its sidecar {sidecar_name(self.file.name)}")
        return starts

    def _read_sidecar(self) -> dict[str, Any]:
        file = DataFile(self.file.fs, sidecar_name(self.file.path))
        if file.path == self.file.path or not file.fs.exists(file.path):
            return {}
        try:
            facts = json.loads(file.read(0, file.size()))
            known = facts["format"]
            missing = {"dtype", "num_tokens", "num_documents", "num_bytes", "sha256"} - set(facts)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}: not the sidecar of a token file: {error!r}") from error
        if known != FORMAT or missing:
            raise ValueError(
                f"{file}: expected a sidecar of format {FORMAT}, given format {known}, missing {sorted(missing)}"
            )
        blocks = -(-facts["num_tokens"] * np.dtype(facts["dtype"]).itemsize // BLOCK_BYTES)
        if len(facts["sha256"]) != blocks:
            raise ValueError(f"{file}: expected {blocks} block hashes, given {len(facts['sha256'])}")
        return facts

    def _agreed(self, key: str, asked: Any) -> Any:
        recorded = self.sidecar.get(key)
        if asked is not None and recorded is not None and asked != recorded:
            raise ValueError(f"{self.file}: {key} is {recorded!r} by its sidecar, but {asked!r} is configured")
        return recorded if asked is None else asked

    def _check_tokenizer(self, tokenizer: str | None) -> None:
        recorded = self.sidecar.get("tokenizer")
        if tokenizer is not None and recorded is not None and tokenizer != recorded:
            raise ValueError(
                f"{self.file}: tokenized with another tokenizer (sha256 {recorded[:12]}...) than the configured one "
                f"({tokenizer[:12]}...); point data.tokenizer.path to the tokenizer.json it was prepared with"
            )

    def _count_tokens(self) -> int:
        size, item = self.file.size(), self._dtype.itemsize
        expected = self.sidecar.get("num_tokens")
        if expected is not None and size != expected * item:
            verb = "ends early" if size < expected * item else "goes on"
            raise ValueError(
                f"{self.file}: {verb} at byte {min(size, expected * item)} (token {min(size // item, expected)}): it "
                f"holds {size} bytes, its sidecar says {expected * item}"
            )
        if size == 0:
            raise ValueError(f"{self.file}: empty, expected {self._dtype.name} tokens")
        if size % item:
            raise ValueError(
                f"{self.file}: {size} bytes is not a whole number of {self._dtype.name} tokens ({item} bytes each); "
                f"the last token, at byte {size - size % item}, is cut off"
            )
        return size // item

    def _verify(self, hashes: FileHashes) -> str:
        facts = hashes.recall(self.file)
        if facts is None or "tokens" not in facts or facts["tokens"]["max"][self._dtype.name] >= self.vocab_size:
            state = self.file.state()
            facts = {"tokens": self._scan()}
            hashes.remember(self.file, state, facts)
        blocks = facts["tokens"]["blocks"]
        for number, (found, expected) in enumerate(zip(blocks, self.sidecar.get("sha256", blocks), strict=True)):
            if found != expected:
                first, last = (
                    number * BLOCK_BYTES,
                    min((number + 1) * BLOCK_BYTES, self.num_tokens * self._dtype.itemsize),
                )
                raise ValueError(
                    f"{self.file}: garbled between byte {first} and byte {last}: sha256 of that block is "
                    f"{found[:12]}..., its sidecar says {expected[:12]}..."
                )
        return hashlib.sha256("".join(blocks).encode()).hexdigest()

    def _scan(self) -> dict[str, Any]:
        blocks: list[str] = []
        largest = 0
        for number, block in enumerate(self.file.blocks()):
            blocks.append(hashlib.sha256(block).hexdigest())
            if len(block) % self._dtype.itemsize == 0:  # else it shrank while being read: the sidecar's hash will tell
                tokens = np.frombuffer(block, self._dtype)
                largest = max(largest, int(tokens.max()))
                # A damaged block is reported as damaged, not as the odd id that the damage happened to make.
                if blocks[-1] == self.sidecar.get("sha256", blocks)[number]:
                    self._check_range(tokens, number * (BLOCK_BYTES // self._dtype.itemsize))
        return {"blocks": blocks, "max": {self._dtype.name: largest}}

    def _check_range(self, tokens: np.ndarray, start: int) -> None:
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            at = start + int(np.argmax(tokens >= self.vocab_size))
            raise ValueError(
                f"{self.file}: token {int(tokens[at - start])} at index {at} (byte {at * self._dtype.itemsize}) is out "
                f"of range: the vocabulary has {self.vocab_size} ids (0 to {self.vocab_size - 1}); wrong dtype, "
                "tokenizer or vocab_size?"
            )

    def _trusted_digest(self) -> str:
        self.file.read(0, 1)  # a file that may not be read must be found out before anything is compiled
        known = self.sidecar.get("sha256")
        facts = known or [self.file.name.rsplit("/", 1)[-1], str(self.num_tokens), self._dtype.name]
        return hashlib.sha256("".join(facts).encode()).hexdigest()


class TokenStream:
    """Shards read as one sequence of tokens.

    Args:
        shards: in reading order; all of one separator.
    """

    def __init__(self, shards: Sequence[TokenShard]):
        separators = {shard.eos_id for shard in shards}
        if len(separators) > 1:
            a, b = shards[0], next(shard for shard in shards if shard.eos_id != shards[0].eos_id)
            raise ValueError(
                f"shards with different separators: {a.file} has eos_id={a.eos_id}, {b.file} eos_id={b.eos_id}"
            )
        self.shards = list(shards)
        self.eos_id = shards[0].eos_id
        self._ends = np.cumsum([shard.num_tokens for shard in shards])
        self.num_tokens = int(self._ends[-1])
        self.digest = hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int32[stop - start]; a window may span shards. Errors as `TokenShard.read`."""
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        pieces = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            base = int(self._ends[number]) - self.shards[number].num_tokens
            end = min(stop, int(self._ends[number]))
            pieces.append(self.shards[number].read(start - base, end - base))
            start, number = end, number + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.zeros(0, np.int32)])

    @property
    def num_documents(self) -> int | None:
        """None where a shard has no sidecar."""
        return _total([shard.num_documents for shard in self.shards])

    @property
    def num_bytes(self) -> int | None:
        """Bytes of UTF-8 text that the tokens stand for; None where a shard has no sidecar."""
        return _total([shard.num_bytes for shard in self.shards])

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, without its separator, as int32[n]."""
        for shard in self.shards:
            count = shard.num_documents
            if count is None or index >= count:
                if count is None:
                    shard.document_starts()  # raises: no index
                index -= count or 0
                continue
            starts = shard.document_starts()
            stop = int(starts[index + 1]) if index + 1 < count else shard.num_tokens
            return shard.read(int(starts[index]) + 1, stop)
        raise IndexError(f"document index out of range: {index} past the last of {self.num_documents}")


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
