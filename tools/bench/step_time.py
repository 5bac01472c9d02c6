"""Compare the plan's estimated step time with the measured time in training, on this machine's CPU.

    plimsoll calibrate && python -m tools.bench.step_time [--seconds=8] [--only=WORD] [--write=FILE]

Settings differ in size, remat, schedule, batch and length. Each is planned for one CPU device and trained for a few
seconds, one after the other, in separate processes. The measured time is the shortest of several windows of steps.
The table ends with the rank correlation (Spearman's) and the median error of the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from plimsoll.framework.plan.cache import versions
from plimsoll.framework.plan.step_time import device_rates
from plimsoll.framework.terminal.tables import TableSection, render
from plimsoll.launch import cli

_SMALL = "--config=nanogpt-cpu"
_TEXT = "--config=stdlib-tiny"
# The settings: a config, and overrides.
SETTINGS: tuple[tuple[str, ...], ...] = (
    (_SMALL,),
    (_SMALL, "--config.data.global_batch_size=48"),
    (_SMALL, "--config.data.global_batch_size=48", "--config.memory.remat=full"),
    (_SMALL, "--config.data.seq_len=32"),
    (_SMALL, "--config.memory.update=in_backward", "--config.learner.clip=none"),
    (_SMALL, "--config.model.stack.num_layers=12"),
    (_TEXT,),
    (_TEXT, "--config.memory.remat=full"),
    (_TEXT, "--config.memory.update=streamed"),
    (_TEXT, "--config.memory.update=layer_programs"),
    (_TEXT, "--config.data.global_batch_size=16"),
    (_TEXT, "--config.data.global_batch_size=16", "--config.memory.remat=full"),
    (_TEXT, "--config.data.seq_len=1024"),
    (_TEXT, "--config.model.stack.num_layers=16"),
)
_WINDOWS = 6


class StepTimeRow(NamedTuple):
    """A setting, and its estimated and measured seconds per step."""

    setting: str
    estimated: float
    measured: float

    @property
    def ratio(self) -> float:
        """The estimate over the measurement."""
        return self.estimated / self.measured


def estimate_step_time(setting_args: Sequence[str], folder: Path) -> float:
    """Return the planned seconds of a step."""
    path = folder / "plan.json"
    _run("plimsoll.launch.plan", *setting_args, "--target=cpu:1", "--step_only", "--fresh", f"--json={path}")
    return json.loads(path.read_text())["time"]["seconds"]


def measure_step_time(setting_args: Sequence[str], estimate: float, seconds: float, folder: Path) -> float:
    """Return the seconds of a step in training, measured over the fastest window of steps."""
    window = max(2, round(seconds / _WINDOWS / estimate))
    workdir = folder / "run"
    _run(
        "plimsoll.launch.train",
        *setting_args,
        f"--workdir={workdir}",
        f"--config.trainer.max_steps={window * (_WINDOWS + 1)}",
        f"--config.trainer.log_every={window}",
        "--config.trainer.eval_every=none",
        f"--config.trainer.save_every={10**9}",
        "--force",
    )
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    training_rows = [row for row in map(json.loads, lines) if "train/loss" in row]
    windows = []
    for earlier, later in itertools.pairwise(training_rows):
        windows.append((later["time"] - earlier["time"]) / (later["step"] - earlier["step"]))
    return min(windows)


def _run(module: str, *setting_args: str) -> None:
    """Run a Plimsoll command.

    Raises:
        UsageError: the command failed; the message has its last line of output.
    """
    done = subprocess.run([sys.executable, "-m", module, *setting_args], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word of why"]
        raise cli.UsageError(f"{module} {' '.join(setting_args)}: {lines[-1]}")


def rank_correlation(rows: Sequence[StepTimeRow]) -> float:
    """Return Spearman's rank correlation of estimated and measured times."""
    estimated_ranks = np.argsort(np.argsort([row.estimated for row in rows]))
    measured_ranks = np.argsort(np.argsort([row.measured for row in rows]))
    return float(np.corrcoef(estimated_ranks, measured_ranks)[0, 1])


def section(rows: Sequence[StepTimeRow]) -> TableSection:
    """Return the table of all settings, with summary rows."""
    cells = [["setting", "estimated, ms", "measured, ms", "ratio"]]
    for row in rows:
        cells.append([row.setting, f"{1e3 * row.estimated:.1f}", f"{1e3 * row.measured:.1f}", f"{row.ratio:.2f}"])
    error = median(abs(row.ratio - 1) for row in rows)
    cells.append(["rank correlation", f"{rank_correlation(rows):.3f}", "", ""])
    cells.append(["median error", f"{100 * error:.0f}%", "", ""])
    return TableSection("a step on this CPU", cells, numbers=True)


@cli.main
def main(argv: list[str]) -> int:
    """Plan and train each setting, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of training per setting; default 8")
    parser.add_argument("--only", default="", metavar="WORD", help="run only settings that contain WORD")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the rows to FILE as JSON")
    args = parser.parse_args(argv)
    if device_rates.load_measured_rates("cpu") is None:
        raise cli.UsageError("this machine is not calibrated; run plimsoll calibrate")
    rows = []
    for setting_args in SETTINGS:
        setting = " ".join(setting_args).replace("--config.", "").replace("--config=", "")
        if args.only not in setting:
            continue
        with tempfile.TemporaryDirectory(prefix="plimsoll-step-time-") as name:
            folder = Path(name)
            estimate = estimate_step_time(setting_args, folder)
            measured = measure_step_time(setting_args, estimate, args.seconds, folder)
        rows.append(StepTimeRow(setting, estimate, measured))
        print(f"{setting}: {1e3 * estimate:.1f} estimated, {1e3 * measured:.1f} measured", file=sys.stderr)
    print(render([section(rows)]), end="")
    if args.write:
        about = {"date": str(date.today()), "versions": versions("jax", "jaxlib")}
        args.write.write_text(json.dumps(about | {"rows": [row._asdict() for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
