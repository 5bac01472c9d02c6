"""Speed of a training step on a CPU: ours against hand-written torch and JAX steps, in one run.

    python -m tools.bench.cpu_peers [--sizes=nanogpt-cpu,6x384,gpt2-124m,llama-26m] [--contestants=torch,plain,ours]
                                    [--rounds=20] [--steps=N] [--first_step=N] [--json=FILE]

Each contestant is a separate long-lived process. Contestants take turns of a few steps, in forward and then reverse
order, and are compared pair by pair with the first one that is installed, so other load on the machine affects the
ratios less than the times. Prints per contestant: milliseconds per step (median), speed relative to the first one in
wall-clock time and in processor time (median of the pairs, and in brackets an interval that contains the true median
with 95% probability), and seconds from starting the process to its first step. `eager` and `compiled` are transformers'
GPT-2, which is slower than hand-written torch. If torch and transformers are not installed, their rows report that
(`pip install -e '.[peers]'` installs both).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench.contestants import NAMES, missing
from tools.bench.first_step import cold_and_cached
from tools.bench.ratios import Ratio, ratio
from tools.bench.sizes import SIZES, Size, write_tokens
from tools.bench.workers import ContestantError, Hello, TimedRun, Worker, rotate

DEFAULT = ["torch", "plain", "ours"]
# One device, and no flags left over in the environment.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "HF_HUB_OFFLINE": "1"}


@dataclass
class ContestantResult:
    """Result of one contestant at one size.

    Args:
        problem: why there are no turns, or None if there are.
        hello: the contestant's own report of its model size, tokens per step and versions.
        first: seconds from starting its process to the end of its first step.
        turns: all turns, without warm-up.
    """

    problem: str | None
    hello: Hello | None
    first: float
    turns: list[TimedRun]


def compete(size: Size, names: Sequence[str], *, rounds: int, steps: int, folder: Path) -> dict[str, ContestantResult]:
    """Run all turns of all contestants at one size.

    Raises:
        ContestantError: contestants train different models or batch sizes, or a loss did not fall.
    """
    tokens = folder / f"tokens-{size.vocab}.bin"
    if not tokens.exists():
        write_tokens(tokens, size.vocab)
    results: dict[str, ContestantResult] = {}
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            results[name], worker = _start(name, size, tokens, steps, folder)
            if worker is not None:
                workers[name] = worker
        for order in rotate(list(workers), rounds):
            for name in order:
                results[name].turns.append(workers[name].run(steps))
    finally:
        for worker in workers.values():
            worker.close()
    for name in workers:
        check_loss(name, size, results[name].turns)
    return results


def _start(name: str, size: Size, tokens: Path, steps: int, folder: Path) -> tuple[ContestantResult, Worker | None]:
    """Start and warm up one contestant. A peer that cannot start becomes a row of the table; ours raises an error."""
    problem = missing(name, size.family)
    if problem is not None:
        return ContestantResult(problem, None, math.nan, []), None
    _say(f"{size.name}: starting {name}")
    workdir = folder / f"{size.name}-{name}"
    arguments = ["-m", "tools.bench.contestants", name, size.name, str(tokens), str(workdir)]
    try:
        worker = Worker(arguments, folder / f"{size.name}-{name}.log", ENVIRONMENT)
        worker.run(1)
        first = worker.seconds_since_start()
        worker.run(max(2, steps))
    except ContestantError as error:
        if name in ("plain", "ours"):
            raise
        return ContestantResult(f"failed: {error}", None, math.nan, []), None
    check_equal(name, size, worker.hello)
    return ContestantResult(None, worker.hello, first, []), worker


def check_equal(name: str, size: Size, hello: Hello) -> None:
    """Check that the contestant has the expected number of parameters and of tokens per step.

    Raises:
        ContestantError: a number differs.
    """
    expected, given = (size.num_parameters, size.tokens_per_step), (hello.parameters, hello.tokens_per_step)
    if expected != given:
        raise ContestantError(f"{name} at {size.name}: (parameters, tokens per step) = {given}, expected {expected}")


def check_loss(name: str, size: Size, turns: Sequence[TimedRun]) -> None:
    """Check that the model learns: the loss at the end is well below ln V, the loss of the first step.

    Raises:
        ContestantError: the loss did not fall.
    """
    at_end = statistics.mean(timed_run.loss for timed_run in turns[-5:])
    if not at_end < math.log(size.vocab) - 0.2:
        raise ContestantError(f"the loss of {name} at {size.name} did not fall: {at_end}; more --rounds or --steps?")


def summarize(size: Size, results: dict[str, ContestantResult], steps: int) -> list[dict[str, Any]]:
    """Return a row of JSON data per contestant. The first contestant that took turns is the reference."""
    reference = next((result.turns for result in results.values() if result.turns), [])
    rows = []
    for name, result in results.items():
        row: dict[str, Any] = {"contestant": name, "problem": result.problem}
        if result.problem is None and result.hello is not None:
            turns = result.turns
            wall: Ratio = ratio([t.seconds for t in reference], [t.seconds for t in turns])
            cpu: Ratio = ratio([t.cpu_seconds for t in reference], [t.cpu_seconds for t in turns])
            seconds = statistics.median(t.seconds for t in turns) / steps
            row |= {
                "parameters": result.hello.parameters,
                "tokens_per_step": result.hello.tokens_per_step,
                "versions": result.hello.versions,
                "ms_per_step": 1e3 * seconds,
                "cpu_ms_per_step": 1e3 * statistics.median(t.cpu_seconds for t in turns) / steps,
                "gflops": size.flops_per_step / seconds / 1e9,
                "speed": asdict(wall),
                "speed_cpu": asdict(cpu),
                "start_s": result.first,
                "losses": [math.log(size.vocab), statistics.mean(t.loss for t in turns[-5:])],
                "turns": [[t.seconds, t.cpu_seconds] for t in turns],
                "is_reference": turns is reference,
            }
        rows.append(row)
    return rows


HEADER = [
    "contestant",
    "ms/step",
    "cpu ms/step",
    "GFLOP/s",
    "speed (wall)",
    "speed (processor time)",
    "process to step 1",
    "loss",
]


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of one size's rows, header first."""
    lines = [HEADER]
    for row in rows:
        name = NAMES[row["contestant"]]
        if row["problem"] is not None:
            lines.append([name, row["problem"], *[""] * (len(HEADER) - 2)])
            continue
        cells = [f"{row['ms_per_step']:.1f}", f"{row['cpu_ms_per_step']:.1f}", f"{row['gflops']:.0f}"]
        cells += [str(_ratio(row[key])) if not row["is_reference"] else "1" for key in ("speed", "speed_cpu")]
        cells += [f"{row['start_s']:.1f} s", f"{row['losses'][0]:.3f} -> {row['losses'][1]:.3f}"]
        lines.append([name, *cells])
    return lines


