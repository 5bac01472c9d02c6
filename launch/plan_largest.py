"""`plimsoll plan --largest` and `--longest`: the largest model of a config's family, or the longest row, that fits."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from plimsoll.framework.config import Config, diff
from plimsoll.framework.files.workdir import writing
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli
from plimsoll.launch.plan_common import (
    choose_largest_stages,
    iter_comparisons,
    make_report,
    resolve_target,
    start_cpus,
    write_outputs,
)
from plimsoll.launch.plan_page import build_target_page

if TYPE_CHECKING:
    from plimsoll.extras.autotune.autotune import TuningRequest, TuningResult
    from plimsoll.extras.largest.frontier import Family, Frontier, FrontierPoint
    from plimsoll.framework.plan.build_report import CompiledTrainStep
    from plimsoll.framework.plan.plan_report import BatchReport
    from plimsoll.framework.plan.throughput_curve import ThroughputCurve


class FrontierSeries(NamedTuple):
    """The inputs of one frontier.

    Attributes:
        name: name in tables and in the picture.
        command: command with the compared settings applied.
        target: target machine.
        allowed: names of the training settings that may change.
    """

    name: str
    command: cli.Command
    target: Any
    allowed: tuple[str, ...]


def check_largest(command: cli.Command) -> None:
    """Raise UsageError for flags that cannot be combined with --largest and --longest, or that require one of them."""
    args = command.args
    if not args.largest and not args.longest:
        if args.picture is not None:
            raise cli.UsageError("--picture requires --largest or --longest")
        return
    if args.largest and args.longest:
        raise cli.UsageError("--largest cannot be combined with --longest")
    if args.auto or args.smallest:
        name = "--largest" if args.largest else "--longest"
        raise cli.UsageError(f"{name} cannot be combined with --auto or --smallest")
    if args.allow is not None:
        # Imported here, because it imports JAX, and a typo on the command line should show immediately.
        from plimsoll.extras.autotune.settings import parse_allowed

        parse_allowed(args.allow)
    cli.gib("host_memory_gib", args.host_memory_gib)
    list(iter_comparisons(args.compare))


def plan_largest(command: cli.Command, names: list[str]) -> int:
    """Search the frontier of each series, print the tables, and write the files.

    Args:
        command: command with --largest or --longest.
        names: names of the targets.
    """
    from plimsoll.extras.largest import frontier_tables
    from plimsoll.extras.largest.frontier import FrontierSearch
    from plimsoll.extras.largest.size_family import SizeFamily

    args = command.args
    machines = [resolve_target(args, name) for name in names]
    series = list(_series(command, machines))
    # Read every config before the first search starts.
    families: list[Family[Any]] = []
    for one in series:
        config = one.command.resolve(one.target.name)[0]
        families.append(_derive_lengths(config) if args.longest else SizeFamily.derive(config))
    start_cpus(machines)
    frontiers = []
    tuners = [_MemberTuner(one) for one in series]
    curves = []
    for one, family, tuner in zip(series, families, tuners, strict=True):
        frontier = FrontierSearch(family, tuner, tuner.check, not args.estimate, _log).run(one.name)
        frontiers.append(frontier)
        curves.append(tuner.estimate_curve(family, frontier))
    # The tables of a single series need no name.
    names = [one.name if len(series) > 1 else "" for one in series]
    known_curves = {name: curve for name, curve in zip(names, curves, strict=True) if curve is not None}
    sections = frontier_tables.frontier_sections(frontiers)
    for name, curve in known_curves.items():
        sections += curve.sections(name)
    content = [
        _to_json(frontier, curve, one.target.num_devices)
        for one, frontier, curve in zip(series, frontiers, curves, strict=True)
    ]

    def draw_page() -> str:
        return _build_page(series, families, tuners, frontiers, known_curves)

    fits = any(frontier.points for frontier in frontiers)
    if args.html and not fits:
        # A page shows plans, and there is none.
        print(f"nothing fits, so {args.html} is not written", file=sys.stderr)
        args.html = None
    write_outputs(args, sections, content, draw_page)
    if args.picture is not None:
        change = "with longer rows" if args.longest else "scaled up"
        title = f"{command.spec} {change} on {', '.join(machine.name for machine in machines)}"
        with writing(args.picture):
            frontier_tables.plot_frontiers(frontiers, args.picture, title)
        print(f"picture: {args.picture}")
    return ExitCode.DONE if fits else ExitCode.TOO_BIG


def _to_json(frontier: Frontier, curve: ThroughputCurve | None, num_devices: int) -> dict[str, Any]:
    from plimsoll.framework.plan.plan_report import SCHEMA_VERSION

    return {
        "schema_version": SCHEMA_VERSION,
        "name": frontier.name,
        "failure": frontier.failure,
        "points": [
            point.to_json(frontier.family)
            | {"batch": dataclasses.asdict(_get_batch(frontier.family, point, num_devices))}
            for point in frontier.points
        ],
        "throughput_curve": None if curve is None else curve.to_json(),
    }


def _get_batch(family: Family[Any], point: FrontierPoint, num_devices: int) -> BatchReport:
    """Return the batch of a member under its settings, on a number of devices."""
    from plimsoll.extras.autotune.settings import with_settings
    from plimsoll.framework.layers.base import batch_shards
    from plimsoll.framework.plan.plan_report import BatchReport

    config = with_settings(family.scale_config(point.member.size), point.choice.settings)
    sizes = config.mesh.instantiate().resolve(num_devices)
    return BatchReport.make(
        config.data.global_batch_size,
        config.data.seq_len,
        config.learner.accumulate,
        row_shards=batch_shards(sizes),
        token_shards=sizes["seq"],
    )


def _derive_lengths(config: Config) -> Family[Any]:
    from plimsoll.extras.largest.length_family import LengthFamily

    family = LengthFamily.derive(config)
    if family.max_positions is not None:
        _log(
            f"the model's positions support rows of up to {family.max_positions:,} tokens; longer ones are not searched"
        )
    return family


def _build_page(
    series: Sequence[FrontierSeries],
    families: Sequence[Family[Any]],
    tuners: Sequence[_MemberTuner],
    frontiers: Sequence[Frontier],
    curves: Mapping[str, ThroughputCurve],
) -> str:
    """Build the page of the largest member of each series.

    Args:
        series: the series.
        families: the family of each series.
        tuners: the tuner of each series, with the compiled step of its largest member.
        frontiers: the frontier of each series.
        curves: {name of a series: rates at larger batches}; the name is "" if there is only one.
    """
    from plimsoll.extras.plan_page import page

    commands = []
    reports = []
    targets = []
    for one, family, tuner, frontier in zip(series, families, tuners, frontiers, strict=True):
        if frontier.points:
            chosen = _apply_size(one.command, family, frontier.points[-1])
            commands.append(chosen)
            targets.append(one.target)
            reports.append(tuner.make_report(chosen))
    if len(reports) == 1:
        return build_target_page(commands[0], commands, targets[0], reports, curves)
    return page(reports, curves=curves)


def _apply_size(command: cli.Command, family: Family[Any], point: FrontierPoint) -> cli.Command:
    """Return the command with the overrides that give a member and its settings.

    Args:
        command: command of the series.
        family: the family of the series.
        point: the member, with its settings.
    """
    changes = diff(family.config, family.scale_config(point.member.size))
    size_overrides = [(path, str(value)) for path, _, value in changes]
    return dataclasses.replace(command, overrides=[*command.overrides, *size_overrides, *point.choice.settings])


def _log(line: str) -> None:
    print(line, file=sys.stderr)


def _series(command: cli.Command, machines: list[Any]) -> Iterator[FrontierSeries]:
    """Yield a series for each machine and combination of compared values: without changes, then with allowed ones."""
    from plimsoll.extras.autotune.settings import parse_allowed

    names = () if command.args.allow is None else parse_allowed(command.args.allow)
    commands = choose_largest_stages(command, [machine.name for machine in machines])
    for machine, choice in itertools.product(machines, iter_comparisons(command.args.compare)):
        base = commands[machine.name]
        variant = dataclasses.replace(base, overrides=[*base.overrides, *choice])
        name = " ".join(f"{path}={value}" for path, value in choice) or "base config"
        if len(machines) > 1:
            name = f"{machine.name}, {name}" if choice else machine.name
        yield FrontierSeries(name, variant, machine, ())
        if names:
            yield FrontierSeries(f"{name}, --allow={','.join(names)}", variant, machine, names)


class _MemberTuner:
    """Finds the fastest settings that fit, for a member of a family.

    Args:
        series: series whose frontier is searched.
    """

    def __init__(self, series: FrontierSeries):
        args = series.command.args
        self._series = series
        self._target = series.target
        self._device_bytes = cli.gib("device_memory_gib", args.device_memory_gib) or series.target.limit_bytes
        self._host_bytes = cli.gib("host_memory_gib", args.host_memory_gib)
        # The step of the member that was compiled last, which is the largest one that fits.
        self._compiled_step: CompiledTrainStep | None = None

    def __call__(self, config: Config, estimate: bool) -> TuningResult:
        """See `frontier.TuneFunction`."""
        from plimsoll.extras.autotune.autotune import autotune

        request = self._build_request(config, estimate)
        result = autotune(request, self._target, host_bytes=self._host_bytes, fresh=self._series.command.args.fresh)
        if not estimate:
            self._compiled_step = result.compiled_step
        return result

    def check(self, config: Config) -> str:
        """See `frontier.CheckFunction`."""
        from plimsoll.extras.autotune.autotune import explain_misfit

        return explain_misfit(self._build_request(config, True), self._target, self._host_bytes)

    def _build_request(self, config: Config, estimate: bool) -> TuningRequest:
        from plimsoll.extras.autotune.autotune import TuningRequest
        from plimsoll.extras.autotune.settings import Machine, find_fixed_paths

        fixed = find_fixed_paths(config, self._series.command.override_paths)
        machine = Machine.derive(self._target, self._device_bytes, self._host_bytes)
        return TuningRequest(config, machine, "memory", sorted(fixed), self._series.allowed, estimate)

    def estimate_curve(self, family: Family[Any], frontier: Frontier) -> ThroughputCurve | None:
        """Return the rates of the largest member at larger batches; None if nothing fits, or without published rates.

        Args:
            family: the family of the series.
            frontier: the frontier of the series.
        """
        from plimsoll.extras.autotune.batch_curve import estimate_curve

        if not frontier.points:
            return None
        largest = frontier.points[-1]
        request = self._build_request(family.scale_config(largest.member.size), estimate=True)
        return estimate_curve(request, self._target, largest.choice, self._host_bytes)

    def make_report(self, command: cli.Command) -> Any:
        """Return the plan of the largest member.

        Args:
            command: command with the overrides of its size and settings.
        """
        estimate = command.args.estimate
        return make_report(command, self._target.name, self._target, self._device_bytes, estimate, self._compiled_step)
