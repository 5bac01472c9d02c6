"""`plimsoll plan` for several targets: one table, the smallest machine that fits, or the list of all targets."""

import functools
from typing import TYPE_CHECKING, Any

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli
from plimsoll.launch.plan_common import choose_largest_stages, make_report, resolve_target, start_cpus, write_outputs
from plimsoll.launch.plan_page import build_comparison_page

if TYPE_CHECKING:
    from plimsoll.framework.plan.plan_report import PlanReport


def list_targets(argv: list[str]) -> int:
    """Print the table of targets; needs neither JAX nor a config."""
    if len(argv) > 1:
        raise cli.UsageError("--targets takes no other flags: it lists the values of --target")
    from plimsoll.framework.plan import targets
    from plimsoll.framework.terminal.tables import render

    print(render(targets.build_tables()))
    return ExitCode.DONE


def plan_several_targets(command: cli.Command, names: list[str]) -> int:
    """Plan for several targets: print one table of all, or only the smallest that fits the config.

    Args:
        command: the command line.
        names: names of the targets; empty to take all targets, with --smallest.
    """
    from plimsoll.framework.plan import compare_targets

    args = command.args
    if args.compare or args.device_memory_gib is not None or "local" in names:
        raise cli.UsageError(
            "several targets cannot be combined with --compare, --device_memory_gib or the target local"
        )
    if args.smallest:
        # Resolve all names before the first plan, because a later name may be mistyped too.
        names = (
            sorted(names, key=lambda name: compare_targets.total_bytes(resolve_target(args, name)))
            or compare_targets.list_candidates()
        )
    target_by_name = {name: resolve_target(args, name) for name in names}
    start_cpus(target_by_name.values())
    stage_by_target = choose_largest_stages(command, [target.name for target in target_by_name.values()])
    commands = {name: stage_by_target[target.name] for name, target in target_by_name.items()}
    if not args.smallest:
        _show_estimates(commands, target_by_name)
    reports = []
    left_out = {}
    for name, target in target_by_name.items():
        try:
            plan_report = _plan_if_it_may_fit(commands[name], name, target)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        reports.append(plan_report)
        if args.smallest and compare_targets.can_fit(plan_report):
            break
    any_fits = any(map(compare_targets.can_fit, reports))
    if args.smallest:
        # Show only the machine that fits, or else the largest one: the smaller ones are of no use.
        reports = [plan_report for plan_report in reports if compare_targets.can_fit(plan_report)] or reports[-1:]
        left_out = {}
    if not reports:
        raise cli.UsageError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    draw_page = functools.partial(build_comparison_page, args, f"--config={command.spec}", command.overrides, reports)
    contents = [plan_report.to_json() for plan_report in reports]
    write_outputs(args, compare_targets.table(reports, left_out), contents, draw_page)
    return ExitCode.DONE if any_fits else ExitCode.TOO_BIG


def _show_estimates(commands: dict[str, cli.Command], target_by_name: dict[str, Any]) -> None:
    """Print the estimated need on each target as soon as it is known, before slow searches and compilations."""
    from plimsoll.framework.plan import report_tables

    width = max(map(len, target_by_name))
    heading = ""
    for name, target in target_by_name.items():
        try:
            plan_report = make_report(commands[name], name, target, None, True, suggests=False)
        except ValueError:
            # The table at the end has the reason.
            continue
        if plan_report.batch is not None:
            batch = report_tables.batch_text(plan_report, plan_report.batch, per_device=False)
            # The rules of a target may change the batch.
            if batch != heading:
                print(f"estimates of {batch}")
                heading = batch
        print(f"  {name:{width}}   {report_tables.verdict(plan_report)}", flush=True)
    if heading:
        print()


def _plan_if_it_may_fit(command: cli.Command, name: str, target: Any) -> "PlanReport":
    """Return a report by the analytical estimate; by the compiler if it is installed, wanted, and worth trying."""
    from plimsoll.framework.plan import compare_targets, targets
    from plimsoll.framework.terminal.phases import phase

    args = command.args
    with phase(f"estimating {name}"):
        plan_report = make_report(command, name, target, None, True)
    if args.estimate or not targets.installed_compiler(target.platform):
        return plan_report
    # With --smallest there may be a hundred targets, and most are far too small.
    if args.smallest and not compare_targets.can_fit(plan_report):
        return plan_report
    return make_report(command, name, target, None, False)
