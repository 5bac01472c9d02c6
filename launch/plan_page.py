"""The page of `plimsoll plan --html`: the additional plans that it needs, and the command line that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plimsoll.launch import cli

if TYPE_CHECKING:
    from plimsoll.extras.plan_page import PlanCommand
    from plimsoll.framework.plan.plan_report import PlanReport
    from plimsoll.framework.plan.throughput_curve import ThroughputCurve


def build_target_page(
    command: cli.Command,
    variants: Sequence[cli.Command],
    target: Any,
    reports: Sequence[PlanReport],
    curves: Mapping[str, ThroughputCurve] | None = None,
) -> str:
    """Build the page of one target: one plan with a slider over planned points, or the comparison of --compare.

    Args:
        command: the command line.
        variants: the command for each report, with its compared values applied.
        target: the target of all reports.
        reports: one report for each variant.
        curves: {name: rates at larger batches}; the name is "" if there is only one.
    """
    from plimsoll.extras.plan_page import batch_grid, memory_levers, page

    asked = describe_command(command.args, f"--config={command.spec}", command.overrides)
    if not command.args.compare:
        (report,) = reports
        config, _ = variants[0].resolve(target.name)
        points = batch_grid.plan_grid(config, target, report)
        moves = memory_levers.estimate_levers(config, target, report, memory_levers.levers(report))
        return page(reports, points=points, asked=asked, moves=moves, curves=curves)
    # If nothing else differs between the compared plans, they are the points of the slider themselves.
    compared_paths = {text.partition("=")[0].removeprefix("config.") for text in command.args.compare}
    points = []
    if compared_paths <= {batch_grid.BATCH, batch_grid.SEQUENCE}:
        points = [batch_grid.point_from_report(report) for report in reports]
    return page(reports, points=points, asked=asked)


def build_comparison_page(args: Any, source: str, overrides: cli.Overrides, reports: Sequence[PlanReport]) -> str:
    """Build the page of several targets, or of a function.

    Args:
        args: parsed flags.
        source: --config=NAME or --function=FILE.py:NAME.
        overrides: overrides of the config.
        reports: one report for each target.
    """
    from plimsoll.extras.plan_page import page

    return page(reports, asked=describe_command(args, source, overrides))


def describe_command(args: Any, source: str, overrides: cli.Overrides) -> PlanCommand:
    """Return the command line as a page shows it, without flags that only select other outputs of the report.

    Args:
        args: parsed flags.
        source: --config=NAME or --function=FILE.py:NAME.
        overrides: overrides of the config.
    """
    from plimsoll.extras.plan_page import PlanCommand

    # `plimsoll train` takes the data flag, too. With --function, there is no data.
    data_flags = cli.get_data_flags(args)
    flags = [*data_flags, *(f"--compare={text}" for text in args.compare)]
    flags += [f"--{name}" for name in ("smallest", "estimate", "step_only") if getattr(args, name)]
    limit_flags = []
    if args.device_memory_gib is not None:
        limit_flags.append(f"--device_memory_gib={args.device_memory_gib:g}")
    return PlanCommand(
        source=source,
        target=f"--target={args.target}" if args.target else "",
        settings=["=".join(override) for override in overrides],
        flags=[*flags, *limit_flags, f"--html={args.html}"],
        train_flags=[*data_flags, *limit_flags],
    )
