"""Run all checks that need a GPU: exactness, the plan's memory, training speed and link bandwidth.

    python -m tools.bench.gpu [exact memory speed torch link largest] [--minutes=10] [--match=TEXT] [--out=gpu.jsonl]
    python -m tools.bench.gpu --table=gpu.jsonl

exact     every schedule and placement against the plain one with everything on the device, float32 and bfloat16
memory    peak device memory in use, compared with the plan of the same program
speed     tokens/s, MFU and peak: Llama 3 8B with offloaded and with resident state, and GPT-2
torch     GPT-2 in transformers and torch, compiled, bf16, compared with ours
link      bandwidth between device and pinned host memory, and the share of a transfer that computation hides
largest   a model of 65 billion parameters, and whether its loss falls

The command ends after --minutes. It runs the most valuable rows of every part first, in the order above, and then the
others. It skips a row that would take longer than the time that is left. Each row is a process with a time limit, so
a failure costs one row. The result of a row is appended to --out when the row ends, and its output to a .log file of
the same name. --table prints the table of such a file. --dry runs tiny shapes on the CPU and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import re
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from plimsoll.framework.terminal.kill_with_parent import kill_with_parent
from plimsoll.framework.terminal.tables import human_bytes
from tools.bench import gpu_rows
from tools.bench.gpu_rows import BAD, PARTS, RUNNING, Figures, Result, Row, Run

# A row's process is killed after this many times its estimated seconds.
LIMIT_FACTOR = 3.0
# A killed process ends once its pinned memory is freed.
_JOIN_SECONDS = 30.0
MACHINE = Row("machine", "machine", "machine", 40)


def measure_row(row: Row, dry: bool, seconds: float, log: Path, connection: Connection) -> None:
    """Run the process of one row.

    Args:
        row: row to measure.
        dry: whether to use tiny shapes.
        seconds: time limit. Shortly before it, the stacks of all threads are written to the log.
        log: file for the output of the process.
        connection: connection to send figures to.
    """
    # The command kills the process group: torch starts processes of its own.
    os.setsid()
    kill_with_parent()
    # Redirect the descriptors, because C++ libraries write to stdout and stderr too.
    with open(log, "ab", buffering=0) as file:
        file.write(f"=== [{row.part}] {row.name}\n".encode())
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    faulthandler.dump_traceback_later(max(0.1, seconds - 1.0))
    from tools.bench.gpu_measure import measure

    measure(row, dry, connection)


class RowProcess:
    """The process of a row, and the newest figures that it has sent.

    Args:
        row: row to measure.
        dry: whether to use tiny shapes.
        seconds_left: seconds until the command ends.
        log: file for the output of the process.
    """

    def __init__(self, row: Row, dry: bool, seconds_left: float, log: Path):
        self.row = row
        self.figures = Figures()
        limit = LIMIT_FACTOR * row.seconds
        seconds = min(limit, seconds_left)
        # The status if the process is killed at its limit.
        self._late_status = "TIMED OUT" if limit <= seconds_left else "out of time"
        self._has_ended = False
        self._start = time.monotonic()
        self.end = self._start + seconds
        context = multiprocessing.get_context("forkserver")
        self.connection, child_connection = context.Pipe(duplex=False)
        self._process = context.Process(
            target=measure_row, args=(row, dry, seconds, log, child_connection), daemon=True
        )
        self._process.start()
        child_connection.close()

    def is_done(self) -> bool:
        """Receive figures; return whether the row is done, its process has ended, or its time is up."""
        try:
            while self.connection.poll():
                self.figures = self.connection.recv()
        except EOFError:
            self._has_ended = True
        return self._has_ended or self.figures.status != RUNNING or time.monotonic() >= self.end

    def stop(self, status: str = "") -> Result:
        """Kill the process and return the row's result.

        Args:
            status: status of a row that is not done; by default, the reason why it is not.
        """
        seconds = time.monotonic() - self._start
        if self._has_ended:
            self._process.join(_JOIN_SECONDS)
        exit_code = self._process.exitcode
        assert self._process.pid is not None
        # There is no such group if the process has ended, or has only just started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        # Wait until the kernel has freed its memory, which may be most of the machine's.
        self._process.join(_JOIN_SECONDS)
        figures = self.figures
        if figures.status == RUNNING:
            if self._has_ended:
                status = "FAILED"
                message = f"its process ended with exit code {exit_code}"
            else:
                status = status or self._late_status
                message = f"killed after {seconds:.0f} s"
            figures = dataclasses.replace(figures, status=status, message=message)
        return Result(self.row, figures, round(seconds, 1))


class Session:
    """Runs rows until the time is up, and records their results.

    Args:
        out: results file; see `gpu_rows.append_result`.
        end: time.monotonic() at which the command ends.
        dry: whether to use tiny shapes.
    """

    def __init__(self, out: Path, end: float, dry: bool):
        self.results: list[Result] = []
        self._out = out
        out.parent.mkdir(parents=True, exist_ok=True)
        self.log = out.with_suffix(".log")
        self._end = end
        self._dry = dry
        # Compiling a row takes about four cores.
        self._num_workers = max(1, (os.cpu_count() or 1) // 4)

    def run(self, rows: Sequence[Row]) -> None:
        """Run rows in the given order. `exact` rows run several at a time, because they measure no time."""
        waiting = deque(rows)
        running: list[RowProcess] = []
        try:
            while waiting or running:
                while waiting and self._can_start(waiting[0], running):
                    row = waiting.popleft()
                    seconds_left = max(0.0, self._end - time.monotonic())
                    if row.seconds > seconds_left:
                        message = f"it takes about {row.seconds:.0f} s, and {seconds_left:.0f} s were left"
                        self._record(Result(row, Figures("not run", message)))
                    else:
                        running.append(self.start(row))
                if running:
                    timeout = min(one.end for one in running) - time.monotonic()
                    multiprocessing.connection.wait([one.connection for one in running], max(0.0, timeout))
                for one in [one for one in running if one.is_done()]:
                    result = one.stop()
                    running.remove(one)
                    self._record(result)
        finally:
            # After SIGTERM or Ctrl-C, keep the figures that are known.
            for one in running:
                self._record(one.stop("stopped"))

    def start(self, row: Row) -> RowProcess:
        """Start a row's process."""
        return RowProcess(row, self._dry, self._end - time.monotonic(), self.log)

    def query_machine(self) -> Figures:
        """Return the facts about the machine, or a message why there are none."""
        process = self.start(MACHINE)
        try:
            while not process.is_done():
                multiprocessing.connection.wait([process.connection], max(0.0, process.end - time.monotonic()))
        finally:
            result = process.stop("stopped")
        return result.figures

    def _can_start(self, row: Row, running: list[RowProcess]) -> bool:
        if row.part != "exact":
            return not running
        return len(running) < self._num_workers and all(one.row.part == "exact" for one in running)

    def _record(self, result: Result) -> None:
        gpu_rows.append_result(self._out, result)
        self.results.append(result)
        row = result.row
        print(f"[{row.part}] {row.name}: {result.figures.status}; {format_figures(result)}", flush=True)


