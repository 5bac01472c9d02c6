"""Results of our plans for the facts of the public record, as stored in docs/benchmarks/public_record.jsonl."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "public_record.jsonl"


@dataclass(frozen=True)
class PlannedFact:
    """Result of our plan for a fact's nearest setting.

    Attributes:
        fact: number of the fact's line in public_record.jsonl, starting at 1.
        command: command that plans it, without the folder of the shape; for MaxText's own step, preceded by its fields.
        compiled: whether the compiler judged it; otherwise the analytical estimate did.
        fits: our verdict.
        peak_bytes: peak of one device in bytes, including gaps between buffers.
        tokens_per_second: estimated rate of all devices; None if the device's rates are unknown.
        flops_per_second: estimated model FLOPs per second of one device; None if the device's rates are unknown.
        date: date of the plan.
        versions: versions of the packages that planned it.
        limit_bytes: memory that a program may use on a device.
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
        """True if MaxText's own step was planned."""
        return self.command.startswith("MAXTEXT=")

    @property
    def by(self) -> str:
        """The method that judged the fact."""
        if not self.compiled:
            return "estimate"
        return "compiler, MaxText's own step" if self.is_by_maxtext else "compiler"


def read_results(path: Path = RESULTS) -> dict[int, PlannedFact]:
    """Return {line of the fact: planned result}; empty if the file does not exist."""
    if not path.exists():
        return {}
    rows = [PlannedFact(**json.loads(line)) for line in path.read_text().splitlines()]
    return {row.fact: row for row in rows}


def write_results(results: dict[int, PlannedFact], path: Path = RESULTS) -> None:
    """Write the results, sorted by the line of the fact."""
    lines = [json.dumps(asdict(results[number])) for number in sorted(results)]
    path.write_text("\n".join(lines) + "\n")


def run_plan(command: list[str], folder: Path, **process: Any) -> dict[str, Any]:
    """Run `plimsoll plan` in a separate process and return its report.

    Args:
        command: command line without `--json`.
        folder: folder to write the report to.
        process: options of `subprocess.run`, such as its environment and working directory.

    Raises:
        ValueError: the plan was refused; the message is its last line.
    """
    path = folder / "plan.json"
    path.unlink(missing_ok=True)
    done = subprocess.run([*command, f"--json={path}"], capture_output=True, text=True, **process)
    if not path.exists():
        lines = done.stderr.strip().splitlines() or ["no word of why"]
        raise ValueError(lines[-1])
    return json.loads(path.read_text())
