"""`train`: trains a config in this process, and returns its metrics as arrays and its loss curve as an image."""

from __future__ import annotations

import base64
import gc
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np

from plimsoll.api.configs import create_request
from plimsoll.extras.autotune.run_tuning import tune_memory
from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.devices.allocator import release_freed_memory, share_one_heap
from plimsoll.framework.files.workdir import read_only
from plimsoll.framework.metrics.goodput import Goodput
from plimsoll.framework.metrics.jsonl import read_metrics
from plimsoll.framework.metrics.plot import plot_losses
from plimsoll.framework.run import start
from plimsoll.framework.run.request import RunRequest
from plimsoll.framework.terminal import interrupts, phases
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.phase_views import create_view

_RESUME = ("auto", "never", "must")


class MetricCurve(NamedTuple):
    """One metric of a run."""

    steps: np.ndarray  # i64[n], ascending
    values: np.ndarray  # f64[n]


class TrainedRun:
    """A finished run. A notebook shows its loss curve.

    Attributes:
        workdir: folder with the config, metrics, checkpoints and logs.
        metrics: metrics by name, such as "train/loss"; everything in metrics.jsonl, including earlier starts.
    """

    def __init__(self, workdir: str, spec: str, unit: str, rows: list[dict]):
        self.workdir = workdir
        self.metrics: Mapping[str, MetricCurve] = _curves(rows)
        self._rows = rows
        self._spec = spec
        self._unit = unit

    def __repr__(self) -> str:
        last_step = max((row["step"] for row in self._rows), default=0)
        losses = []
        for name, curve in self.metrics.items():
            if name.endswith("/loss"):
                losses.append(f"{name} {curve.values[-1]:.4f}")
        return f"run of {self._spec} in {self.workdir}: {', '.join([f'{last_step} steps', *losses])}"

    def _repr_png_(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            # Plot from the metrics file, so that a notebook shows the same curve as the run itself.
            metrics, _ = read_only(self.workdir)
            picture = plot_losses(metrics / "metrics.jsonl", Path(folder) / "loss.png", self._spec, self._unit)
            return picture.read_bytes()

    def _repr_html_(self) -> str:
        picture = base64.b64encode(self._repr_png_()).decode()
        return f'<p>{escape(repr(self))}</p><img alt="loss by step" width="720" src="data:image/png;base64,{picture}">'


def train(
    config: Config | str | Path,
    workdir: str | os.PathLike[str],
    *,
    resume: Literal["auto", "never", "must"] = "auto",
    force: bool = False,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
) -> TrainedRun:
    """Train in this process, like `plimsoll train`: with the same table, checks, refusals, lock and resume.

    A second call with the same workdir resumes from the last checkpoint. Ctrl-C saves a checkpoint first.

    Args:
        config: config from `load_config` or from a config function; or a spec that `load_config` accepts.
        workdir: folder, or URL (gs://, s3://).
        resume: how to handle existing checkpoints: "auto" resumes from them, "never" refuses to start, "must" refuses
            if there are none.
        force: resume even on different data, and train even if the run does not fit into memory.
        device_memory_gib: memory of each device in GiB (2^30 bytes), instead of its actual memory.
        host_memory_gib: host memory in GiB that the run may use, instead of what is free.

    Raises:
        ConfigError, ValueError, OSError: the request is invalid; the workdir is unchanged.
        RunError: the run failed: its `code` is the exit code of `plimsoll train`, its cause the error.
        KeyboardInterrupt: Ctrl-C was pressed; the training progress is saved.
    """
    started_at = time.monotonic()
    # First, because the number of processes starts JAX and its threads, and what threads free in heaps of their own
    # stays there.
    share_one_heap()
    _check(resume, device_memory_gib=device_memory_gib, host_memory_gib=host_memory_gib)
    requested = create_request(config)
    request = RunRequest(
        spec=requested.spec,
        notes=requested.notes,
        config=requested.config,
        override_paths=requested.override_paths,
        resolve=requested.resolve,
        # Built first, so that errors in the config appear before anything starts.
        experiment=requested.config.instantiate(),
        folder=os.fspath(workdir),
        goodput=Goodput(since=started_at),
        tune_memory=tune_memory,
        limit=None if device_memory_gib is None else int(device_memory_gib * 2**30),
        host_limit=None if host_memory_gib is None else int(host_memory_gib * 2**30),
        resume=resume,
        force=force,
    )
    # The run prints its table and its progress, so it shows its phases as well.
    try:
        with interrupts.raise_on_signals(), phases.show_phases(create_view(sys.stderr)):
            code = start.execute(request, None)
    finally:
        # The figures of the run are cycles of 4 MiB each, which automatic collections reach only after several runs.
        if gc.isenabled():
            gc.collect()
            release_freed_memory()
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt(f"the progress is saved in {request.folder}; call train again to resume")
    if code == ExitCode.TERMINATED:
        # SIGTERM is meant for the whole process, so exit it.
        raise SystemExit(code)
    folder, _ = read_only(os.fspath(workdir))
    rows = read_metrics(folder / "metrics.jsonl")
    return TrainedRun(os.fspath(workdir), request.spec, request.experiment.data.loss_unit, rows)


def _check(resume: str, **sizes: float | None) -> None:
    """Raise ConfigError if an argument of `train` is invalid, or if there are several processes."""
    if resume not in _RESUME:
        raise ConfigError(f"resume={resume!r}: expected one of {', '.join(_RESUME)}")
    for name, size in sizes.items():
        if size is not None and not size > 0:
            raise ConfigError(f"{name}={size}: expected more than 0")
    if jax.process_count() > 1:
        raise ConfigError("pl.train is for a single process; `plimsoll local` and the other launchers start several")


def _curves(rows: list[dict]) -> dict[str, MetricCurve]:
    """Collect all numeric metrics of a run's rows, by name."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                # If a step has several rows, the last one counts.
                points.setdefault(name, {})[row["step"]] = float(value)
    curves = {}
    for name, value_by_step in points.items():
        steps = np.array(sorted(value_by_step), np.int64)
        values = np.array([value_by_step[step] for step in steps.tolist()], np.float64)
        curves[name] = MetricCurve(steps, values)
    return curves