def format_figures(result: Result, tokens_per_second: dict[str, float] | None = None) -> str:
    """Format a row's figures.

    Args:
        result: result of the row.
        tokens_per_second: speeds of other rows, by name.
    """
    row = result.row
    figures = result.figures
    parts: list[str] = []
    if figures.message:
        parts.append(figures.message)
    if figures.error is not None:
        parts.append(f"off by {figures.error:.0e} at {figures.worst_leaf}, losses {figures.loss_error or 0.0:.0e}")
    if figures.tokens_per_second is not None:
        parts.append(f"{figures.tokens_per_second:,.0f} tokens/s")
        other = (tokens_per_second or {}).get(row.against)
        if other:
            parts.append(f"{figures.tokens_per_second / other:.2f} times '{row.against}'")
    if figures.mfu is not None:
        parts.append(f"MFU {figures.mfu:.1%}")
    if figures.peak_bytes:
        parts.append(f"peak {human_bytes(figures.peak_bytes)}")
    if figures.plan_bytes is not None:
        error = f" ({figures.plan_bytes / figures.peak_bytes - 1:+.1%})" if figures.peak_bytes else ""
        parts.append(f"plan {human_bytes(figures.plan_bytes)}{error}")
    if figures.host_bytes:
        parts.append(f"host {human_bytes(figures.host_bytes)}")
    if figures.losses:
        parts.append(f"loss {figures.losses[0]:.2f} to {figures.losses[-1]:.2f} in {len(figures.losses)} steps")
    parts += [f"{name} {value:.2f}" for name, value in figures.transfers.items()]
    return "; ".join(parts)


