"""Compares runs by their workdirs: the fields of their configs that differ, their metrics, and their curves.

`plimsoll compare` and `plimsoll sweep` show the same tables. Only files are read, nothing in a workdir is executed, and
the classes that a config names need not exist here.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.framework.config import did_you_mean
from plimsoll.framework.files.text_files import parse_json
from plimsoll.framework.files.workdir import read_only
from plimsoll.framework.metrics.jsonl import read_metrics
from plimsoll.framework.terminal.tables import TableSection, human_count

# Metrics for which higher values are better end in one of these.
_HIGHER_IS_BETTER = ("accuracy", "reward", "margin", "win_rate")
# The maximum number of fields that differ to show.
_MAX_FIELDS = 60


@dataclass(frozen=True)
class RunRecord:
    """What a workdir has about its run.

    Attributes:
        name: name in tables and plots.
        config: config of its last start, as JSON.
        rows: rows of metrics.jsonl.
        exit: exit code of its last start; None while it is running, or if it was killed.
        reason: reason why it ended early; "" if it did not.
    """

    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    exit: int | None
    reason: str

    @property
    def last_step(self) -> int:
        """The last step that has metrics; 0 if there is none."""
        return max((row["step"] for row in self.rows), default=0)

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Return the (step, value) of a metric, sorted by step."""
        return sorted((row["step"], float(row[metric])) for row in self.rows if _is_number(row.get(metric)))

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric; None if there is none."""
        points = self.points(metric)
        return points[-1][1] if points else None

    def best(self, metric: str) -> tuple[int, float] | None:
        """Return the (step, value) of the best finite value of a metric; None if there is none."""
        points = [point for point in self.points(metric) if math.isfinite(point[1])]
        sign = -1.0 if metric.endswith(_HIGHER_IS_BETTER) else 1.0
        return min(points, key=lambda point: sign * point[1], default=None)


def read_runs(workdirs: Sequence[str], names: Sequence[str] | None = None) -> list[RunRecord]:
    """Read the runs in these workdirs.

    Args:
        workdirs: folders or URLs.
        names: names of the runs; None for the last parts of the paths that tell them apart.

    Raises:
        FileNotFoundError: a folder is not the workdir of a run.
        ValueError: a file is not what a run writes.
    """
    records = []
    for workdir, name in zip(workdirs, names or _short_names(workdirs), strict=True):
        folder, _ = read_only(workdir)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{workdir} holds no config.json; expected the workdir of a `plimsoll train` run")
        try:
            config = parse_json((folder / "config.json").read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{folder / 'config.json'}: expected an object")
        metrics = folder / "metrics.jsonl"
        rows = read_metrics(metrics) if metrics.is_file() else []
        from plimsoll.framework.processes.health import read

        health = read(folder / "health" / "process-00000.json") or {}
        records.append(RunRecord(name, config, rows, health.get("exit"), str(health.get("reason") or "")))
    return records


def _short_names(workdirs: Sequence[str]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other; the paths if two are equal."""
    parts = [Path(workdir.rstrip("/")).parts for workdir in workdirs]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(workdirs)


