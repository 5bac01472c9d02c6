"""metrics.jsonl: one JSON object per line, the record of a run that resume, plots and people read.

Imports only the standard library. Every row is `{"step": int, name: value, ...}`. Floats are written as Python's
shortest repr of the float64 that equals them, so a float32 read back as float32 has the same bits. JSON has no NaN or
infinity: they are written as the strings "NaN", "Infinity", "-Infinity", and `read_metrics` turns them back.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlWriter:
    """Appends rows to a JSONL file, each one complete on disk's side of the process before `write` returns.

    A row that a kill cut short is repaired when the file is opened again: a last line without its newline is completed
    if it is a whole object, and dropped otherwise. A write that fails (disk full) takes its torn row back and raises.

    Args:
      path: the file; it and its folder are created.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._repair_last_line()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one row. Values: numbers (0-d arrays too), bools, strings, None.

        Raises:
          ValueError: a value that is none of these, or a metric named "step".
          OSError: the row could not be written; the file then ends with the row before it.
        """
        if "step" in metrics:
            raise ValueError('"step" is the row\'s own field, and cannot be the name of a metric')
        self._append({"step": int(step), **metrics})

    def resume(self, from_step: int) -> None:
        """Drops the rows after `from_step` and appends one `{"step": from_step, "resumed_from": from_step}`.

        Atomic: written to a temporary file beside it, synced and renamed, so a kill leaves the old file or the new one.

        Raises:
          ValueError: a line that is no JSON object (the file is left as it is).
        """
        kept = [line for row, line in _rows(self.path) if row.get("step", from_step) <= from_step]
        kept.append(_encode({"step": int(from_step), "resumed_from": int(from_step)}))
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        _sync_folder(self.path.parent)
        os.close(self._open_fd())
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def flush(self) -> None:
        """Makes the rows survive a power cut (they survive a kill as soon as `write` returns)."""
        os.fsync(self._open_fd())

    def close(self) -> None:
        if self._fd is not None:
            self.flush()
            os.close(self._fd)
            self._fd = None

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        return self._fd

    def _append(self, row: Mapping[str, Any]) -> None:
        fd, data = self._open_fd(), _encode(row)
        end = os.fstat(fd).st_size
        try:
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            os.ftruncate(fd, end)  # a torn row in the middle of a file would be past repair
            raise

    def _repair_last_line(self) -> None:
        fd = self._open_fd()
        size = os.fstat(fd).st_size
        start, tail = size, b""
        while start > 0 and b"\n" not in tail:
            start = max(0, start - 65536)
            tail = os.pread(fd, size - start, start)
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return
        try:
            whole = isinstance(json.loads(torn), dict)
        except ValueError:
            whole = False
        if whole:
            os.write(fd, b"\n")
        else:
            os.ftruncate(fd, size - len(torn))


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics file, with "NaN", "Infinity" and "-Infinity" as floats again.

    A last line without a newline is left out unless it is whole: a run may be writing it now.

    Raises:
      FileNotFoundError: no such file. ValueError: a line that is no JSON object, with its number.
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
            if isinstance(row, dict):
                yield row, line if line.endswith(b"\n") else line + b"\n"
            elif line.endswith(b"\n"):
                raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:80]!r}")


def _encode(row: Mapping[str, Any]) -> bytes:
    clean = {name: _plain(name, value) for name, value in row.items()}
    return json.dumps(clean, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # numpy and JAX scalars; exact, as every float32 and bfloat16 is a float64
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"metric {name!r}: expected a number, a string or None, got {type(value).__name__}")


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