def format_run(run: Run) -> str:
    """Format a run as Markdown: the date, the machine and the versions, and a table of its rows."""
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in sorted(machine.versions.items()))
    memory = f"{human_bytes(machine.limit_bytes)} for programs, " if machine.limit_bytes else ""
    host_memory = human_bytes(machine.host_memory_bytes)
    hardware = f"{machine.device}, {memory}{machine.cores} cores, {host_memory} of host memory"
    lines = [f"{run.date}, {hardware}, Python {machine.python}, {versions}; `{run.command}`:", ""]
    if run.dry:
        lines += ["dry run: the figures are not measurements", ""]
    lines += ["| part | row | result | figures | s |", "|---|---|---|---|---|"]
    speeds: dict[str, float] = {}
    for result in run.results:
        if result.figures.tokens_per_second is not None and not run.dry:
            speeds[result.row.name] = result.figures.tokens_per_second
    # Group the rows by part; within a part, they keep the order in which they ended.
    for result in sorted(run.results, key=lambda result: PARTS.index(result.row.part)):
        row = result.row
        # A "|" would end a cell.
        figures = format_figures(result, speeds).replace("|", "\\|")
        lines.append(f"| {row.part} | {row.name} | {result.figures.status} | {figures} | {result.seconds:.0f} |")
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {' '.join(PARTS)}; default all")
    parser.add_argument("--match", default="", metavar="TEXT", help="only the rows whose name contains TEXT")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for the whole command; default 10")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file to append results to")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a results file, and exit")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="profile one more step of each row of `speed`")
    parser.add_argument("--dry", action="store_true", help="run tiny shapes on the CPU")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}; the parts are {', '.join(PARTS)}")
    return args


def _name_trace(row: Row, folder: Path) -> Row:
    if row.part != "speed":
        return row
    name = re.sub(r"[^a-z0-9.]+", "-", row.name)
    return dataclasses.replace(row, trace=str(folder / f"{name}.xplane.pb"))


def _exit_on_signal(number: int, frame: object) -> None:
    # The exception ends Session.run, which kills the row's processes and records their figures.
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and print the table. Return 1 if anything was wrong, else 0."""
    start = time.monotonic()
    args = parse_arguments(argv)
    if args.table:
        print("\n\n".join(format_run(run) for run in gpu_rows.read_runs(args.table)))
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_on_signal)
    if args.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    # The fork server imports JAX once, for all rows. It is killed when this process ends.
    multiprocessing.set_forkserver_preload(["plimsoll.launch.exit_with_parent", "tools.bench.gpu_measure"])
    session = Session(args.out, start + 60.0 * args.minutes, args.dry)
    figures = session.query_machine()
    machine = figures.machine
    if machine is None:
        print(f"cannot measure: {figures.status}; {figures.message}; see {session.log}", file=sys.stderr)
        return 1
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    run = Run(date, shlex.join(["python", "-m", "tools.bench.gpu", *(argv or sys.argv[1:])]), args.dry, machine)
    gpu_rows.append_run(args.out, run)
    print(f"{machine.device}; results: {args.out}; output of the rows: {session.log}", flush=True)
    limit_bytes = machine.limit_bytes or gpu_rows.H200_BYTES
    rows = gpu_rows.order_rows(args.parts or PARTS, limit_bytes, dry=args.dry)
    rows = [row for row in rows if args.match in row.name]
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
        rows = [_name_trace(row, args.trace) for row in rows]
    try:
        session.run(rows)
    finally:
        print("\n" + format_run(dataclasses.replace(run, results=session.results)), flush=True)
    return int(any(result.figures.status in BAD for result in session.results))


if __name__ == "__main__":
    sys.exit(main())
