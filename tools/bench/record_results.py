"""What our plans say of the facts of the public record, as it is kept: docs/benchmarks/public_record.jsonl."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "public_record.jsonl"


@dataclass(frozen=True)
class PlannedFact:
    """What our plan says of a fact's nearest setting.

    Attributes:
        fact: the number of its line in public_record.jsonl, from 1 on.
        command: that plans it, without the name of the shape's folder; of MaxText's own step, after its fields.
        compiled: by the compiler; else by the closed form.
        fits: our verdict.
        peak_bytes: of one device, gaps between buffers included.
        tokens_per_second: estimated, of all devices; None where the rates of the device are not known.
        flops_per_second: likewise the FLOPs that the model needs, of one device.
        date: of the plan.
        versions: of what planned it.
        limit_bytes: what a program may take of a device.
    """

    fact: int
    command: str
    compiled: bool
    fits: bool
    peak_bytes: int
    tokens_per_second: float | None
    flops_per_second: float | None
    date: str
    versions: dict[str, str]
    limit_bytes: int | None = None

    @property
    def is_by_maxtext(self) -> bool:
        """Whether MaxText's own step was planned."""
        return self.command.startswith("MAXTEXT=")

    @property
    def by(self) -> str:
        """What planned it."""
        if not self.compiled:
            return "closed form"
        return "compiler, MaxText's own step" if self.is_by_maxtext else "compiler"


def read_results(path: Path = RESULTS) -> dict[int, PlannedFact]:
    """{line of the fact: what was planned}; empty where nothing was."""
    if not path.exists():
        return {}
    rows = [PlannedFact(**json.loads(line)) for line in path.read_text().splitlines()]
    return {row.fact: row for row in rows}


def write_results(results: dict[int, PlannedFact], path: Path = RESULTS) -> None:
    """Writes the results, by the line of the fact."""
    lines = [json.dumps(asdict(results[number])) for number in sorted(results)]
    path.write_text("\n".join(lines) + "\n")


def report_of(command: list[str], folder: Path, **process: Any) -> dict[str, Any]:
    """The report of a `plimsoll plan` in a process of its own.

    Args:
        command: without `--json`.
        folder: for the report.
        process: of `subprocess.run`: its environment and folder.

    Raises:
        ValueError: the plan was refused; with its last line.
    """
    path = folder / "plan.json"
    path.unlink(missing_ok=True)
    done = subprocess.run([*command, f"--json={path}"], capture_output=True, text=True, **process)
    if not path.exists():
        lines = done.stderr.strip().splitlines() or ["no word of why"]
        raise ValueError(lines[-1])
    return json.loads(path.read_text())
