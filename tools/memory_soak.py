"""Memory soak: repeats saves, evaluations, rollbacks and resumes in one process, and checks that its memory is flat.

    python -m tools.memory_soak --folder=/tmp/soak

Each part is a call of `pl.train`, as in a notebook; the last part is one call for each resume. After each event, it
records the resident memory (RSS), the memory that malloc has handed out (used), the live arrays, the open files and the
threads. Prints a row for each part, as Markdown. Exit code 1: RSS or used memory grows by more than its limit per
event, or arrays, files or threads accumulate.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import plimsoll as pl
from plimsoll.framework.config import Config
from tools import soak_config
from tools.soak_config import Sample

KIB = 1 << 10
MIB = 1 << 20
# Shares of a part's events after which the table shows the RSS; the first two columns are after 5 and 10 events.
_SHARES = (0.25, 0.5, 1.0)
_FIRST_EVENTS = (5, 10)
# Limit of the growth of the RSS, in KiB per event. A leaked copy of the state would be 84,000. What malloc keeps for
# later allocations grows in rare steps of several MiB, which a fit over 100 events shows as up to hundreds of KiB.
_MAX_RSS_SLOPE = 512.0
# Steps from one resume to the next.
_STEPS_PER_RESUME = 2
_WINDOW_GIB = 1 / 64


@dataclass(frozen=True)
class Part:
    """One kind of event.

    Attributes:
        name: name of the part.
        count: number of events by default.
        max_used_slope: limit of the growth of the memory that malloc has handed out, in KiB per event.
    """

    name: str
    count: int
    max_used_slope: float


PARTS = (
    Part("saves", 200, 32.0),
    Part("saves through a window", 200, 32.0),
    Part("evaluations", 200, 32.0),
    Part("rollbacks", 50, 256.0),
    Part("resumes", 20, 1024.0),
)


def run_part(name: str, folder: Path, count: int, dim: int) -> list[Sample]:
    """Run one part, and return the sample after each of its events.

    Args:
        name: name of the part.
        folder: new folder for its workdir and samples.
        count: number of events.
        dim: width of the model.
    """
    folder.mkdir(parents=True)
    os.environ[soak_config.TEXT_VARIABLE] = str(folder / "text")
    soak_config.write_text(folder / "text")
    path = folder / "samples.jsonl"
    workdir = folder / "run"
    config_name = {"rollbacks": "rolled_back", "resumes": "soak"}.get(name, "sampled")
    # By file, as users load their own hooks.
    config = pl.load_config(f"{soak_config.__file__}:{config_name}", {"model.dim": dim})
    for block in config.model.stack.pattern:
        block.mlp.hidden = 4 * dim
    if name == "resumes":
        # The first call starts the run, and each further call resumes it.
        for number in range(count + 1):
            config.trainer.max_steps = _STEPS_PER_RESUME * (number + 1)
            _train(config, workdir)
            if number:
                soak_config.record_sample(path)
        return soak_config.read_samples(path)
    config.trainer.hooks[0].path = str(path)
    config.trainer.max_steps = count
    if name.startswith("saves"):
        config.trainer.save_every = 1
    if name == "saves through a window":
        config.checkpoint.window_gib = _WINDOW_GIB
    if name == "evaluations":
        config.trainer.eval_every = 1
        # The last step is evaluated after the hooks.
        config.trainer.max_steps = count + 1
    if name == "rollbacks":
        config.trainer.hooks[0].count = count
        config.trainer.max_steps = 2 * count + 2
    _train(config, workdir)
    return soak_config.read_samples(path)[:count]


def _train(config: Config, workdir: Path) -> None:
    """Train, with the output of the run in a file next to the workdir."""
    with open(f"{workdir}.out", "a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        pl.train(config, workdir)


def fit_slope(samples: Sequence[Sample], field: str) -> float:
    """Return the growth of a field in KiB per event: the least-squares slope over the second half of the samples."""
    values = [getattr(sample, field) / KIB for sample in samples[len(samples) // 2 :]]
    slope, _ = np.polyfit(np.arange(len(values)), values, 1)
    return float(slope)


def format_header() -> str:
    """Return the first two lines of the table."""
    columns = ["part", "events"]
    columns += [f"RSS after {number}" for number in _FIRST_EVENTS]
    columns += [f"{share:.0%}" for share in _SHARES]
    columns += ["RSS per event", "used per event", "limit", "arrays", "open files", "threads"]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def format_row(part: Part, samples: Sequence[Sample]) -> str:
    """Return the row of a part: memory in MiB, growth in KiB, and the minima of other resources in both halves."""
    count = len(samples)
    numbers = [*_FIRST_EVENTS, *(round(share * count) for share in _SHARES)]
    cells = [part.name, str(count)]
    cells += [f"{samples[min(number, count) - 1].rss_bytes / MIB:.1f}" for number in numbers]
    cells += [f"{fit_slope(samples, field):.1f}" for field in ("rss_bytes", "used_bytes")]
    cells.append(f"{part.max_used_slope:g}")
    for field, unit, digits in [("array_bytes", MIB, 2), ("num_files", 1, 0), ("num_threads", 1, 0)]:
        values = [getattr(sample, field) / unit for sample in samples]
        half = count // 2
        cells.append(f"{min(values[:half]):.{digits}f}, {min(values[half:]):.{digits}f}")
    return f"| {' | '.join(cells)} |"


def find_problems(part: Part, samples: Sequence[Sample]) -> list[str]:
    """Return what grows: the RSS beyond its limit, and other resources from one half of the events to the next."""
    problems = []
    for field, limit in [("rss_bytes", _MAX_RSS_SLOPE), ("used_bytes", part.max_used_slope)]:
        slope = fit_slope(samples, field)
        if slope > limit:
            problems.append(f"{part.name}: {field} grows by {slope:.1f} KiB per event (limit: {limit:g})")
    half = len(samples) // 2
    for field in ("array_bytes", "num_files", "num_threads"):
        before = min(getattr(sample, field) for sample in samples[:half])
        after = min(getattr(sample, field) for sample in samples[half:])
        if after > before:
            problems.append(f"{part.name}: {field} grows from {before} to {after}")
    return problems


def main() -> int:
    """Run the parts one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder for the runs; must not contain earlier ones")
    parser.add_argument("--parts", nargs="+", default=[part.name for part in PARTS], help="names of the parts to run")
    parser.add_argument("--share", type=float, default=1.0, help="share of each part's events to run")
    parser.add_argument("--dim", type=int, default=384, help="width of the model; 384 gives 82 MiB of state")
    args = parser.parse_args()
    problems = []
    print(format_header(), flush=True)
    for part in PARTS:
        if part.name not in args.parts:
            continue
        folder = args.folder / part.name.replace(" ", "-")
        samples = run_part(part.name, folder, round(args.share * part.count), args.dim)
        print(format_row(part, samples), flush=True)
        problems += find_problems(part, samples)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
