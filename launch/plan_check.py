"""`plimsoll plan --check`: plans the runs that a file lists, compares them with a baseline, and writes a comment.

[[run]]
config = "llama3-8b"
target = "h100x8"
set = { "data.global_batch_size" = 64, "memory.remat" = "full" }
"""

import dataclasses
import json
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.framework.config import did_you_mean
from plimsoll.framework.files.workdir import writing
from plimsoll.framework.plan.plan_report import SCHEMA_VERSION, PlanReport
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.phases import phase
from plimsoll.framework.terminal.tables import TableSection, human_bytes, human_duration
from plimsoll.launch import cli
from plimsoll.launch.plan_common import (
    TablePrinter,
    check_files,
    get_largest_stage,
    make_report,
    resolve_target,
    split_stages,
    start_cpus,
)

_FLAGS = ("check", "baseline", "markdown", "json", "fresh")


@dataclass(frozen=True)
class CheckedRun:
    """A run of the file.

    Attributes:
        name: name in the table and in the baseline.
        config: value of --config.
        target: value of --target.
        set: {config path: value} of overrides, in order.
        must_fit: whether the command fails if the run does not fit.
        estimate: use the analytical estimate instead of the target's compiler.
        device_memory_gib: memory of one device, in GiB; None takes the target's.
        host_memory_gib: memory of each host, in GiB; None takes the target's.
    """

    config: str
    target: str
    name: str = ""
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    must_fit: bool = True
    estimate: bool = True
    device_memory_gib: float | None = None
    host_memory_gib: float | None = None

    def list_flags(self) -> list[str]:
        """Return the flags of `plimsoll plan` for this run."""
        flags = [f"--config={self.config}", f"--target={self.target}"]
        for path, value in self.set.items():
            flags.append(f"--config.{path}={value if isinstance(value, str) else json.dumps(value)}")
        if self.estimate:
            flags.append("--estimate")
        for name in ("device_memory_gib", "host_memory_gib"):
            value = getattr(self, name)
            if value is not None:
                flags.append(f"--{name}={value:g}")
        return flags


