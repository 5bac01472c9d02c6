"""Log-probabilities of every data row, computed once and stored in files of the workdir.

    reference/reference.json    the weights and data they belong to, the finished rows of each set and their checksums
    reference/train.f32         float32[rows, S] of a training source; a validation set has a file with its own name

Rows are computed in order, a batch at a time. The JSON file counts them only after they are on disk, so a kill or a
power cut loses only the batches since the last count, and the next start continues from there.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plimsoll.framework.data.batches import RowSet
from plimsoll.framework.files import durable
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import write_json
from plimsoll.framework.terminal.phases import SHORT, phase

FOLDER = "reference"
_FACTS = "reference.json"
# `StoredRows.difference` if value files are missing or truncated although the JSON file exists.
DAMAGED = "damaged"
# Minimum time in seconds between two updates of the row counts.
_SECONDS = 0.2
# Number of rows to read at a time when computing a checksum.
_ROWS = 1024


class StoredRows:
    """The value files of all row sets; one process writes them.

    Args:
        folder: folder of the files.
        sets: row sets of the data, by name.
        seq_len: sequence length S.
        weights: digest of the weights that the values are computed with.
    """

    def __init__(self, folder: Path, sets: Mapping[str, RowSet], seq_len: int, weights: str):
        self.folder = folder
        self._sets = sets
        self._seq_len = seq_len
        self._facts: dict[str, object] = {
            "weights": weights,
            "data": {name: [rows.digest, rows.num_rows, seq_len] for name, rows in sets.items()},
        }
        self._files = {name: folder / f"{name}.f32" for name in sets}
        row_bytes = seq_len * np.dtype(np.float32).itemsize
        self._file_bytes = {name: rows.num_rows * row_bytes for name, rows in sets.items()}
        self._saved_at = 0.0
        self.done: dict[str, int] = dict.fromkeys(sets, 0)
        # Hashes of the finished rows; only the writing process keeps them up to date.
        self._hashes = {name: hashlib.sha256() for name in sets}

    @property
    def difference(self) -> str | None:
        """The difference between the stored files and the run: "weights", "data", or None if nothing differs.

        "" means that reference.json is missing or unreadable, `DAMAGED` that a value file is missing or has the wrong
        length.
        """
        stored = self._read()
        if stored is None:
            return ""
        for name, facts in self._facts.items():
            if stored.get(name) != facts:
                return name
        for name, file in self._files.items():
            if not file.exists() or file.stat().st_size != self._file_bytes[name]:
                return DAMAGED
        return None

    @property
    def has_changed(self) -> bool:
        """True if the finished rows no longer match their checksums. Reads all of them."""
        stored = self._read()
        if stored is None:
            return False
        with phase("checking the stored reference", patience=SHORT):
            hashes = self._hash_files(stored["done"])
        return stored.get("sha256") != {name: digest.hexdigest() for name, digest in hashes.items()}

    def begin(self, *, restart: bool) -> None:
        """Prepare the files for writing; keeps the rows of an earlier start unless `restart` is set."""
        stored = None if restart else self._read()
        if stored is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            durable.make_folder(self.folder)
            self.done = dict.fromkeys(self._sets, 0)
            self._hashes = {name: hashlib.sha256() for name in self._sets}
            for name, path in self._files.items():
                with open(path, "wb") as file:
                    # A sparse file of zeros: disk blocks are allocated as rows are written.
                    file.truncate(self._file_bytes[name])
            self._save()
        else:
            self.done = {name: stored["done"][name] for name in self._sets}
            self._hashes = self._hash_files(self.done)

    def open(self) -> dict[str, np.ndarray]:
        """Open the values of all sets for reading, f32[rows, S] by set name."""
        stored = self._read()
        if stored is not None:
            self.done = stored["done"]
        return {name: self._values(name, "r") for name in self._sets}

    @property
    def is_complete(self) -> bool:
        """True if all rows of all sets are finished; valid after `begin` or `open`."""
        return all(self.done[name] == rows.num_rows for name, rows in self._sets.items())

    def write(self, name: str, first: int, values: np.ndarray) -> None:
        """Write rows of a set from row `first` on, f32[n, S]; all earlier rows must be finished."""
        num_rows = min(len(values), self._sets[name].num_rows - first)
        rows = np.ascontiguousarray(values[:num_rows], np.float32)
        stored = self._values(name, "r+")
        stored[first : first + num_rows] = rows
        self._hashes[name].update(rows.tobytes())
        self.done[name] = first + num_rows
        if self.is_complete or time.monotonic() - self._saved_at > _SECONDS:
            self._save()

    def _save(self) -> None:
        for file in self._files.values():
            # This also syncs pages that were written through a memory map.
            durable.sync(file)
        digests = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        write_json(self.folder / _FACTS, {**self._facts, "done": self.done, "sha256": digests})
        self._saved_at = time.monotonic()

    def _read(self) -> dict[str, Any] | None:
        """Read the JSON file; None if it is missing or invalid."""
        try:
            stored = parse_json((self.folder / _FACTS).read_text())
        except (FileNotFoundError, ValueError):
            return None
        done = stored.get("done") if isinstance(stored, dict) else None
        if not isinstance(done, dict):
            return None
        # A slice would silently clip a count beyond the end of the set, and the checksum of fewer rows could match.
        is_valid = all(type(done.get(name)) is int and 0 <= done[name] <= s.num_rows for name, s in self._sets.items())
        return stored if is_valid else None

    def _hash_files(self, done: Mapping[str, int]) -> dict[str, hashlib._Hash]:
        """Hash the finished rows of each file; returns the hash objects by set name."""
        hashes = {}
        for name in self._sets:
            hashes[name] = hashlib.sha256()
            values = self._values(name, "r")[: done[name]]
            for first in range(0, len(values), _ROWS):
                hashes[name].update(values[first : first + _ROWS].tobytes())
        return hashes

    def _values(self, name: str, mode: Literal["r", "r+"]) -> np.ndarray:
        num_rows = self._sets[name].num_rows
        # An empty file cannot be mapped.
        if num_rows == 0:
            return np.zeros((0, self._seq_len), np.float32)
        return np.memmap(self._files[name], np.float32, mode, shape=(num_rows, self._seq_len))
