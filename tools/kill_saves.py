"""Kills a training run within saves through a window of host memory, again and again, and compares the final result.

    python -m tools.kill_saves --folder=/tmp/kills --kills=40 [--config=nanogpt-cpu] [flags of plimsoll train]

Trains with `plimsoll train`, saving every step, first undisturbed. Then sends SIGKILL at a random moment
within a save and starts the same command again, --kills times, and lets it finish. Prints, as Markdown, a row for each
kill, how many of them hit a save that was not committed yet, and whether every loss that was ever logged and the
checksums of the last checkpoint are bitwise equal to the undisturbed run's. Exit code 1: different bits, fewer than
half of the kills within a save, a step that was lost, or leftovers of a killed save.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.framework.checkpoint import directory
from plimsoll.framework.metrics.jsonl import read_metrics

ROOT = Path(__file__).parents[1]
FLAGS = [
    "--config.data.global_batch_size=4",
    "--config.trainer.eval_every=None",
    "--config.trainer.log_every=1",
    "--config.trainer.save_every=1",
    # Pieces have at most 1 MiB, so the larger arrays of nanogpt-cpu are written in several turns.
    "--config.checkpoint.window_gib=1e-6",
]
# Seconds between two looks at the folder of checkpoints.
POLL_SECONDS = 0.001
# Seconds that a start and its first saves may take.
TIMEOUT_SECONDS = 600.0
# Share of the kills that has to hit a save before its commit.
MIN_SHARE = 0.5


@dataclass
class Kill:
    """One kill.

    Attributes:
        delay: seconds from the start of a save to the kill.
        step: step of the save that was not committed yet; None if the kill came between two saves.
        committed: newest committed step after the kill.
    """

    delay: float
    step: int | None
    committed: int


@dataclass
class SavingRun:
    """A run of `plimsoll train` that saves every step through a window.

    Attributes:
        workdir: its folder.
        max_steps: last step.
        flags: further flags of the command.
        logged: every loss that was ever in metrics.jsonl, by step.
        problems: descriptions of what went wrong.
    """

    workdir: Path
    max_steps: int
    flags: list[str]
    logged: dict[int, set[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start or resume the run, always with the same command."""
        command = [sys.executable, "-P", "-m", "plimsoll", "train", *FLAGS, f"--workdir={self.workdir}"]
        command += [f"--config.trainer.max_steps={self.max_steps}", *self.flags]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with open(f"{self.workdir}.out", "a") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        # The folder of the save that was killed is not a save of this start, which removes it.
        step = self.find_save()
        if step is not None:
            self.wait_for_commit(step)

    def wait_for_save(self) -> int | None:
        """Wait until the next save has begun and return its step; None if the run has ended."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < end:
            step = self.find_save()
            if step is not None:
                return step
            if self.process.poll() is not None:
                return None
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"no save in {TIMEOUT_SECONDS:g} s; see {self.workdir}.out")

    def wait_for_commit(self, step: int) -> None:
        """Wait until the save of `step` has ended, or the run."""
        while self.find_save() == step and self.process.poll() is None:
            time.sleep(POLL_SECONDS)

    def find_save(self) -> int | None:
        """Return the step of a save that is being written; None if there is none."""
        names = [path.name for path in (self.workdir / "checkpoints").glob("*.writing")]
        return int(names[0].partition(".")[0]) if names else None

    def find_committed(self) -> int:
        """Return the newest committed step; 0 if there is none."""
        steps, _ = directory.scan(self.workdir / "checkpoints")
        return max(steps, default=0)

    def time_saves(self) -> list[float]:
        """Return the seconds of each save until the run ends."""
        seconds = []
        while (step := self.wait_for_save()) is not None:
            began = time.monotonic()
            self.wait_for_commit(step)
            seconds.append(time.monotonic() - began)
        return seconds

    def kill_in_save(self, num_skipped: int, delay: float) -> Kill | None:
        """Send SIGKILL within a save, and note what it left; None if the run ended before.

        Args:
            num_skipped: number of saves to let pass since the start.
            delay: seconds from the start of the save to the kill.
        """
        for _ in range(num_skipped):
            step = self.wait_for_save()
            if step is None:
                return None
            self.wait_for_commit(step)
        step = self.wait_for_save()
        if step is None:
            return None
        time.sleep(delay)
        self.process.kill()
        self.process.wait()
        self.note_losses()
        kill = Kill(delay, self.find_save(), self.find_committed())
        if kill.committed < step - 1:
            self.problems.append(f"step {kill.committed} is the newest after a kill within the save of step {step}")
        return kill

    def finish(self) -> None:
        """Wait until the run has ended."""
        code = self.process.wait()
        self.note_losses()
        if code:
            self.problems.append(f"exit code {code}; see {self.workdir}.out")
        # The list of committed steps ignores the leftovers of killed saves, which the next start removes.
        leftovers = [path.name for path in (self.workdir / "checkpoints").glob("*") if not path.name.isdigit()]
        if leftovers:
            self.problems.append(f"leftovers: {leftovers}")

    def note_losses(self) -> None:
        """Record the losses in metrics.jsonl now, because a resume drops the rows of steps that are repeated."""
        path = self.workdir / "metrics.jsonl"
        for row in read_metrics(path) if path.exists() else []:
            if "train/loss" in row:
                self.logged.setdefault(row["step"], set()).add(row["train/loss"])

    def read_checksums(self) -> dict[str, object]:
        """Return the records of all leaves of the last checkpoint: shapes, dtypes and checksums."""
        step = directory.step_directory(self.workdir / "checkpoints", self.max_steps)
        manifest = step / directory.MANIFEST / directory.MANIFEST_FILE
        return json.loads(manifest.read_text())["leaves"]


def main(argv: list[str] | None = None) -> int:
    """Run both runs, one after the other, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for both workdirs; must not contain earlier ones"
    )
    parser.add_argument("--kills", type=int, default=40, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the moments")
    parser.add_argument("--config", default="nanogpt-cpu", help="config of both runs")
    args, flags = parser.parse_known_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    # A start that is killed in its first or second save gains half a step on average.
    max_steps = args.kills + 10
    flags += [f"--config={args.config}", f"--config.trainer.compilation_cache={args.folder / 'cache'}"]
    calm, killed = (SavingRun(args.folder / name, max_steps, flags) for name in ("undisturbed", "killed"))
    calm.start()
    save_seconds = calm.time_saves()
    calm.finish()
    if calm.problems:
        print(f"the undisturbed run failed: {'; '.join(calm.problems)}", file=sys.stderr)
        return 1
    # Saves take several times as long when other processes write to the same disk, so a later moment often misses one.
    window_seconds, *_ = statistics.quantiles(save_seconds, n=4)
    print(f"{max_steps} steps; a quarter of the saves take less than {window_seconds:.3f} s", flush=True)
    print("| kill | after s | within the save of step | newest step |\n|---|---|---|---|", flush=True)
    draw = random.Random(args.seed)
    kills: list[Kill] = []
    while len(kills) < args.kills:
        killed.start()
        kill = killed.kill_in_save(draw.randrange(2), draw.uniform(0.0, window_seconds))
        if kill is None:
            killed.problems.append(f"the run ended after {len(kills)} kills")
            break
        kills.append(kill)
        print(f"| {len(kills)} | {kill.delay:.3f} | {kill.step or '-'} | {kill.committed} |", flush=True)
    killed.start()
    killed.finish()
    return report(calm, killed, kills)


def report(calm: SavingRun, killed: SavingRun, kills: list[Kill]) -> int:
    """Print the result and return the exit code."""
    num_hits = sum(kill.step is not None for kill in kills)
    different_steps = [step for step in range(1, calm.max_steps + 1) if killed.logged.get(step) != calm.logged[step]]
    calm_leaves = calm.read_checksums()
    killed_leaves = killed.read_checksums()
    different_leaves = [name for name in calm_leaves if killed_leaves.get(name) != calm_leaves[name]]
    problems = [*calm.problems, *killed.problems]
    print(f"\nkills: {len(kills)}, {num_hits} before the save was committed (at least {MIN_SHARE:.0%})")
    print(f"losses: {len(calm.logged)} steps compared, {len(different_steps)} differ")
    print(f"last checkpoint: {len(calm_leaves)} checksums compared, {len(different_leaves)} differ")
    print(f"problems: {'; '.join(problems) or 'none'}")
    is_enough = num_hits >= MIN_SHARE * len(kills)
    return 0 if is_enough and not different_steps and not different_leaves and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
