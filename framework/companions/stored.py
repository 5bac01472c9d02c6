"""Log-probabilities that were computed once of every row of the data, in files of the workdir.

    reference/reference.json    what they are of, how many rows of each set are done, and the checksum of these
    reference/train.f32         float32[rows, S] of a training source; of a validation set under its own name

Rows are done in order, a batch at a time, and the JSON file counts them after they are on the disk: a process that is
killed, or a power cut, loses the batches since, and the next start goes on there.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from framework.data.batches import RowSet
from framework.files import durable
from framework.files.texts import parse_json
from framework.files.workdir import write_json
from framework.terminal.phases import SHORT, phase

FOLDER = "reference"
_FACTS = "reference.json"
# What `StoredRows.difference` says of files that were cut, or are not there, beside a JSON file that is.
DAMAGED = "damaged"
# Rows are counted as done this often at most.
_SECONDS = 0.2
# Rows that are read at a time for their checksum.
_ROWS = 1024


class StoredRows:
    """The files of all sets; one process writes them.

    Args:
        folder: of the files.
        sets: of the data, by name.
        seq_len: S.
        weights: a checksum of the weights that the values are of.
    """

    def __init__(self, folder: Path, sets: Mapping[str, RowSet], seq_len: int, weights: str):
        self.folder = folder
        self._sets = sets
        self._seq_len = seq_len
        self._facts = {
            "weights": weights,
            "data": {name: [rows.digest, rows.num_rows, seq_len] for name, rows in sets.items()},
        }
        self._saved_at = 0.0
        self.done: dict[str, int] = dict.fromkeys(sets, 0)
        # Of the rows that are done, in the process that writes them.
        self._hashes = {name: hashlib.sha256() for name in sets}

    @property
    def difference(self) -> str | None:
        """What the files in the folder are of that is not the run's: "weights", "data"; None where nothing differs.

        "" stands for files that are not there, or cannot be read; `DAMAGED` for some of another length.
        """
        stored = self._read()
        if stored is None:
            return ""
        for name, facts in self._facts.items():
            if stored.get(name) != facts:
                return name
        for name in self._sets:
            file = self._file(name)
            if not file.exists() or file.stat().st_size != self._num_bytes(name):
                return DAMAGED
        return None

    @property
    def has_changed(self) -> bool:
        """Whether the rows that are done have other values than those that were written. It reads all of them."""
        stored = self._read()
        if stored is None:
            return False
        with phase("checking the stored reference", patience=SHORT):
            hashes = self._hash_files(stored["done"])
        return stored.get("sha256") != _hex_digests(hashes)

    def begin(self, *, anew: bool) -> None:
        """Makes the files ready to be written, those of an earlier start with what they have; `anew` drops that."""
        stored = None if anew else self._read()
        if stored is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            durable.make_folder(self.folder)
            self.done = dict.fromkeys(self._sets, 0)
            self._hashes = {name: hashlib.sha256() for name in self._sets}
            for name in self._sets:
                with open(self._file(name), "wb") as file:
                    # A file of zeros, whose blocks the disk has yet to give.
                    file.truncate(self._num_bytes(name))
            self._save()
        else:
            self.done = {name: stored["done"][name] for name in self._sets}
            self._hashes = self._hash_files(self.done)

    def open(self) -> dict[str, np.ndarray]:
        """The values of all sets, f32[rows, S], for reading."""
        stored = self._read()
        if stored is not None:
            self.done = stored["done"]
        return {name: self._values(name, "r") for name in self._sets}

    @property
    def is_complete(self) -> bool:
        """Whether all rows of all sets are done; known after `begin` or `open`."""
        return all(self.done[name] == rows.num_rows for name, rows in self._sets.items())

    def rows(self, name: str, first: int, count: int) -> np.ndarray:
        """The values of rows that are done, f32[count, S]."""
        return np.array(self._values(name, "r")[first : first + count])

    def write(self, name: str, first: int, values: np.ndarray) -> None:
        """Writes the rows of a set from `first` on, f32[n, S]; the rows before them are done."""
        num_rows = min(len(values), self._sets[name].num_rows - first)
        rows = np.ascontiguousarray(values[:num_rows], np.float32)
        stored = self._values(name, "r+")
        stored[first : first + num_rows] = rows
        self._hashes[name].update(rows.tobytes())
        self.done[name] = first + num_rows
        if self.is_complete or time.monotonic() - self._saved_at > _SECONDS:
            self._save()

    def _save(self) -> None:
        for name in self._sets:
            # This includes pages that were written through a memory map.
            durable.sync(self._file(name))
        facts = {**self._facts, "done": self.done, "sha256": _hex_digests(self._hashes)}
        write_json(self.folder / _FACTS, facts)
        self._saved_at = time.monotonic()

    def _read(self) -> dict[str, Any] | None:
        """The content of the JSON file; None where it is not there, or says nothing that could be used."""
        try:
            stored = parse_json((self.folder / _FACTS).read_text())
        except (FileNotFoundError, ValueError):
            return None
        done = stored.get("done") if isinstance(stored, dict) else None
        if not isinstance(done, dict):
            return None
        # An index beyond the set would be cut off by a slice, and a checksum of fewer rows could agree.
        is_valid = all(type(done.get(name)) is int and 0 <= done[name] <= s.num_rows for name, s in self._sets.items())
        return stored if is_valid else None

    def _hash_files(self, done: Mapping[str, int]) -> dict[str, Any]:
        """The hash of the first rows of each file, so many as are done, by the name of the set."""
        hashes = {}
        for name in self._sets:
            hashes[name] = hashlib.sha256()
            values = self._values(name, "r")[: done[name]]
            for first in range(0, len(values), _ROWS):
                hashes[name].update(values[first : first + _ROWS].tobytes())
        return hashes

    def _num_bytes(self, name: str) -> int:
        """The length of a set's file."""
        return self._sets[name].num_rows * self._seq_len * np.dtype(np.float32).itemsize

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.f32"

    def _values(self, name: str, mode: Any) -> np.ndarray:
        num_rows = self._sets[name].num_rows
        # An empty file cannot be mapped.
        if num_rows == 0:
            return np.zeros((0, self._seq_len), np.float32)
        return np.memmap(self._file(name), np.float32, mode, shape=(num_rows, self._seq_len))


def _hex_digests(hashes: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest.hexdigest() for name, digest in hashes.items()}
