"""Breakdown of the time from command to first step of `plimsoll train`: imports, data, compiling and so on.

    python -m tools.bench.start_time                                    # nanogpt-cpu and stdlib-tiny
    python -m tools.bench.start_time --config=stdlib-tiny --repeats=3
    python -m tools.bench.start_time --config=stdlib-tiny --set=memory.update=in_backward --programs

Each config is started twice with the same command: `cold` has no compiled programs and no prepared data; `cached` has
both, from the cold start. A start ends when metrics.jsonl contains the row of the first step; the process is killed
then, before it saves anything.

A thread of the started process samples the main thread's stack every few milliseconds. It charges the processor time
that the whole process used since the last sample to the main thread's current activity. Unlike wall-clock time,
processor time does not grow with the load of a shared machine; if several threads work at the same time, it exceeds
the time that a user waits.
Uses only Python's standard library and `plimsoll train`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from tests.support.timed_output import run_module_timed
from tools.bench.workers import ROOT, ContestantError

LIMIT_S = 1800.0
SAMPLE_S = 0.004
REPORT_VARIABLE = "PLIMSOLL_START_TIME_REPORT"
DEFAULT_CONFIGS = ("nanogpt-cpu", "stdlib-tiny")
KINDS = ("cold", "cached")
# Verbs that do not need an earlier run; tools.bench.output_gaps covers all verbs.
FIRST_CHARACTERS = {
    "train": ["plimsoll.launch.train", "--config=nanogpt-cpu"],
    "plan": ["plimsoll.launch.plan", "--config=nanogpt-cpu", "--target=cpu:1"],
    "prepare": ["plimsoll.launch.prepare", "--config=nanogpt-cpu"],
    "configs": ["plimsoll", "configs", "list"],
}

# Activities of the main thread, in the order of the table.
ACTIVITIES = (
    "imports",
    "config and checks",
    "data",
    "step: tracing",
    "step: compiling",
    "other programs: tracing",
    "other programs: compiling",
    "first values, evaluation, first step: running",
    "the rest",
)
IMPORTS, CONFIG, DATA, STEP_TRACING, STEP_COMPILING, OTHER_TRACING, OTHER_COMPILING, RUNNING, REST = ACTIVITIES

# Names of JAX's functions that compile, and of those that trace and lower.
COMPILING = {"compile_or_get_cached", "backend_compile_and_load", "_cached_compilation"}
TRACING = {
    "trace_to_jaxpr",
    "trace_to_jaxpr_dynamic",
    "lower_jaxpr_to_module",
    "_create_pjit_jaxpr",
    "eval_shape",
    "make_jaxpr",
    "lower",
    "trace",
}
# Our functions that only concern the training step.
OF_STEP = {"traced_step", "compiled_step", "step_tracker", "_compile_step"}
OF_DATA = {"setup", "train_batch", "eval_batches"}
OF_RUN = {"_steps", "_initialize", "compile_evaluation"}
OF_CONFIG = {"instantiate", "parse", "resolve", "check", "report_start", "check_host"}


class Start(NamedTuple):
    """One start.

    Attributes:
      wall: seconds from the command to the first step.
      processor: processor seconds of all threads, by activity.
      programs: name and wall-clock seconds of each program that was compiled or read from the cache.
    """

    wall: float
    processor: dict[str, float]
    programs: list[tuple[str, float]]


def classify_stack(frame: FrameType | None) -> str:
    """Classify a stack by its innermost frame with a known activity, and by any frame that identifies the program."""
    action = ""
    names: set[str] = set()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") and not action:
            action = IMPORTS
        elif code.co_name in COMPILING and "/jax/" in code.co_filename and not action:
            action = "compiling"
        elif code.co_name in TRACING and "/jax/" in code.co_filename and not action:
            action = "tracing"
        elif "/framework/" in code.co_filename or "/launch/" in code.co_filename:
            names.add(code.co_name)
            if "/framework/data/" in code.co_filename and code.co_name in OF_DATA and not action:
                action = DATA
        frame = frame.f_back
    if action in ("compiling", "tracing"):
        program = "step" if names & OF_STEP else "other programs"
        return f"{program}: {action}"
    if action:
        return action
    if names & OF_RUN:
        return RUNNING
    return CONFIG if names & OF_CONFIG else REST


class Sampler(threading.Thread):
    """Charges processor time to activities until `metrics` has a new row; then writes a report and ends the process.

    Args:
        metrics: file whose first new row ends the measurement.
        report: file to write the report to.
    """

    def __init__(self, metrics: Path, report: Path):
        super().__init__(daemon=True, name="start-time")
        self._metrics, self._report = metrics, report
        self._rows = _num_rows(metrics)
        self._main = threading.main_thread().ident
        self.programs: list[tuple[str, float]] = []

    def run(self) -> None:
        processor: dict[str, float] = defaultdict(
            float, {IMPORTS: time.process_time()}
        )  # Python's own startup, and the imports of this module
        before = time.process_time()
        while _num_rows(self._metrics) <= self._rows:
            time.sleep(SAMPLE_S)
            frame = sys._current_frames().get(self._main)  # pyright: ignore[reportArgumentType]
            now = time.process_time()
            processor[classify_stack(frame)] += now - before
            before = now
        self._report.write_text(json.dumps({"processor": processor, "programs": self.programs}))
        os._exit(0)

    def on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Record compile durations, as a listener of jax.monitoring."""
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs.append((str(kwargs.get("fun_name", "?")), duration_secs))


