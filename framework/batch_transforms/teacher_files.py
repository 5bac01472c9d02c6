"""Stored teacher outputs for the rows of a dataset: `plimsoll score` writes the folder, `Teacher` reads it.

    teacher.json    the teacher and data of the files (`TeacherFacts`), and their number of rows N
    rows.bin        uint8[N, 16]              the key of each row, see `row_key`
    ids.bin         uint16 or 32[N, S, K]     the top K tokens of each position, most likely first
    log_probs.bin   float16[N, S, K]          their log-probabilities, in nats
    tails.bin       float32[N, S]             the log of the total probability of all other tokens, at least -50
    checksums.bin   uint32[N]                 CRC-32 of a row's bytes in the four files above, in this order

All files are little-endian arrays in C order without a header. A row takes S * (K * 4 + 4) + 20 bytes for a vocabulary
of at most 65536 ids, otherwise S * (K * 6 + 4) + 20. float16 stores a log-probability to one part in 2048.

Rows are looked up by content, so the order of the data, its seed and the batch size may change. The row count in
teacher.json is written last: anything after it, left by a kill, is truncated by the next writer. A row's checksum is
verified on every read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from plimsoll.framework.data.packing import Batch
from plimsoll.framework.files import durable
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json, writing

MANIFEST = "teacher.json"
_FORMAT = 2
_KEY_BYTES = 16


@dataclass(frozen=True)
class TeacherOutputs:
    """The stored arrays of N rows, with the shapes and dtypes of the files; see above."""

    keys: np.ndarray
    ids: np.ndarray
    log_probs: np.ndarray
    tails: np.ndarray

    @property
    def arrays(self) -> list[np.ndarray]:
        """The arrays, in the order of the files."""
        return [self.keys, self.ids, self.log_probs, self.tails]


@dataclass(frozen=True)
class TeacherFacts:
    """The teacher and data that the files of a folder belong to.

    Attributes:
        weights: sha256 of the teacher's weights.
        tokenizer: digest of the tokenizer shared by teacher and data; None if token ids do not stand for text.
        vocab_size: the teacher's distribution covers the ids below this.
        seq_len: sequence length S.
        top_k: K, the number of stored tokens per position.
        data: digest of each source by name, see `teacher_scoring.hash_sources`.
    """

    weights: str
    tokenizer: str | None
    vocab_size: int
    seq_len: int
    top_k: int
    data: dict[str, str]

    @property
    def row_bytes(self) -> int:
        """The bytes per row in the files."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in _row_types(self))

    def empty(self, count: int) -> TeacherOutputs:
        """Return zeroed arrays for `count` rows, with the shapes and dtypes of the files."""
        shape = (count, self.seq_len, self.top_k)
        ids_dtype = "<u2" if self.vocab_size <= 1 << 16 else "<u4"
        return TeacherOutputs(
            keys=np.zeros((count, _KEY_BYTES), np.uint8),
            ids=np.zeros(shape, ids_dtype),
            log_probs=np.zeros(shape, "<f2"),
            tails=np.zeros(shape[:2], "<f4"),
        )


def row_key(row: Batch) -> bytes:
    """Return the key of a row: the 16-byte blake2b hash of its tokens, int32[S], and its segments, int32[S], if any.

    The outputs of a causal model at each position depend on nothing else.
    """
    key = hashlib.blake2b(digest_size=_KEY_BYTES)
    for name in ("tokens", "segments"):
        if name in row:
            key.update(np.ascontiguousarray(row[name], "<i4").tobytes())
    return key.digest()


def _files(folder: Path) -> list[Path]:
    """Return the paths of a folder's files, in the order of `_row_types`."""
    return [folder / f"{name}.bin" for name in ("rows", "ids", "log_probs", "tails", "checksums")]


def _row_types(facts: TeacherFacts) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Return the dtype and the shape of one row in each file."""
    return [*((array.dtype, array.shape[1:]) for array in facts.empty(0).arrays), (np.dtype("<u4"), ())]


def _checksums(rows: TeacherOutputs) -> np.ndarray:
    """Compute the CRC-32 of each row, uint32[N]."""
    checksums = np.zeros(len(rows.keys), "<u4")
    for number in range(len(checksums)):
        checksum = 0
        for array in rows.arrays:
            checksum = zlib.crc32(array[number].tobytes(), checksum)
        checksums[number] = checksum
    return checksums


def read_manifest(folder: Path) -> tuple[TeacherFacts, int]:
    """Read (facts, number of rows) from a folder.

    Raises:
        FileNotFoundError, ValueError: there is no manifest, or it is invalid or has a different format.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no {MANIFEST}: expected a folder that `plimsoll score` has written")
    try:
        manifest = parse_json(path.read_text())
        stored_format = manifest.pop("format")
        num_rows = manifest.pop("rows")
        if stored_format == _FORMAT:
            facts = TeacherFacts(**manifest)
            texts = [facts.weights, *facts.data, *facts.data.values()]
            numbers = [facts.vocab_size, facts.seq_len, facts.top_k]
            are_texts = all(isinstance(text, str) for text in texts) and isinstance(facts.tokenizer, str | None)
            # type() instead of isinstance(): True is an int.
            if not are_texts or not all(type(number) is int and number > 0 for number in numbers):
                raise ValueError(f"{facts}")
            if type(num_rows) is not int or num_rows < 0:
                raise ValueError(f"rows = {num_rows!r}")
            return facts, num_rows
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a valid file of `plimsoll score`: {error!r}") from None
    raise ValueError(
        f"{path} has format {stored_format}; this version reads format {_FORMAT}: "
        "run `plimsoll score` again, into a new folder"
    )


