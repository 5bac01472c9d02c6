"""Kills a ladder at random moments, restarts it, and compares its results with those of an undisturbed one.

    python -m tools.kill_ladder --kills 6 --seed 0 --folder build/kill_ladder

The process group of `plimsoll ladder` gets SIGKILL, half of the times at a random moment, half of the times at a random
step of a run. ladder.json has to be equal byte for byte at the end: all losses, and the law that is fitted to them.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plimsoll.extras.scaling.ladder_record import LADDER_FILE, read_record
from plimsoll.framework.metrics.jsonl import read_metrics
from plimsoll.framework.terminal.kill_with_parent import kill_with_parent

_ROOT = Path(__file__).parents[1]
_FLAGS = (
    "--config=nanogpt-cpu",
    "--heads=1,2,3,4",
    "--steps=60",
    "--config.data.global_batch_size=4",
    "--config.trainer.eval_batches=20",
    "--config.trainer.eval_every=25",
    "--config.trainer.save_every=10",
    "--config.trainer.log_every=1",
    "--config.trainer.tensorboard=false",
)


@dataclass(frozen=True)
class Kill:
    """What a kill interrupted.

    Attributes:
        ended: number of rungs that had a loss.
        step: last step of the run that was interrupted; 0 if none had started.
        seconds: time since the start of the command.
    """

    ended: int
    step: int
    seconds: float


def start(folder: Path, flags: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `plimsoll ladder` in a process group of its own, with its output in FOLDER.out."""
    words = [sys.executable, "-m", "plimsoll", "ladder", *flags, f"--workdir={folder}"]
    with open(f"{folder}.out", "ab") as output:
        return subprocess.Popen(
            words,
            cwd=_ROOT,
            env=dict(environment),
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=kill_with_parent,
        )


def run_undisturbed(folder: Path, flags: Sequence[str], environment: Mapping[str, str]) -> float:
    """Run a ladder to its end; returns its seconds.

    Raises:
        RuntimeError: it failed.
    """
    began = time.monotonic()
    _finish(start(folder, flags, environment), folder)
    return time.monotonic() - began


def run_killed(
    folder: Path, flags: Sequence[str], environment: Mapping[str, str], *, kills: int, seconds: float, seed: int
) -> list[Kill]:
    """Run a ladder to its end, and kill it several times before.

    Args:
        folder: its workdir.
        flags: flags of `plimsoll ladder`.
        environment: environment variables.
        kills: number of kills.
        seconds: time of an undisturbed ladder.
        seed: seed of the moments.

    Returns:
        What each kill interrupted. If the ladder ends before the last kill, there are fewer.

    Raises:
        RuntimeError: it failed otherwise.
    """
    generator = random.Random(seed)
    results = []
    for index in range(kills):
        process = start(folder, flags, environment)
        began = time.monotonic()
        limit = seconds
        if index % 2 == 0:
            # Long enough for planning, short enough for several kills.
            limit = generator.uniform(0.05, 0.35) * seconds
            _wait(process, limit, lambda: False)
        else:
            ended, step = _read_progress(folder)
            # In this run, or in the next one.
            skipped = generator.randint(0, 1)
            goal = (ended + skipped, (0 if skipped else step) + generator.randint(1, 15))
            _wait(process, 2 * limit, lambda goal=goal: _read_progress(folder) >= goal)
            # Steps take milliseconds, so the moment within one is random too.
            time.sleep(generator.uniform(0, 0.05))
        if process.poll() is not None:
            if process.returncode:
                raise RuntimeError(f"the ladder failed with {process.returncode}: see {folder}.out")
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        results.append(Kill(*_read_progress(folder), time.monotonic() - began))
    _finish(start(folder, flags, environment), folder)
    return results


def _finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    code = process.wait()
    if code:
        raise RuntimeError(f"the ladder failed with {code}: see {folder}.out")


def _wait(process: subprocess.Popen[bytes], seconds: float, is_reached: Callable[[], bool]) -> None:
    """Wait until a condition holds, the process ends, or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None and not is_reached():
        time.sleep(0.01)


def _read_progress(folder: Path) -> tuple[int, int]:
    """Return the number of rungs that have a loss, and the last step of the next one."""
    if not (folder / LADDER_FILE).is_file():
        return 0, 0
    rungs = read_record(folder / LADDER_FILE).rungs
    ended = sum(rung.loss is not None for rung in rungs)
    if ended == len(rungs):
        return ended, 0
    metrics = folder / rungs[ended].name / "metrics.jsonl"
    # The last row may be half written.
    lines = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    return ended, max((row["step"] for row in read_metrics(metrics)), default=0) if lines else 0


def main() -> int:
    """Run both ladders; returns 0 if their files are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for both ladders")
    args, flags = parser.parse_known_args()
    flags = [*_FLAGS, *flags]
    args.folder.mkdir(parents=True)
    seconds = run_undisturbed(args.folder / "whole", flags, os.environ)
    print(f"undisturbed: {seconds:.0f} s", flush=True)
    broken = args.folder / "broken"
    for kill in run_killed(broken, flags, os.environ, kills=args.kills, seconds=seconds, seed=args.seed):
        print(f"killed after {kill.seconds:.1f} s: {kill.ended} rungs had ended, the next one was at step {kill.step}")
    whole_text, broken_text = ((args.folder / name / LADDER_FILE).read_bytes() for name in ("whole", "broken"))
    for rung in read_record(args.folder / "whole" / LADDER_FILE).rungs:
        print(f"{rung.name}: {rung.loss!r}")
    is_equal = whole_text == broken_text
    print("ladder.json is equal byte for byte" if is_equal else "ladder.json DIFFERS")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
