"""Endurance test: kills a process of a training run again and again, and compares the final result.

    python -m tools.endurance --folder=/tmp/endurance --minutes=10 --every=60

Trains `nanogpt-cpu` with `plimsoll local` in four processes, first undisturbed, then with a SIGKILL to a randomly
chosen process every --every seconds. Prints, as Markdown, a row for each restart, the committed steps of both runs, and
whether every loss that was ever logged is bitwise equal to the undisturbed run's. Exit code 1: fewer than 85% of the
steps, or different bits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plimsoll.framework.metrics.jsonl import read_metrics

ROOT = Path(__file__).parents[1]
LEAST = 0.85
FLAGS = [
    "--config=nanogpt-cpu",
    "--config.mesh.data=2",
    "--config.mesh.fsdp=2",
    "--config.trainer.max_steps=1000000",
    "--config.learner.optimizer.learning_rate.steps=2000",
    "--config.trainer.eval_every=None",
    "--config.trainer.log_every=1",
    "--config.trainer.save_every=1000000",
    "--config.trainer.save_every_minutes=0.05",
    "--config.health.status_seconds=2",
]


@dataclass
class Kill:
    """One kill, and the events that the run's output reports afterwards: seconds since the epoch, and steps."""

    at: float
    process: int
    found: float | None = None  # the launcher reports that a process has died
    ended: float | None = None  # all other processes have ended
    resumed: float | None = None  # the state is restored
    first: float | None = None  # the first step afterwards is done
    reached: int = 0  # the last step that was logged before the kill
    back_to: int = 0  # the step that the run resumes from


@dataclass
class KilledRun:
    """A `plimsoll local` run in a folder; its output is read as it arrives."""

    workdir: Path
    processes: int
    kills: list[Kill] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    logged: dict[int, set[float]] = field(default_factory=dict)  # every loss that was ever in metrics.jsonl

    def start(self) -> None:
        """Start the run; `stop` ends it."""
        argv = [f"--workdir={self.workdir}", f"--processes={self.processes}", "--grace=0.2", "--max_restarts=20"]
        command = [sys.executable, "-P", "-m", "plimsoll", "local", *FLAGS, *argv]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read_output)
        self._reader.start()

    def kill(self, index: int) -> None:
        """Send SIGKILL to one process, unless it has already ended."""
        self.note_losses()
        self.kills.append(Kill(time.time(), index, reached=max(self.logged, default=0)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[index], signal.SIGKILL)

    def stop(self) -> int:
        """Send SIGTERM like a scheduler, so that the run saves its last step; return the newest checkpoint's step."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self._reader.join()
        self.note_losses()
        return max(int(path.name) for path in (self.workdir / "checkpoints").glob("[0-9]*") if path.name.isdigit())

    def note_losses(self) -> None:
        """Record the losses in metrics.jsonl now, because a resume drops the rows of steps that are repeated."""
        path = self.workdir / "metrics.jsonl"
        for row in read_metrics(path) if path.exists() else []:
            if "train/loss" in row:
                self.logged.setdefault(row["step"], set()).add(row["train/loss"])

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        with open(f"{self.workdir}.out", "w") as copy:
            for line in self.process.stdout:
                now = time.time()
                print(f"{now:.2f} {line}", end="", file=copy, flush=True)
                self._note(line, now)

    def _note(self, line: str, now: float) -> None:
        if "started, pids" in line:
            self.pids = [int(pid) for pid in re.findall(r"\d+", line.partition("pids")[2])]
        if not self.kills:
            return
        kill = self.kills[-1]
        if "was killed by SIGKILL at" in line and kill.ended is None:
            later = re.search(r"all ended ([\d.]+) s later", line)
            kill.ended = now
            kill.found = now - float(later[1]) if later else now
        elif (step := re.search(r"resumed from step (\d+)", line)) and kill.resumed is None and kill.ended:
            kill.resumed, kill.back_to = now, int(step[1])
        elif re.search(r"\] step +\d+/", line) and kill.first is None and kill.resumed:
            kill.first = now


def main() -> int:
    """Run both runs, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for both workdirs; must not contain earlier ones"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of each run, including its first start")
    parser.add_argument("--every", type=float, default=60.0, metavar="S", help="seconds between two kills")
    parser.add_argument("--processes", type=int, default=4, help="processes of each run")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the choice of killed processes")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    # This run compiles and tokenizes in advance, so that neither of the compared runs has to.
    warm = KilledRun(args.folder / "warm", args.processes)
    warm.start()
    while not (warm.workdir / "metrics.jsonl").exists() or not (warm.workdir / "metrics.jsonl").stat().st_size:
        time.sleep(0.5)
        assert warm.process.poll() is None, f"the run has ended early; see {warm.workdir}.out"
    warm.stop()
    steps, runs = {}, {}
    for name in ("undisturbed", "killed"):
        run = runs[name] = KilledRun(args.folder / name, args.processes)
        began, draw, next_kill = time.time(), random.Random(args.seed), args.every
        run.start()
        while (passed := time.time() - began) < 60 * args.minutes:
            time.sleep(0.05)
            if name == "killed" and passed > next_kill and 60 * args.minutes - passed > args.every / 2:
                run.kill(draw.randrange(args.processes))
                next_kill += args.every
        steps[name] = run.stop()
    return report(args, steps, runs["undisturbed"], runs["killed"])


def report(args: Any, steps: dict[str, int], calm: KilledRun, killed: KilledRun) -> int:
    """Print the table and return the exit code."""
    print("| kill | process | detect s | all ended s | start s | restore to first step s | steps done again |")
    print("|---|---|---|---|---|---|---|")
    for number, kill in enumerate(killed.kills, start=1):
        times = [kill.at, kill.found, kill.ended, kill.resumed, kill.first]
        gaps = [f"{b - a:.2f}" if a and b else "-" for a, b in itertools.pairwise(times)]
        print(f"| {number} | {kill.process} | {' | '.join(gaps)} | {kill.reached - kill.back_to} |")
    compared = [step for step in killed.logged if step in calm.logged]
    other = sorted(step for step in compared if killed.logged[step] != calm.logged[step])
    share = steps["killed"] / steps["undisturbed"]
    goodput = json.loads((killed.workdir / "health" / "process-00000.json").read_text())["goodput"]
    print(
        f"\ncommitted steps in {args.minutes:g} minutes: {steps['undisturbed']} undisturbed, {steps['killed']} with ",
        end="",
    )
    print(f"{len(killed.kills)} kills: {share:.1%} (at least {LEAST:.0%})")
    print(
        f"losses: {sum(map(len, killed.logged.values()))} logged, {len(compared)} steps compared, {len(other)} differ"
    )
    print(f"seconds of the killed run: {goodput}")
    return 0 if share >= LEAST and compared and not other else 1


if __name__ == "__main__":
    sys.exit(main())
