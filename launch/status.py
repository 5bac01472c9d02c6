"""Tell how a run is: step, loss, speed, last checkpoint, where its time went, and whether its processes are well.

    python -m launch.status --workdir=runs/a
    python -m launch.status --workdir=gs://bucket/a --json

Every process says every few seconds how it is, in WORKDIR/health. Exit codes: 0 the run goes on or came to its end; 1
it does not: a process is silent, stands still or ended otherwise; 2 there is nothing to tell of.
"""

import json
import os
import sys
import time
from typing import Any

from launch import cli

_SILENT = 3.0  # times the interval at which a process writes, and at least this many seconds more


@cli.main
def main(argv: list[str]) -> int:
    """Reads what the processes wrote; starts nothing, so it can be asked anywhere that the workdir is seen."""
    parser = cli.Parser("status", __doc__, takes_config=False)
    parser.add_argument("--workdir", metavar="DIR", required=True, help="of the run")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_flags(argv)

    from framework.checkpoint.directory import folder

    found = status(folder(os.path.expanduser(args.workdir)), time.time())
    print(json.dumps(found, indent=1) if args.json else _table(found))
    return 0 if found["health"] in ("running", "done") else 1


def status(workdir: Any, now: float) -> dict[str, Any]:
    """What is known of a run at `now` (seconds since the epoch), as JSON.

    Raises:
        FileNotFoundError: no process has ever written there.
    """
    from framework.checkpoint.directory import scan
    from framework.processes.health import read

    processes = [facts for path in sorted((workdir / "health").glob("process-*.json")) if (facts := read(path))]
    if not processes:
        raise FileNotFoundError(f"--workdir: no run has written {workdir}/health")
    first = processes[0]
    steps, problems = scan(workdir / "checkpoints")
    rows = [
        {"health": _health(facts, now), **{name: facts.get(name) for name in _SHOWN}, "heard": now - facts["time"]}
        for facts in processes
        if facts["process"] < first["num_processes"]  # a start before had more of them
    ]
    states = [row["health"] for row in rows]
    missing = first["num_processes"] - len(rows)
    worst = next((state for state in states if state not in ("running", "done")), "missing" if missing else states[0])
    known = {name: first.get(name) for name in ("step", "max_steps", "loss", "attempt", "goodput", *_SPEEDS)}
    return {"workdir": str(workdir), "health": worst, **known, "checkpoints": steps, "problems": problems} | {
        "processes": rows,
        "missing": missing,
    }


_SPEEDS = ("tokens_per_second", "images_per_second")
_SHOWN = ("process", "host", "pid", "phase", "step", "exit", "reason")


def _health(facts: dict[str, Any], now: float) -> str:
    """running, done, ended (with its exit code), silent, or standing still."""
    if (code := facts.get("exit")) is not None:
        return "done" if code == 0 else f"ended with exit code {code}"
    silent = now - facts["time"]
    if silent > _SILENT * facts["interval"] + _SILENT:
        return f"silent for {silent:.0f} s"
    still, limit = facts["time"] - facts["moved"], facts.get("hang_seconds")
    return f"standing still for {still:.0f} s" if limit and still > limit / 2 and facts["limited"] else "running"


def _table(found: dict[str, Any]) -> str:
    from framework.metrics.goodput import PHASES
    from framework.terminal.tables import Section, human_count, render

    seconds: dict[str, float] = found["goodput"] or {}
    total, steps = sum(seconds.values()) or 1.0, found["checkpoints"]
    counted = next((name for name in _SPEEDS if found[name]), _SPEEDS[0])
    run = [
        ("health", found["health"]),
        ("step", f"{found['step'] if found['step'] is not None else '-'} of {found['max_steps'] or '-'}"),
        ("loss", "-" if found["loss"] is None else f"{float(found['loss']):.4f}"),
        (counted.replace("_", " "), human_count(found[counted]) if found[counted] else "-"),
        ("last checkpoint", f"step {steps[-1]}" if steps else "none"),
        ("start number", str(found["attempt"])),
        *(("checkpoints", problem) for problem in found["problems"]),
    ]
    times = [(PHASES[name], f"{value:.0f} s", f"{value / total:.1%}") for name, value in seconds.items()]
    own = [
        (str(row["process"]), f"{row['host']}:{row['pid']}", row["phase"], str(row["step"] or "-"), row["health"])
        for row in found["processes"]
    ]
    reasons = [("why", row["reason"]) for row in found["processes"] if row.get("reason")]
    missing = [("missing", f"{found['missing']} processes have written nothing")] if found["missing"] else []
    sections = [Section("run", [*run, *missing, *reasons]), Section("where the time went", times)]
    heads = ("process", "host:pid", "phase", "step", "health")
    return render([*sections, Section("processes", [heads, *own])]).rstrip()


if __name__ == "__main__":
    sys.exit(main())