def _num_rows(path: Path) -> int:
    try:
        return path.read_text().count('"train/loss"')
    except FileNotFoundError:
        return 0


def train_with_sampler(report: Path, arguments: list[str]) -> int:
    """Run `plimsoll train` with these arguments in the started process, while sampling it."""
    workdir = next(text.partition("=")[2] for text in arguments if text.startswith("--workdir="))
    sampler = Sampler(Path(workdir) / "metrics.jsonl", report)
    sampler.start()
    from plimsoll.launch import train  # imported first, as `plimsoll train` does

    # isort: split
    import jax.monitoring

    jax.monitoring.register_event_duration_secs_listener(sampler.on_duration)
    return train.main(arguments)


def one_start(config: str, overrides: list[str], workdir: Path, cache: Path) -> Start:
    """Start, measure and end one run. Raises ContestantError if it made no step."""
    report = workdir.parent / f"{workdir.name}.report.json"
    report.unlink(missing_ok=True)
    # A run that resumes truncates another run's rows, so the first new row would be that of the second step.
    (workdir / "metrics.jsonl").unlink(missing_ok=True)
    arguments = [
        f"--config={config}",
        f"--workdir={workdir}",
        f"--config.trainer.compilation_cache={cache}",
        "--config.trainer.log_every=1",
        *(f"--config.{override}" for override in overrides),
    ]
    start = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "tools.bench.start_time", *arguments],
        cwd=ROOT,
        env={**os.environ, REPORT_VARIABLE: str(report)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    wall = time.perf_counter() - start
    if not report.exists():
        raise ContestantError(f"`plimsoll train` made no step: {process.stdout[-500:]}{process.stderr[-1500:]}")
    facts = json.loads(report.read_text())
    return Start(wall, facts["processor"], [(name, seconds) for name, seconds in facts["programs"]])


def starts(config: str, overrides: list[str]) -> dict[str, Start]:
    """Run a start of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        return {kind: one_start(config, overrides, root / "run", root / "programs") for kind in KINDS}


def table(config: str, repeats: list[dict[str, Start]]) -> list[str]:
    """Return the markdown table of a config, from the repeats with the least time."""
    kinds = list(repeats[0])
    lines = [f"| {config}, seconds of processor time | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]

    def row(name: str, value: dict[str, float]) -> str:
        return f"| {name} | {' | '.join(f'{value[kind]:.1f}' for kind in kinds)} |"

    best = {kind: min((starts[kind] for starts in repeats), key=lambda s: sum(s.processor.values())) for kind in kinds}
    for activity in ACTIVITIES:
        lines.append(row(activity, {kind: best[kind].processor.get(activity, 0.0) for kind in kinds}))
    lines.append(row("**all**", {kind: sum(best[kind].processor.values()) for kind in kinds}))
    lines.append(row("wall time", {kind: min(starts[kind].wall for starts in repeats) for kind in kinds}))
    counts = " | ".join(str(len(best[kind].programs)) for kind in kinds)
    return [*lines, f"| programs compiled or read | {counts} |"]


def first_characters(repeats: int) -> list[str]:
    """Return a markdown table of wall-clock seconds until each verb's first output: the minimum of the repeats."""
    lines = ["| wall seconds until the first character | in a pipe | on a terminal |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        place = {"train": f"--workdir={folder}/run", "prepare": f"--out={folder}/tokens"}
        for verb, argv in FIRST_CHARACTERS.items():
            flags = [place[verb]] if verb in place else []
            best = []
            for terminal in (False, True):
                outputs = [
                    run_module_timed([*argv, *flags], terminal=terminal, until_first=True) for _ in range(repeats)
                ]
                best.append(min(one.first for one in outputs))
            lines.append(f"| {verb} | {' | '.join(f'{seconds:.2f}' for seconds in best)} |")
    return lines


def main() -> int:
    """Measure and print."""
    if report := os.environ.get(REPORT_VARIABLE):
        return train_with_sampler(Path(report), sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", action="append", metavar="NAME", help=f"config to start; default: {', '.join(DEFAULT_CONFIGS)}"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a field of the config; repeatable"
    )
    parser.add_argument("--repeats", type=int, default=1, help="number of starts; the fastest one counts")
    parser.add_argument("--programs", action="store_true", help="list the programs that a cold start compiles")
    args = parser.parse_args()
    for config in args.config or DEFAULT_CONFIGS:
        repeats = [starts(config, args.set) for _ in range(args.repeats)]
        print("\n".join(table(config, repeats)), flush=True)
        if args.programs:
            for kind, start in repeats[0].items():
                longest = sorted(start.programs, key=lambda program: -program[1])[:25]
                print(f"\n{kind}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in longest))
        print()
    print("\n".join(first_characters(args.repeats)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
