"""Time from command to first step of `plimsoll train`: cold (nothing compiled before) and cached.

Measured from outside, from starting the process until metrics.jsonl contains the row of step 1.
Uses only Python's standard library and tools.bench.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.contestants import overrides
from tools.bench.sizes import Size
from tools.bench.workers import ROOT, ContestantError

LIMIT_S = 1800.0
POLL_S = 0.01


def first_step_seconds(size: Size, tokens: Path, cache: Path, environment: dict[str, str]) -> float:
    """Time one start with the given compilation cache; the run is killed after its first step.

    Raises:
        ContestantError: the run ended without a step, or took longer than half an hour.
    """
    with tempfile.TemporaryDirectory() as workdir:
        metrics = Path(workdir) / "metrics.jsonl"
        log = Path(workdir) / "out"
        arguments = [
            *overrides(size, tokens),
            f"--workdir={workdir}",
            f"--config.trainer.compilation_cache={cache}",
            "--config.trainer.log_every=1",
            "--config.trainer.max_steps=3",
        ]
        with open(log, "w") as out:
            start = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "plimsoll", "train", *arguments],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            while not (metrics.exists() and "\n" in metrics.read_text()):
                if process.poll() is not None or time.perf_counter() - start > LIMIT_S:
                    raise ContestantError(f"`plimsoll train` made no step: {log.read_text()[-500:]}")
                time.sleep(POLL_S)
            return time.perf_counter() - start
        finally:
            process.kill()  # before it saves: its workdir is deleted anyway
            process.wait()


def cold_and_cached(size: Size, tokens: Path, repeats: int, environment: dict[str, str]) -> dict[str, list[float]]:
    """Return the seconds of `repeats` pairs of starts: with an empty cache, then with the cache of the cold start."""
    seconds: dict[str, list[float]] = {"cold": [], "cached": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "cached"):
                seconds[kind].append(first_step_seconds(size, tokens, Path(cache), environment))
    return seconds
