"""metrics.jsonl: one JSON object per line, the record of a run that resume, plots and people read.

Every row is `{"step": int, name: value, ...}`; those of a run begin with `time` too, in seconds since
1970, and with what the run has read of its data until that step. Floats are written as Python's
shortest repr of the float64 that equals them, so a float32 read back as float32 has the same bits.
JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity", "-Infinity", and
`read_metrics` turns them back.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from framework.files import durable
from framework.files.texts import parse_json

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlWriter:
    """Appends rows to a JSONL file; once `write` returns, a kill does not lose the row.

    A last line that a kill or a full disk cut short is repaired when the file is opened again:
    completed if only its newline is missing, else dropped (ValueError if a line of it is no JSON
    object).

    Args:
        path: the file.
        stamp: what every row of a step has beside its metrics; None for nothing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stamp: Callable[[int], Mapping[str, Any]] | None = None,
    ):
        self.path = Path(path)
        self._stamp = stamp
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (see close)
        size = self._file.seek(0, os.SEEK_END)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._replace(line for _, line in _rows(self.path))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one row.

        Values are numbers (0-d arrays too), bools, strings and None. Raises OSError on a full disk,
        which leaves nothing of the row behind.
        """
        self._append_row(step, metrics)

    def resume(self, from_step: int) -> None:
        """Drops the rows after `from_step`, and appends one that says so.

        That row is `{"step": from_step, "resumed_from": from_step}`, with its stamp. Raises ValueError: a line is
        no JSON object; the file is left as it is.
        """
        remaining_lines = []
        is_kept_by_row = []
        for row, line in _rows(self.path):
            is_kept = row["step"] <= from_step
            is_kept_by_row.append(is_kept)
            if is_kept:
                remaining_lines.append(line)
        # Every run writes its rows in order, so the dropped ones are the end of the file.
        if is_kept_by_row == sorted(is_kept_by_row, reverse=True):
            num_bytes = sum(len(line) for line in remaining_lines)
            os.ftruncate(self._file.fileno(), num_bytes)
        else:
            self._replace(remaining_lines)
        self._append_row(from_step, {"resumed_from": from_step})

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()

    def _append_row(self, step: int, metrics: Mapping[str, Any]) -> None:
        stamps = {} if self._stamp is None else self._stamp(step)
        self._append(_encode({"step": step, **stamps, **metrics}))

    def _append(self, line: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        try:
            # An unbuffered file may take only a part at a time, as a nearly full disk does.
            while line:
                num_written = self._file.write(line)
                line = line[num_written:]
        except OSError:
            # A half row would make the next one unreadable.
            os.ftruncate(self._file.fileno(), size)
            raise

    def _replace(self, lines: Iterable[bytes]) -> None:
        # The new file is renamed when it is whole, so that a kill leaves the old file or the new
        # one.
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.writelines(lines)
        durable.rename(temporary, self.path)
        self._file.close()
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file, with "NaN", "Infinity" and "-Infinity" as floats again.

    A last line without a newline is left out unless it is whole: a run may be writing it now.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line, whose number the error tells, is no JSON object.
    """
    rows = []
    for row, _ in _rows(Path(path)):
        for name, value in row.items():
            if isinstance(value, str):
                row[name] = _SPECIAL.get(value, value)
        rows.append(row)
    return rows


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields each row, and its line with a newline."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            # A last line that lacks only its newline is whole.
            if isinstance(row, dict) and "step" in row:
                yield row, line.removesuffix(b"\n") + b"\n"
            elif line.endswith(b"\n"):
                problem = f'expected a JSON object with a "step", got {line[:80]!r}'
                raise ValueError(f"{path}, line {number}: {problem}")


def _encode(row: Mapping[str, Any]) -> bytes:
    values = {}
    for name, value in row.items():
        # An array or a numpy scalar becomes a number of Python.
        if hasattr(value, "item"):
            value = value.item()
        # json.dumps has words for these, NaN and Infinity, which are JSON only as strings.
        if isinstance(value, float) and not math.isfinite(value):
            value = json.dumps(value)
        values[name] = value
    text = json.dumps(values, allow_nan=False, ensure_ascii=False)
    return text.encode() + b"\n"