@dataclass(frozen=True)
class CheckResult:
    """The plan of a run of the file.

    Attributes:
        name: name of the run.
        must_fit: whether the command fails if the run does not fit.
        error: why there is no plan, in one line; "" if there is one.
        report: the plan; None if there is an error.
    """

    name: str
    must_fit: bool
    error: str = ""
    report: PlanReport | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and the run fits."""
        return self.report is not None and self.report.fits

    def to_json(self) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        report = None if self.report is None else self.report.to_json()
        return {"name": self.name, "must_fit": self.must_fit, "error": self.error, "report": report}


def check_plans(args: Any, build_parser: Callable[[], cli.Parser]) -> int:
    """Plan the runs of a file, print a table, and write the files.

    Args:
        args: parsed flags.
        build_parser: builds the parser of `plimsoll plan`.

    Returns:
        2 if a run cannot be planned; 4 if a run that must fit does not, or if one that fits in the baseline does not.
    """
    given = [f"--{name}" for name, value in vars(args).items() if value and name not in _FLAGS]
    if given:
        raise cli.UsageError(f"--check cannot be combined with {', '.join(given)}; the file lists the runs")
    check_files(args)
    runs = read_runs(args.check)
    base = None if args.baseline is None else read_baseline(args.baseline)
    results = _plan_runs(runs, args.fresh, build_parser)
    TablePrinter().show([build_table(results, base)])
    if args.json:
        content = {"schema_version": SCHEMA_VERSION, "checks": [result.to_json() for result in results]}
        with writing(args.json):
            args.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    if args.markdown:
        commands = {run.name: shlex.join(["plimsoll", "plan", *run.list_flags()]) for run in runs}
        with writing(args.markdown):
            args.markdown.write_text(format_markdown(args.check, results, base, commands), "utf-8")
    for result in results:
        if result.error:
            print(f"error: {result.name}: {result.error}", file=sys.stderr)
    if any(result.error for result in results):
        return ExitCode.USAGE
    return ExitCode.TOO_BIG if any(_is_failure(result, base) for result in results) else ExitCode.DONE


def read_runs(path: Path) -> list[CheckedRun]:
    """Return the runs that a file lists.

    Raises:
        UsageError: the file is not valid; the message names the run and the field.
    """
    if path.suffix.lower() == ".json":
        raise cli.UsageError(
            f"--check={path}: expected a TOML file with [[run]] tables; --baseline takes the JSON file"
        )
    try:
        with cli.reading("check", path):
            content = tomllib.loads(path.read_text("utf-8"))
    # An UnicodeDecodeError is a ValueError, too.
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise cli.UsageError(f"{path}: not valid TOML: {error}") from None
    for name in content:
        if name != "run":
            raise cli.UsageError(f"{path}: unknown table {name!r}{did_you_mean(name, ['run'])}")
    entries = content.get("run", [])
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise cli.UsageError(f"{path}: expected at least one [[run]] with config and target")
    runs = []
    for index, entry in enumerate(entries):
        runs.append(_read_run(entry, f"{path}: run {index + 1}"))
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise cli.UsageError(f"{path}: two runs are named {name!r}; give each its own name")
    return runs


def _read_run(entry: Mapping[str, Any], where: str) -> CheckedRun:
    fields = {field.name: field for field in dataclasses.fields(CheckedRun)}
    kinds = {"set": (dict,), "must_fit": (bool,), "estimate": (bool,)}
    for name, value in entry.items():
        if name not in fields:
            raise cli.UsageError(f"{where}: unknown field {name!r}{did_you_mean(name, fields)}")
        allowed = kinds.get(name, (float, int) if name.endswith("_gib") else (str,))
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            expected = {dict: "a table", bool: "true or false", str: "a string", float: "a number"}[allowed[0]]
            raise cli.UsageError(f"{where}: {name}: expected {expected}, given {value!r}")
    for name in ("config", "target"):
        if not entry.get(name, "").strip():
            raise cli.UsageError(f"{where}: {name} is required")
    if "," in entry["target"]:
        raise cli.UsageError(f"{where}: target: expected one target, given {entry['target']!r}")
    run = CheckedRun(**entry)
    return run if run.name else dataclasses.replace(run, name=f"{run.config} on {run.target}")


def read_baseline(path: Path) -> dict[str, CheckResult]:
    """Return {name of a run: its result} that --json of an earlier check wrote.

    Raises:
        UsageError: the file has other content.
    """
    try:
        with cli.reading("baseline", path):
            content = json.loads(path.read_text("utf-8"))
        results = {}
        for check in content["checks"]:
            report = None if check["report"] is None else PlanReport.from_json(check["report"])
            results[check["name"]] = CheckResult(check["name"], check["must_fit"], check["error"], report)
    except (ValueError, TypeError, KeyError):
        raise cli.UsageError(
            f"--baseline={path}: expected what `plimsoll plan --check=FILE --json={path.name}` writes"
        ) from None
    return results


def _plan_runs(runs: Sequence[CheckedRun], fresh: bool, build_parser: Callable[[], cli.Parser]) -> list[CheckResult]:
    """Plan each run; a run that cannot be planned does not stop the others."""
    # Imported late, so that a mistake in the file shows immediately.
    import jax

    from plimsoll.framework.families import is_approximate
    from plimsoll.framework.plan import targets

    targets.set_environment(",".join(run.target for run in runs))
    cli.prepare_jax()
    # Programs loaded from the cache lack buffer information, which the report lists.
    jax.config.update("jax_enable_compilation_cache", False)
    results = []
    commands: list[tuple[CheckedRun, cli.Command, Any]] = []
    for run in runs:
        try:
            command = build_parser().parse([*run.list_flags(), *(["--fresh"] if fresh else [])])
            target = resolve_target(command.args, run.target)
            commands.append((run, get_largest_stage(split_stages(command, target.name)), target))
        except (ValueError, OSError) as error:
            results.append(CheckResult(run.name, run.must_fit, str(error)))
    start_cpus(target for _, _, target in commands)
    for run, command, target in commands:
        estimate = run.estimate or is_approximate(command.named)
        try:
            limit = cli.gib("device_memory_gib", run.device_memory_gib)
            with phase(f"planning {run.name}"):
                report = make_report(command, run.target, target, limit, estimate, suggests=False)
        except (ValueError, OSError) as error:
            results.append(CheckResult(run.name, run.must_fit, str(error)))
        else:
            results.append(CheckResult(run.name, run.must_fit, report=report))
    order = [run.name for run in runs]
    return sorted(results, key=lambda result: order.index(result.name))


def _is_failure(result: CheckResult, base: Mapping[str, CheckResult] | None) -> bool:
    """Return whether a run does not fit although it must, or no longer fits."""
    return not result.fits and (result.must_fit or _stops_fitting(result, base))


def _stops_fitting(result: CheckResult, base: Mapping[str, CheckResult] | None) -> bool:
    return not result.fits and base is not None and result.name in base and base[result.name].fits


def _list_rows(results: Sequence[CheckResult], base: Mapping[str, CheckResult] | None) -> list[list[str]]:
    """Return a header, and for each run its cells; with a baseline, those of the baseline and the change too."""
    header = ["run", "batch", "base", "now", "change", "limit", "step time", "verdict"]
    rows = [header if base is not None else [cell for cell in header if cell not in ("base", "change")]]
    for result in results:
        earlier = None if base is None else base.get(result.name)
        before = None if earlier is None else earlier.report
        now = result.report
        cells = {
            "run": result.name,
            "batch": _format_batch(before, now),
            "base": "-" if before is None else human_bytes(before.needed_bytes),
            "now": "-" if now is None else human_bytes(now.needed_bytes),
            "change": _format_change(before, now),
            "limit": "-" if now is None or now.device_limit_bytes is None else human_bytes(now.device_limit_bytes),
            "step time": _format_time(before, now),
            "verdict": _format_verdict(result, earlier, base),
        }
        rows.append([cells[name] for name in rows[0]])
    return rows


def _format_batch(before: PlanReport | None, now: PlanReport | None) -> str:
    # Imported late, because it imports JAX, and a typo on the command line should show immediately.
    from plimsoll.framework.plan import report_tables

    texts = []
    for report in (before, now):
        if report is not None and report.batch is not None:
            texts.append(report_tables.batch_text(report, report.batch, per_device=False))
    return " → ".join(dict.fromkeys(texts)) or "-"


def _format_change(before: PlanReport | None, now: PlanReport | None) -> str:
    if before is None or now is None:
        return "-"
    difference = now.needed_bytes - before.needed_bytes
    if not difference:
        return "none"
    sign = "+" if difference > 0 else "-"
    share = abs(difference) / max(before.needed_bytes, 1)
    return f"{sign}{human_bytes(abs(difference))} ({sign}{share:.1%})"


def _format_time(before: PlanReport | None, now: PlanReport | None) -> str:
    times = []
    for report in (before, now):
        if report is not None and report.time is not None:
            times.append(human_duration(report.time.seconds))
    return " → ".join(dict.fromkeys(times)) or "-"


def _format_verdict(result: CheckResult, earlier: CheckResult | None, base: Mapping[str, CheckResult] | None) -> str:
    if result.error:
        return f"cannot be planned: {result.error}"
    note = "" if base is None or earlier is not None else ", new"
    if result.fits:
        return f"fits again{note}" if earlier is not None and not earlier.fits else f"fits{note}"
    report = result.report
    # If the devices have room, the host has none.
    host = ""
    if report is not None and report.host is not None and not report.host.fits:
        from plimsoll.framework.plan import report_tables

        host = f" the host ({report_tables.host_verdict(report.host).partition(': ')[2]})"
    if _stops_fitting(result, base):
        return f"NO LONGER FITS{host}"
    return f"DOES NOT FIT{host}{note}" if result.must_fit else f"does not fit{host}{note} (allowed)"


def build_table(results: Sequence[CheckResult], base: Mapping[str, CheckResult] | None) -> TableSection:
    """Return the table of all runs; memory is per device."""
    return TableSection("memory of each device", _list_rows(results, base))


def make_marker(path: Path) -> str:
    """Return the first line of the comment, by which the GitHub Action finds the one of a file to update it."""
    # Several uses of the action in a job check different files. A ">" could end the HTML comment.
    return f"<!-- plimsoll plan --check={' '.join(path.as_posix().replace('>', '').split())} -->"


def format_markdown(
    path: Path, results: Sequence[CheckResult], base: Mapping[str, CheckResult] | None, commands: Mapping[str, str]
) -> str:
    """Return a comment for a pull request.

    Args:
        path: the file that lists the runs.
        results: results of the runs.
        base: {name of a run: its result before the change}; None if there is nothing to compare with.
        commands: {name of a run: command that plans it, and looks for settings that fit}.
    """
    failures = [result for result in results if result.error or _is_failure(result, base)]
    title = f"{len(failures)} of {len(results)} fail" if failures else f"all {len(results)} pass"
    header, *rows = _list_rows(results, base)
    lines = [make_marker(path), f"### Memory plans: {title}", "", _format_row(header), "|---" * len(header) + "|"]
    for result, row in zip(results, rows, strict=True):
        mark = "❌" if result in failures else "✅" if result.fits else "⚠️"
        lines.append(_format_row([*row[:-1], f"{mark} {row[-1]}"]))
    lines += ["", "GiB are 2^30 bytes on each device, at the peak of the step."]
    too_big = [result for result in failures if not result.error]
    if too_big:
        lines += ["", "Settings that fit, if there are any, follow the verdict of:", "", "```"]
        lines += [commands[result.name].replace("```", "'''").replace("\n", " ") for result in too_big]
        lines.append("```")
    return "\n".join(lines) + "\n"


def _format_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table, in which names from a pull request add no cells, HTML or mentions."""
    escaped = []
    for cell in cells:
        text = " ".join(cell.split()).replace("&", "&amp;").replace("<", "&lt;").replace("@", "&#64;")
        for character in "\\|`*_[]":
            text = text.replace(character, f"\\{character}")
        escaped.append(text)
    return f"| {' | '.join(escaped)} |"
