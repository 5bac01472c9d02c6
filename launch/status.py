"""Report the state of a run: step, loss, speed, last checkpoint, use of time, and health of its processes.

    plimsoll status --workdir=runs/a
    plimsoll status --workdir=gs://bucket/a --json

Every process records its state every few seconds in WORKDIR/health. Exit codes: 0 the run is in
progress or completed; 1 a process died, is silent, makes no progress or failed; 2 there is nothing to report.
"""

import json
import os
import sys
import time
from typing import Any

from plimsoll.framework.terminal.exit_codes import COMPLETED, ExitCode
from plimsoll.launch import cli

# A process counts as silent if it has not written for this many of its intervals plus this many seconds.
_SILENT = 3.0
# The states without a problem.
_GOOD = ("running", "done")
# The speed that process 0 records depends on the data: it is one of these.
_SPEEDS = ("tokens_per_second", "images_per_second")
# The facts of a process that are shown unchanged.
_SHOWN = ("process", "host", "pid", "phase", "step", "exit", "reason")
# Bytes of a process's host memory and of the memory of its devices, where they are known.
_MEMORY = ("rss_bytes", "rss_peak_bytes", "rss_predicted_bytes")
_DEVICE_MEMORY = ("memory/device_bytes", "memory/device_peak_bytes", "device_predicted_bytes")


@cli.main
def main(argv: list[str]) -> int:
    """Read the files that the processes wrote. Starts nothing, so it works wherever the workdir is visible."""
    parser = cli.Parser("status", __doc__, takes_config=False)
    parser.add_argument("--workdir", metavar="DIR", required=True, help="workdir of the run")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse_flags(argv)

    from plimsoll.framework.checkpoint.directory import folder

    workdir = folder(os.path.expanduser(args.workdir))
    facts = status(workdir, time.time())
    print(json.dumps(facts, indent=1) if args.json else _table(facts))
    return ExitCode.DONE if facts["health"] in _GOOD else ExitCode.FAILED


def status(workdir: Any, now: float) -> dict[str, Any]:
    """Return the state of a run at `now` (seconds since the epoch), as JSON.

    Raises:
        FileNotFoundError: no process has written to WORKDIR/health.
    """
    from plimsoll.framework.checkpoint.directory import scan
    from plimsoll.framework.processes.health import read

    processes = []
    for path in sorted((workdir / "health").glob("process-*.json")):
        facts = read(path)
        # A file that a process has just created may still be empty.
        if facts:
            processes.append(facts)
    if not processes:
        raise FileNotFoundError(f"--workdir: there is no run in {workdir}: no process has written to {workdir}/health")
    first = processes[0]
    steps, problems = scan(workdir / "checkpoints")
    # An earlier start may have had more processes, whose files still exist.
    rows = [_row(facts, now) for facts in processes if facts["process"] < first["num_processes"]]
    missing = first["num_processes"] - len(rows)
    return {
        "workdir": str(workdir),
        "health": _worst([row["health"] for row in rows], missing),
        # Process 0 records these for the whole run.
        **{name: first.get(name) for name in ("step", "max_steps", "loss", "attempt", "goodput", *_SPEEDS)},
        "checkpoints": steps,
        "problems": problems,
        "processes": rows,
        "missing": missing,
    }


def _row(facts: dict[str, Any], now: float) -> dict[str, Any]:
    """Return the state of one process, and the seconds since its last write."""
    shown_facts = {name: facts.get(name) for name in (*_SHOWN, *_MEMORY, *_DEVICE_MEMORY)}
    return {"health": _health(facts, now), **shown_facts, "heard": now - facts["time"]}


def _worst(states: list[str], missing: int) -> str:
    """Return the state of a run with processes in these states."""
    for state in states:
        if state not in _GOOD:
            return state
    return states[0] if states and not missing else "missing"


def _health(facts: dict[str, Any], now: float) -> str:
    """Classify a process as running, done, ended (with its exit code), killed, silent, or stalled."""
    from plimsoll.framework.processes.health import has_exited

    code = facts.get("exit")
    if code is not None:
        return "done" if code in COMPLETED else f"ended with exit code {code}"
    silent_seconds = now - facts["time"]
    if has_exited(facts):
        return f"ended without an exit code, as after kill -9; last heard from {silent_seconds:.0f} s ago"
    if silent_seconds > _SILENT * facts["interval"] + _SILENT:
        return f"silent for {silent_seconds:.0f} s"
    still_seconds = facts["time"] - facts["moved"]
    limit = facts.get("hang_seconds")
    # The process ends itself at the limit, so report the stall at half the limit.
    if limit and still_seconds > limit / 2 and facts["limited"]:
        return f"stalled for {still_seconds:.0f} s"
    return "running"


def _table(facts: dict[str, Any]) -> str:
    """Format the state of a run, as returned by `status`, for the terminal."""
    from plimsoll.framework.metrics.goodput import PHASES
    from plimsoll.framework.terminal.tables import TableSection, render

    run = _run_rows(facts)
    if facts["missing"]:
        run.append(("missing", f"{facts['missing']} processes have written nothing"))
    for row in facts["processes"]:
        if row.get("reason"):
            run.append(("why", row["reason"]))
    seconds: dict[str, float] = facts["goodput"] or {}
    total = sum(seconds.values()) or 1.0
    times = [(PHASES.get(name, name), f"{value:.0f} s", f"{value / total:.1%}") for name, value in seconds.items()]
    heads = ("process", "host:pid", "phase", "step", "host memory", "device memory", "health")
    processes = [_process_cells(row) for row in facts["processes"]]
    sections = [
        TableSection("run", run),
        TableSection("where the time went", times),
        TableSection("processes; memory now, at most so far, and predicted", [heads, *processes]),
    ]
    return render(sections).rstrip()


def _run_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the (name, value) rows that describe the run as a whole."""
    from plimsoll.framework.terminal.tables import human_count

    step = facts["step"] if facts["step"] is not None else "-"
    max_steps = facts["max_steps"] or "-"
    loss = "-"
    if facts["loss"] is not None:
        loss = f"{float(facts['loss']):.4f}"
    speed_name = next((name for name in _SPEEDS if facts[name]), _SPEEDS[0])
    speed = human_count(facts[speed_name]) if facts[speed_name] else "-"
    steps = facts["checkpoints"]
    rows = [
        ("health", facts["health"]),
        ("step", f"{step} of {max_steps}"),
        ("loss", loss),
        (speed_name.replace("_", " "), speed),
        ("last checkpoint", f"step {steps[-1]}" if steps else "none"),
        ("start number", str(facts["attempt"])),
    ]
    for problem in facts["problems"]:
        rows.append(("checkpoints", problem))
    return rows


def _process_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table of processes."""
    from plimsoll.framework.terminal.tables import human_bytes

    host_and_pid = f"{row['host']}:{row['pid']}"
    step = str(row["step"] or "-")
    memory = []
    for names in (_MEMORY, _DEVICE_MEMORY):
        sizes = [row.get(name) for name in names]
        memory.append(" / ".join("-" if size is None else human_bytes(size) for size in sizes))
    return str(row["process"]), host_and_pid, row["phase"], step, *memory, row["health"]


if __name__ == "__main__":
    sys.exit(main())