def _ratio(fields: dict[str, Any]) -> Ratio:
    return Ratio(fields["median"], tuple(fields["quartiles"]), tuple(fields["interval"]), fields["pairs"])


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Format a markdown table that is also readable as plain text."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * width for width in widths]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in [lines[0], rule, *lines[1:]]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def describe(size: Size) -> str:
    """Return the line above the table."""
    shape = f"{size.layers} layers, {size.heads} heads ({size.kv_heads} of keys), width {size.dim}"
    batch = f"{size.seq_len} positions, batch {size.batch}, vocabulary {size.vocab}"
    count = f"{size.num_parameters:,} parameters, {size.tokens_per_step} tokens"
    return (
        f"{size.name}: {shape}, {batch}: {count} and {size.flops_per_step / 1e9:.1f} GFLOP per step, the same for all"
    )


def machine() -> dict[str, Any]:
    """Describe the machine."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "processor": names[0].split(":", 1)[1].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _names(text: str, valid: Sequence[str]) -> list[str]:
    names = text.split(",")
    wrong = [name for name in names if name not in valid]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(valid)}")
    return names


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: _names(text, list(SIZES)), default=list(SIZES))
    parser.add_argument("--contestants", type=lambda text: _names(text, list(NAMES)), default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=20, help="number of turns of each contestant")
    parser.add_argument("--steps", type=int, help="steps per turn; default: depends on the size")
    parser.add_argument(
        "--first_step", type=int, default=3, metavar="N", help="number of starts of `plimsoll train`, cold and cached"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all turns, versions, date and command to FILE"
    )
    args = parser.parse_args(argv)
    if len(args.contestants) < 2:
        parser.error("--contestants: expected two or more; they are compared with the first one")
    # On SIGTERM Python would exit by default without cleaning up; exiting this way also stops the contestants.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    record: dict[str, Any] = {
        "command": " ".join(["python -m tools.bench.cpu_peers", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "sizes": {},
    }
    print(
        f"{record['date']}, {record['machine']['processor']}, {record['machine']['cores']} cores: {record['command']}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in args.sizes:
            size = SIZES[name]
            steps = args.steps or size.steps
            results = compete(size, args.contestants, rounds=args.rounds, steps=steps, folder=Path(folder))
            rows = summarize(size, results, steps)
            print(f"\n{describe(size)}; {args.rounds} turns of {steps} steps\n\n{markdown(table(rows))}", flush=True)
            record["sizes"][name] = {"shape": asdict(size), "steps": steps, "rows": rows}
            if args.first_step:
                tokens = Path(folder) / f"tokens-{size.vocab}.bin"
                seconds = cold_and_cached(size, tokens, args.first_step, ENVIRONMENT)
                record["sizes"][name]["command_to_first_step_s"] = seconds
                cold, cached = (f"{statistics.median(seconds[kind]):.1f} s" for kind in ("cold", "cached"))
                print(f"\n`plimsoll train`, from command to first step (median of {args.first_step}): cold {cold}, "
                      f"cached {cached}", flush=True)  # fmt: skip
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    versions = {
        k: v for size in record["sizes"].values() for row in size["rows"] for k, v in row.get("versions", {}).items()
    }
    print("\nversions: " + ", ".join(f"{package} {version}" for package, version in sorted(versions.items())))


if __name__ == "__main__":
    main()