class TeacherRows:
    """The rows of a folder, open for reading; only 16 bytes per row and a few numbers are held in memory.

    Attributes:
        facts: the teacher and data that the rows belong to.
        number_by_key: the number of each row by its key, see `row_key`.

    Raises:
        FileNotFoundError, ValueError: the folder does not exist, or it is damaged. The message is one line.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.facts, self.num_rows = read_manifest(folder)
        arrays = []
        for path, (dtype, row_shape) in zip(_files(folder), _row_types(self.facts), strict=True):
            shape = (self.num_rows, *row_shape)
            num_bytes = math.prod(shape) * dtype.itemsize
            size = path.stat().st_size if path.exists() else 0
            if size < num_bytes:
                raise ValueError(f"{path} has {size:,} bytes; its {self.num_rows:,} rows take {num_bytes:,}")
            # An empty file cannot be mapped.
            arrays.append(np.memmap(path, dtype, "r", shape=shape) if self.num_rows else np.zeros(shape, dtype))
        *stored, self._checksums = arrays
        self._stored = TeacherOutputs(*stored)
        self.number_by_key = {key.tobytes(): number for number, key in enumerate(np.asarray(self._stored.keys))}

    def take(self, numbers: list[int]) -> TeacherOutputs:
        """Return copies of the rows with these numbers.

        Raises:
            ValueError: a row does not match its checksum.
        """
        rows = TeacherOutputs(*(np.asarray(array[numbers]) for array in self._stored.arrays))
        damaged = np.flatnonzero(_checksums(rows) != self._checksums[numbers])
        if damaged.size:
            raise ValueError(
                f"{self.folder} is damaged: row {numbers[damaged[0]]:,} does not match its checksum; "
                "remove the folder and run `plimsoll score` again"
            )
        return rows


class TeacherWriter:
    """Adds rows to a new folder, or to one with rows of the same teacher and data; one writer at a time.

    Args:
        folder: folder to write to; created if it does not exist.
        facts: the teacher and data that the rows belong to.

    Raises:
        ValueError: the folder holds rows of another teacher or other data, or another process is writing to it. The
            message is one line.
    """

    def __init__(self, folder: Path, facts: TeacherFacts):
        self.folder = folder
        self.facts = facts
        self.num_rows = 0
        if (folder / MANIFEST).exists():
            stored_facts, self.num_rows = read_manifest(folder)
            for field in dataclasses.fields(TeacherFacts):
                old = getattr(stored_facts, field.name)
                new = getattr(facts, field.name)
                if old != new:
                    raise ValueError(
                        f"{folder} holds the outputs of a teacher with different {field.name}: {_short(old)}, not "
                        f"{_short(new)}; expected an empty folder, or one with the same teacher and data"
                    )
        self._files: list[BinaryIO] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[TeacherWriter]:
        """Lock the folder for this process, and open the files truncated to the committed rows."""
        durable.make_folder(self.folder)
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(self.folder / ".lock", "w"))
            try:
                # The kernel releases this lock when the process ends, even after a kill.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self.folder}: another process is writing there") from None
            self._files = []
            for path, (dtype, row_shape) in zip(_files(self.folder), _row_types(self.facts), strict=True):
                file = stack.enter_context(open(path, "ab"))
                file.truncate(self.num_rows * math.prod(row_shape) * dtype.itemsize)
                self._files.append(file)
            # Write the manifest now, so that it exists even if no row is added.
            self.commit()
            yield self

    def append(self, rows: TeacherOutputs) -> None:
        """Append rows; they count from the next `commit` on."""
        *row_types, _ = _row_types(self.facts)
        arrays = []
        for array, (dtype, row_shape) in zip(rows.arrays, row_types, strict=True):
            assert array.shape[1:] == row_shape, (array.shape, row_shape)
            arrays.append(np.ascontiguousarray(array, dtype))
        checksums = _checksums(TeacherOutputs(*arrays))
        for file, array in zip(self._files, [*arrays, checksums], strict=True):
            with writing(file.name):
                file.write(array.tobytes())
        self.num_rows += len(rows.keys)

    def commit(self) -> None:
        """Make all rows so far durable: they count even after a kill at any moment."""
        for file in self._files:
            with writing(file.name):
                file.flush()
                os.fsync(file.fileno())
        # The manifest comes last, so it counts only rows that are on disk.
        write_json(self.folder / MANIFEST, {"format": _FORMAT, **dataclasses.asdict(self.facts), "rows": self.num_rows})


def _short(value: object) -> str:
    """Format a fact for a message; hashes are shortened to 12 characters."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items())
    return str(value)[:12]