def flatten_config(config: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a config as JSON, by dotted path; a component's own path has its class."""
    leaves: dict[str, Any] = {}
    if isinstance(config, dict):
        for key, value in config.items():
            inner = path if key == "$class" else f"{path}.{key}" if path else str(key)
            leaves |= flatten_config(value, inner)
        if not config:
            leaves[path] = {}
        return leaves
    if isinstance(config, list) and any(isinstance(item, dict) for item in config):
        for index, item in enumerate(config):
            leaves |= flatten_config(item, f"{path}.{index}")
        return leaves
    return {path: config}


def diff_configs(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return {path: value in each run} of the fields that differ, in order; "-" where a config lacks the field."""
    flat = [flatten_config(record.config) for record in records]
    paths = dict.fromkeys(path for leaves in flat for path in leaves)
    differing = {}
    for path in paths:
        values = [leaves.get(path, "-") for leaves in flat]
        if len({json.dumps(value, sort_keys=True) for value in values}) > 1:
            differing[path] = values
    return differing


def choose_metrics(records: Sequence[RunRecord], requested: Sequence[str] = ()) -> list[str]:
    """Return the metrics to show: those requested, or the losses of training and of evaluations.

    Raises:
        ValueError: no run has a requested metric.
    """
    names = list(dict.fromkeys(name for record in records for row in record.rows for name in row))
    for name in requested:
        if name not in names:
            raise ValueError(f"--metric={name}: no run has this metric{did_you_mean(name, names)}")
    if requested:
        return list(requested)
    losses = [name for name in names if name.startswith(("eval/", "eval_ema/")) and name.endswith("/loss")]
    return [*(["train/loss"] if "train/loss" in names else []), *losses]


def diff_section(records: Sequence[RunRecord]) -> TableSection:
    """Return the table of the config fields that differ."""
    differing = diff_configs(records)
    if not differing:
        return TableSection("config", [("the configs are identical",)])
    rows = [("field", *(record.name for record in records))]
    for path, values in list(differing.items())[:_MAX_FIELDS]:
        rows.append((path, *(_show(value) for value in values)))
    if len(differing) > _MAX_FIELDS:
        rows.append((f"... and {len(differing) - _MAX_FIELDS} more",))
    return TableSection("fields of the config that differ", rows)


def metrics_section(records: Sequence[RunRecord], metrics: Sequence[str]) -> TableSection:
    """Return the table of the runs' metrics: the last value, and the best one of evaluations."""
    evaluated = [metric for metric in metrics if not metric.startswith("train/")]
    heads = ["run", "step", *metrics]
    for metric in evaluated:
        heads.append(f"best {metric} (step)")
    heads += ["tokens/s", "ended"]
    rows = [heads]
    for record in records:
        cells = [record.name, f"{record.last_step:,}"]
        for metric in metrics:
            value = record.last(metric)
            cells.append("-" if value is None else f"{value:.6g}")
        for metric in evaluated:
            best = record.best(metric)
            cells.append("-" if best is None else f"{best[1]:.6g} ({best[0]:,})")
        speed = record.last("train/tokens_per_second")
        cells.append("-" if speed is None else human_count(speed))
        cells.append(describe_end(record))
        rows.append(cells)
    return TableSection("metrics, of the last step that has them", rows)


def find_best(records: Sequence[RunRecord], metric: str) -> tuple[RunRecord, int, float] | None:
    """Return the (run, step, value) of the best value of a metric; None if no run has a finite one."""
    found = [(record, *best) for record in records if (best := record.best(metric)) is not None]
    sign = -1.0 if metric.endswith(_HIGHER_IS_BETTER) else 1.0
    return min(found, key=lambda item: sign * item[2], default=None)


def describe_end(record: RunRecord) -> str:
    """Return how the last start of a run ended."""
    from plimsoll.framework.terminal.exit_codes import ExitCode, describe_exit_code

    if record.exit is None:
        return "no end recorded"
    if record.exit == ExitCode.STOPPED_EARLY and record.reason:
        return f"stopped: {record.reason}"
    return describe_exit_code(record.exit)


def summarize(records: Sequence[RunRecord], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the comparison as JSON."""
    runs = []
    for record in records:
        values = {}
        for metric in metrics:
            best = record.best(metric)
            values[metric] = {
                "last": _finite(record.last(metric)),
                "best": None if best is None else best[1],
                "best_step": None if best is None else best[0],
            }
        runs.append({"name": record.name, "step": record.last_step, "exit": record.exit, "metrics": values})
    return {"runs": runs, "config": diff_configs(records)}


def plot(records: Sequence[RunRecord], metrics: Sequence[str], png_path: Path) -> Path:
    """Draw the curves of the runs over each other; returns the file."""
    from plimsoll.framework.metrics.plot import plot_runs

    rows_by_run: Mapping[str, Any] = {record.name: record.rows for record in records}
    return plot_runs(rows_by_run, metrics, png_path)


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float | None) -> float | str | None:
    """Return a value that JSON can represent."""
    return str(value) if value is not None and not math.isfinite(value) else value
