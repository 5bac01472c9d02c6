"""metrics.jsonl: one JSON object per line, the record of a run that resume, plots and people read.

Every row is `{"step": int, name: value, ...}`. Floats are written as Python's shortest repr of the float64 that equals
them, so a float32 read back as float32 has the same bits. JSON has no NaN or infinity: they are written as the strings
"NaN", "Infinity", "-Infinity", and `read_metrics` turns them back.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlWriter:
    """Appends rows to a JSONL file; once `write` returns, a kill does not lose the row.

    A last line that a kill or a full disk cut short is repaired when the file is opened again: completed if only its
    newline is missing, else dropped (ValueError if a line of it is no JSON object).
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (see close)
        size = self._file.seek(0, os.SEEK_END)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._replace(line for _, line in _rows(self.path))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one row. Values: numbers (0-d arrays too), bools, strings, None. Raises OSError on a full disk, which
        leaves nothing of the row behind."""
        self._append(_encode({"step": step, **metrics}))

    def resume(self, from_step: int) -> None:
        """Drops the rows after `from_step` and appends one `{"step": from_step, "resumed_from": from_step}`. Where a
        line is no JSON object, that is a ValueError, and the file is left as it is."""
        rows = list(_rows(self.path))
        keeps = [row["step"] <= from_step for row, _ in rows]
        if keeps == sorted(keeps, reverse=True):  # as every run writes them: what is dropped is the end
            os.ftruncate(
                self._file.fileno(), sum(len(line) for (_, line), is_kept in zip(rows, keeps, strict=True) if is_kept)
            )
        else:
            self._replace(line for (_, line), is_kept in zip(rows, keeps, strict=True) if is_kept)
        self._append(_encode({"step": from_step, "resumed_from": from_step}))

    def close(self) -> None:
        """A second call does nothing."""
        self._file.close()

    def _append(self, line: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise

    def _replace(self, lines: Iterable[bytes]) -> None:
        # Renamed when it is whole, so that a kill leaves the old file or the new one.
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        self._file.close()
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics file, with "NaN", "Infinity" and "-Infinity" as floats again.

    A last line without a newline is left out unless it is whole: a run may be writing it now. FileNotFoundError; or
    ValueError: a line that is no JSON object, with its number.
    """
    return [
        {name: _SPECIAL.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
        for row, _ in _rows(Path(path))
    ]


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and "step" in row:
                yield row, line.removesuffix(b"\n") + b"\n"
            elif line.endswith(b"\n"):
                raise ValueError(f'{path}, line {number}: expected a JSON object with a "step", got {line[:80]!r}')


def _encode(row: Mapping[str, Any]) -> bytes:
    values = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = json.dumps(value)  # Python's words for them, which are not JSON, as strings, which are
    return json.dumps(values, allow_nan=False, ensure_ascii=False).encode() + b"\n"
