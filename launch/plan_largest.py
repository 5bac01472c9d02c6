"""`plimsoll plan --largest`: the largest model of a config's family that fits the machines, and the settings for it."""

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from plimsoll.extras.autotune.settings import parse_allowed
from plimsoll.framework.config import Config
from plimsoll.framework.files.workdir import writing
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli
from plimsoll.launch.plan_common import iter_comparisons, resolve_target, start_cpus, write_outputs


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
    """Raise UsageError for flags that cannot be combined with --largest, or that require it."""
    args = command.args
    if not args.largest:
        if args.picture is not None:
            raise cli.UsageError("--picture requires --largest")
        return
    if args.auto or args.smallest or args.html:
        raise cli.UsageError("--largest cannot be combined with --auto, --smallest or --html; to plot, use --picture")
    if args.picture is not None and not args.picture.absolute().parent.is_dir():
        raise cli.UsageError(f"no directory {args.picture.absolute().parent} to write {args.picture.name} into")
    if args.allow is not None:
        parse_allowed(args.allow)
    cli.gib("host_memory_gib", args.host_memory_gib)
    list(iter_comparisons(args.compare))


def plan_largest(command: cli.Command, names: list[str]) -> int:
    """Search the frontier of each series, print the tables, and write the files.

    Args:
        command: command with --largest.
        names: names of the targets.
    """
    from plimsoll.extras.largest import frontier_tables
    from plimsoll.extras.largest.size_family import SizeFamily
    from plimsoll.extras.largest.size_frontier import FrontierSearch

    args = command.args
    machines = [resolve_target(args, name) for name in names]
    series = list(_series(command, machines))
    # Read every config before the first search starts.
    families = [SizeFamily.derive(one.command.resolve(one.target.name)[0]) for one in series]
    start_cpus(machines)
    frontiers = []
    for one, family in zip(series, families, strict=True):
        search = FrontierSearch(family, _SizeTuner(one), not args.estimate, _log)
        frontiers.append(search.run(one.name))
    title = f"{command.spec} scaled up on {', '.join(machine.name for machine in machines)}"
    content = [
        {"name": frontier.name, "failure": frontier.failure, "points": [point.to_json() for point in frontier.points]}
        for frontier in frontiers
    ]
    write_outputs(args, frontier_tables.frontier_sections(frontiers), content, str)
    if args.picture is not None:
        with writing(args.picture):
            frontier_tables.plot_frontiers(frontiers, args.picture, title)
        print(f"picture: {args.picture}")
    fits = any(frontier.points for frontier in frontiers)
    return ExitCode.DONE if fits else ExitCode.TOO_BIG


def _log(line: str) -> None:
    print(line, file=sys.stderr)


def _series(command: cli.Command, machines: list[Any]) -> Iterator[FrontierSeries]:
    """Yield a series for each machine and combination of compared values: without changes, then with allowed ones."""
    names = () if command.args.allow is None else parse_allowed(command.args.allow)
    for machine, choice in itertools.product(machines, iter_comparisons(command.args.compare)):
        variant = dataclasses.replace(command, overrides=[*command.overrides, *choice])
        name = " ".join(f"{path}={value}" for path, value in choice) or "base config"
        if len(machines) > 1:
            name = f"{machine.name}, {name}" if choice else machine.name
        yield FrontierSeries(name, variant, machine, ())
        if names:
            yield FrontierSeries(f"{name}, --allow={','.join(names)}", variant, machine, names)


class _SizeTuner:
    """Finds the fastest settings that fit, for a given model size.

    Args:
        series: series whose frontier is searched.
    """

    def __init__(self, series: FrontierSeries):
        args = series.command.args
        self._series = series
        self._target = series.target
        self._device_bytes = cli.gib("device_memory_gib", args.device_memory_gib) or series.target.limit_bytes
        self._host_bytes = cli.gib("host_memory_gib", args.host_memory_gib)

    def __call__(self, config: Config, estimate: bool) -> Any:
        """See `size_frontier.TuneFunction`."""
        from plimsoll.extras.autotune.autotune import TuningRequest, autotune
        from plimsoll.extras.autotune.settings import Machine, find_fixed_paths

        fixed = find_fixed_paths(config, self._series.command.override_paths)
        machine = Machine.derive(self._target, self._device_bytes, self._host_bytes)
        request = TuningRequest(config, machine, "memory", sorted(fixed), self._series.allowed, estimate)
        return autotune(request, self._target, host_bytes=self._host_bytes, fresh=self._series.command.args.fresh)
