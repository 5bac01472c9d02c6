"""`plimsoll plan --from FILE`: the plan of a run of another framework."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.install_hints import install_extra
from plimsoll.launch import cli
from plimsoll.launch.plan_common import check_files, make_report, resolve_target, start_cpus, write_outputs

if TYPE_CHECKING:
    from plimsoll.extras.other_frameworks.foreign_run import ForeignRun
    from plimsoll.framework.plan.plan_report import PlanReport

# Flags of `plan` that search for settings of our own program, or take another source of the run.
_REFUSED = (
    *("auto", "largest", "longest", "smallest", "compare", "picture", "allow", "function", "estimate"),
    *("check", "baseline", "markdown", *cli.DATA_FLAGS),
)
# Names of settings in one line of the output.
_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class ForeignPlan:
    """The plan of a run for one target."""

    run: ForeignRun
    command: cli.Command
    target: Any
    report: PlanReport


def plan_foreign(parser: cli.Parser, argv: Sequence[str]) -> int:
    """Plan a run of another framework for one or several targets.

    Args:
        parser: the parser of `plan`.
        argv: the command line.
    """
    args, paths, words, overrides = _split(parser, argv)
    if not (args.target or "").strip(" ,"):
        raise cli.UsageError("--target=NAME is required; run plimsoll plan --targets to list all targets")
    check_files(args)

    # Imported late, so that a typo on the command line shows immediately.
    import jax

    from plimsoll.framework.plan import compare_targets, report_tables, targets

    names = compare_targets.parse_target_names(args.target)
    if args.compiled:
        for name in names:
            platform = targets.resolve(name).platform
            if not targets.installed_compiler(platform):
                install = install_extra(f"plan-{platform}")
                raise cli.UsageError(
                    f"--compiled: no compiler for {name}: {install}; without it, the plan is an estimate"
                )
    # The file is read before JAX starts, so that its errors show immediately.
    runs = [read_for_target(paths, words, name) for name in names]
    targets.set_environment(names[0])
    cli.prepare_jax()
    # Programs loaded from the cache lack buffer information, which the report lists.
    jax.config.update("jax_enable_compilation_cache", False)
    plans = []
    left_out: dict[str, str] = {}
    machines = [resolve_target(args, name) for _, name in runs]
    start_cpus(machines)
    for (run, name), machine in zip(runs, machines, strict=True):
        try:
            plans.append(plan_run(parser, args, run, name, machine, overrides))
        except ValueError as error:
            if len(names) == 1:
                raise
            left_out[name] = str(error)
    if not plans:
        raise cli.UsageError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    reports = [plan.report for plan in plans]
    sections = [_describe(plans[0], paths)]
    sections += report_tables.sections(reports[0]) if len(names) == 1 else compare_targets.table(reports, left_out)
    contents = [{"from": _to_json(plan, paths), **plan.report.to_json()} for plan in plans]
    draw_page = functools.partial(_build_page, args, plans)
    write_outputs(args, sections, contents if len(contents) > 1 else contents[0], draw_page)
    return ExitCode.DONE if any(report.fits for report in reports) else ExitCode.TOO_BIG


def _split(
    parser: cli.Parser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[Path], list[str], list[tuple[str, str]]]:
    """Return (our flags, files, arguments in the framework's syntax, overrides of our config).

    Flags of `plan` are ours; all others are the framework's.
    """
    spec, overrides, tokens = cli.split(argv)
    if spec is not None:
        raise cli.UsageError("--from cannot be combined with --config: the file describes the run")
    known = {flag: action for flag, action in parser._option_string_actions.items() if flag != "--from"}
    ours: list[str] = []
    theirs: list[str] = []
    files: list[Path] = []
    waiting = list(tokens)
    takes_files = False
    while waiting:
        token = waiting.pop(0)
        flag, has_value, value = token.partition("=")
        if flag == "--from":
            takes_files = True
            if has_value:
                files.append(Path(value).expanduser())
            continue
        if flag in known:
            takes_files = False
            ours.append(token)
            action = known[flag]
            # A flag whose value is the next word.
            if not has_value and action.nargs is None and waiting:
                ours.append(waiting.pop(0))
            continue
        if takes_files and not token.startswith("--") and (not files or Path(token).is_file()):
            files.append(Path(token).expanduser())
            continue
        takes_files = takes_files and not token.startswith("--")
        theirs.append(token)
    if not files:
        raise cli.UsageError("--from needs a file: --from FILE [ARGS...]")
    args = parser.parse_flags(ours)
    given = [f"--{name}" for name in _REFUSED if getattr(args, name, None)]
    if "--estimate" in given:
        raise cli.UsageError("--estimate: the plan of --from is an estimate; --compiled compiles it")
    if given:
        raise cli.UsageError(
            f"--from cannot be combined with {', '.join(given)}; plan the flags that it prints instead"
        )
    return args, files, theirs, list(overrides)


def read_for_target(paths: Sequence[Path], words: Sequence[str], name: str) -> tuple[ForeignRun, str]:
    """Return (the run on a target, the target's name with the number of devices of the file if it has none)."""
    # Imported late, because reading YAML takes time.
    from plimsoll.extras.other_frameworks.foreign_run import ForeignConfigError
    from plimsoll.extras.other_frameworks.read import read_run
    from plimsoll.framework.plan import targets

    machine = targets.resolve(name)
    # h100 means as many of them as the file uses; h100x1 means one.
    is_open = machine.num_devices == 1 and machine.platform == "gpu" and not re.search(r"[x:]1$", name)
    try:
        run = read_run(paths, words, None if is_open else machine.num_devices)
    except ForeignConfigError as error:
        raise cli.UsageError(str(error)) from None
    except RecursionError:
        # An alias of YAML may be a section that contains itself.
        raise cli.UsageError(f"--from={paths[0]}: sections that are nested too deeply") from None
    if is_open and run.mesh.devices > 1:
        name = f"{name}x{run.mesh.devices}"
    return dataclasses.replace(run, machine=name), name


def plan_run(
    parser: cli.Parser,
    args: argparse.Namespace,
    run: ForeignRun,
    name: str,
    machine: Any,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    last_stage: bool = False,
) -> ForeignPlan:
    """Plan a run for one target.

    Args:
        parser: the parser of `plan`.
        args: our flags.
        run: the run.
        name: name of the target.
        machine: the target.
        overrides: overrides of our config, from the command line.
        last_stage: count the last stage of a pipeline, and not the one that needs the most.

    Raises:
        UsageError: our configs cannot describe the run.
        ValueError: our config of the run is not valid for the target.
    """
    from plimsoll.extras.other_frameworks.adjusted_report import adjust_report
    from plimsoll.extras.other_frameworks.foreign_run import ForeignConfigError
    from plimsoll.extras.other_frameworks.mapping import build_flags
    from plimsoll.framework.families import is_approximate

    try:
        flags = build_flags(run)
    except ForeignConfigError as error:
        raise cli.UsageError(str(error)) from None
    words = [f"--config={flags.config}", f"--target={name}"]
    words += [f"--config.{path}={value}" for path, value in flags.overrides.items()]
    words += [f"--config.{path}={value}" for path, value in overrides]
    command = parser.parse(words)
    for note in command.notes:
        print(note, file=sys.stderr)
    # The flags of outputs and limits are those of the command line.
    command.args = argparse.Namespace(**{**vars(args), "target": name})
    run = dataclasses.replace(run, notes=(*run.notes, *flags.notes))
    estimate = not args.compiled or is_approximate(command.named)
    # Settings that fit would be those of our program.
    command.args.verdict_only = True
    # The other framework initializes and evaluates in its own way.
    command.args.step_only = True
    limit = cli.gib("device_memory_gib", args.device_memory_gib)
    if limit is None:
        limit = machine.get_config_limit_bytes(command.resolve(machine.name)[0])
    report = make_report(command, name, machine, limit, estimate)
    config, _ = command.resolve(machine.name)
    report = adjust_report(report, run, config, machine, last_stage=last_stage)
    if not run.offloaded:
        # The memory of hosts is that of our program: its compiler, its checkpoints.
        device_fits = not report.message and (limit is None or report.needed_bytes <= limit)
        notes = [note for note in report.notes if not note.startswith("saves go through")]
        report = dataclasses.replace(report, host=None, fits=device_fits, notes=notes)
    # The flags are in the table of the run.
    report = dataclasses.replace(report, settings=[], compilable=not estimate)
    if run.framework != "MaxText":
        # It is a setting of JAX.
        report = dataclasses.replace(report, device_memory_fraction=None)
    return ForeignPlan(run, command, machine, report)


def _describe(plan: ForeignPlan, paths: Sequence[Path]) -> Any:
    """Return the table of what was read, what was not, and the flags of ours."""
    from plimsoll.extras.other_frameworks.huggingface import describe_model
    from plimsoll.framework.terminal.tables import TableSection

    run = plan.run
    files = ", ".join(map(str, paths))
    trained = {"full": "all weights", "lora": "adapters", "qlora": "adapters of a quantized model"}[run.method]
    microbatches = f", {run.accumulate} microbatches" if run.accumulate > 1 else ""
    rows = [
        ["file", f"{files}: {run.framework}"],
        ["model", f"{describe_model(run.model)}; trained: {trained}; {run.precision}"],
        ["batch", f"{run.global_rows} rows of {run.seq_len} tokens on {run.mesh.devices} devices{microbatches}"],
        ["read", _list_names(run.read)],
    ]
    if run.skipped:
        rows.append(["skipped", f"{len(run.skipped)} settings that change neither memory nor time"])
    if run.unknown:
        rows.append(["not known", f"{_list_names(run.unknown)}: if they change memory or time, the plan does not"])
    rows += [["note", note] for note in run.notes]
    if plan.report.estimated and plan.command.args.compiled:
        rows.append(["method", "estimate: the model is known by its shape only, and is not compiled"])
    elif plan.report.estimated:
        rows.append(["method", "estimate; --compiled compiles the step of our flags"])
    rows.append(["as ours", format_command(plan.command)])
    return TableSection("from", rows)


def format_command(command: cli.Command) -> str:
    """Return the command line of our own plan of a run."""
    words = [f"--config={command.spec}", f"--target={command.args.target}"]
    words += [f"--config.{path}={value}" for path, value in command.overrides]
    return "plimsoll plan " + " ".join(map(shlex.quote, words))


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _to_json(plan: ForeignPlan, paths: Sequence[Path]) -> dict[str, Any]:
    """Return the description of a run for the JSON report."""
    return {"files": list(map(str, paths)), **dataclasses.asdict(plan.run), "command": format_command(plan.command)}


def _build_page(args: argparse.Namespace, plans: Sequence[ForeignPlan]) -> str:
    from plimsoll.launch.plan_page import build_comparison_page

    plan = plans[0]
    source = f"--config={plan.command.spec}"
    return build_comparison_page(args, source, plan.command.overrides, [one.report for one in plans])
