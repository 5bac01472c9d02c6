"""A student with and without its teacher at equal tokens: how much of the gap between both the teacher closes.

    python -m tools.bench.distillation --workdir=runs/distillation [--seeds 0 1 2]

For each seed: `distil-tiny-teacher`, `plimsoll score` with it, `distil-tiny-alone` and `distil-tiny`, in
WORKDIR/NAME-SEED; a run that is there already is not made again, and one that was stopped goes on. Both students read
the same rows in the same order. Prints a table of nats per byte of held-out text. Under five minutes a seed on two free
CPU cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from framework.metrics.jsonl import read_metrics
from framework.terminal.tables import Section, render

TEACHER, ALONE, DISTILLED = "distil-tiny-teacher", "distil-tiny-alone", "distil-tiny"
TOP_K = 32


class Outcome(NamedTuple):
    """What one seed comes to: nats per byte of held-out text, and the seconds of all commands that ran now."""

    teacher: float
    alone: float
    distilled: float
    seconds: float

    @property
    def closed(self) -> float:
        """The share of the gap between the teacher and the student alone that the distilled student closes."""
        return (self.alone - self.distilled) / (self.alone - self.teacher)


def plimsoll(*argv: str) -> None:
    """Runs a verb. Raises CalledProcessError: it failed."""
    subprocess.run([sys.executable, "-m", "launch", *argv], check=True)


def last_loss(folder: Path, name: str) -> float | None:
    """The last value of a metric of the held-out text; None where there is none yet."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return None
    values = [row[f"eval/stdlib/{name}"] for row in read_metrics(file) if f"eval/stdlib/{name}" in row]
    return values[-1] if values else None


def trained(name: str, folder: Path, metric: str, *overrides: str) -> float:
    """Trains a config, unless it is trained; the metric of the held-out text at its end."""
    loss = last_loss(folder, metric)
    if loss is None:
        plimsoll("train", f"--config={name}", f"--workdir={folder}", *overrides)
        loss = last_loss(folder, metric)
    assert loss is not None
    return loss


def outcome(seed: int, workdir: Path, overrides: list[str]) -> Outcome:
    """Trains teacher and students of one seed."""
    begin = time.monotonic()
    seeded = [f"--config.trainer.seed={seed}", f"--config.data.seed={seed}"]
    teacher = workdir / f"{TEACHER}-{seed}"
    scores = workdir / f"scores-{seed}"
    teacher_loss = trained(TEACHER, teacher, "loss", *seeded)
    alone_loss = trained(ALONE, workdir / f"{ALONE}-{seed}", "loss", *seeded)
    # Where all rows are stored already, this adds none.
    place = f"--config.companion.path={scores}"
    plimsoll(
        "score", f"--workdir={teacher}", f"--config={DISTILLED}", f"--top_k={TOP_K}", f"--out={scores}", place, *seeded
    )
    distilled_loss = trained(DISTILLED, workdir / f"{DISTILLED}-{seed}", "nll", place, *seeded, *overrides)
    return Outcome(teacher_loss, alone_loss, distilled_loss, time.monotonic() - begin)


def main(argv: list[str]) -> int:
    """Prints the table; 0 where at least half of the gap is closed for each seed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, overrides = parser.parse_known_args(argv)
    table = [["seed", "teacher", "student alone", "student distilled", "gap closed", "seconds"]]
    outcomes = []
    for seed in args.seeds:
        result = outcome(seed, args.workdir, overrides)
        outcomes.append(result)
        losses = [f"{loss:.4f}" for loss in result[:3]]
        table.append([str(seed), *losses, f"{result.closed:.0%}", f"{result.seconds:.0f}"])
    about = [["versions", f"jax {version('jax')}, jaxlib {version('jaxlib')}"]]
    print(render([Section("nats per byte of the held-out text", table), Section("about", about)]), end="")
    return 0 if all(result.closed >= 0.5 for result in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
