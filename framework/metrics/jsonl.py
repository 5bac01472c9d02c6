"""metrics.jsonl: one JSON object per line, the record of a run for resuming, plotting and reading.

Every row is `{"step": int, name: value, ...}`. Rows of a run also start with `time`, in seconds since 1970, and with
the amount of data that the run has read until that step. Floats are written as Python's shortest repr of the equal
float64, so a float32 has the same bits when it is read back as float32. JSON has no NaN or infinity: they are written
as the strings "NaN", "Infinity" and "-Infinity", and `read_metrics` converts them back.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plimsoll.framework.files import durable
from plimsoll.framework.files.text_files import parse_json

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlWriter:
    """Appends rows to a JSONL file. Once `write` has returned, a kill does not lose the row.

    If a kill or a full disk truncated the last line, it is repaired when the file is opened again: completed if only
    its newline is missing, else dropped. In that case, a ValueError is raised if another line is not a JSON object.

    Args:
        path: path of the file.
        stamp: returns additional fields for the row of a step; None for no additional fields.
    """

    def __init__(self, path: str | os.PathLike[str], stamp: Callable[[int], Mapping[str, object]] | None = None):
        self.path = Path(path)
        self._stamp = stamp
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (see close)
        size = self._file.seek(0, os.SEEK_END)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._replace(line for _, line in _rows(self.path))

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append one row.

        Values are numbers (including 0-d arrays), bools, strings and None. Raises OSError on a full disk, without
        leaving a part of the row behind.
        """
        stamps = {} if self._stamp is None else self._stamp(step)
        row = {"step": step, **stamps, **metrics}
        for name, value in row.items():
            # Convert 0-d arrays and numpy scalars to Python numbers.
            number = value.item() if hasattr(value, "item") else value
            # json.dumps would write NaN and Infinity as bare words, which are valid JSON only as strings.
            is_special = isinstance(number, float) and not math.isfinite(number)
            row[name] = json.dumps(number) if is_special else number
        line = json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            # An unbuffered write may be partial, for example on a nearly full disk.
            while line:
                num_written = self._file.write(line)
                line = line[num_written:]
        except OSError:
            # A partial row would make the next one unreadable.
            os.ftruncate(self._file.fileno(), size)
            raise

    def resume(self, from_step: int) -> None:
        """Drop the rows after `from_step`, and append a row that records the resume.

        That row is `{"step": from_step, "resumed_from": from_step}`, with its stamp. Raises ValueError, without
        changing the file, if a line is not a JSON object.
        """
        remaining_lines = []
        is_kept_by_row = []
        for row, line in _rows(self.path):
            is_kept = row["step"] <= from_step
            is_kept_by_row.append(is_kept)
            if is_kept:
                remaining_lines.append(line)
        # A run writes its rows in order, so the dropped ones are usually at the end of the file.
        if is_kept_by_row == sorted(is_kept_by_row, reverse=True):
            num_bytes = sum(len(line) for line in remaining_lines)
            os.ftruncate(self._file.fileno(), num_bytes)
        else:
            self._replace(remaining_lines)
        self.write(from_step, {"resumed_from": from_step})

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def _replace(self, lines: Iterable[bytes]) -> None:
        # Rename the new file when it is complete, so that a kill leaves either the old file or the new one.
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.writelines(lines)
        durable.rename(temporary, self.path)
        self._file.close()
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, with "NaN", "Infinity" and "-Infinity" converted back to floats.

    A last line without a newline is skipped unless it is complete, because a run may still be writing it.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a line is not a JSON object with a "step". The message contains the line number.
    """
    rows = []
    for row, _ in _rows(Path(path)):
        for name, value in row.items():
            if isinstance(value, str):
                row[name] = _SPECIAL.get(value, value)
        rows.append(row)
    return rows


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each row, and its line with a newline."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            # A last line that lacks only its newline is complete.
            if isinstance(row, dict) and "step" in row:
                yield row, line.removesuffix(b"\n") + b"\n"
            elif line.endswith(b"\n"):
                problem = f'expected a JSON object with a "step", got {line[:80]!r}'
                raise ValueError(f"{path}, line {number}: {problem}")
