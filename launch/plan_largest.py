"""`plimsoll plan --largest`: the largest model of a config's family that a machine carries, and the way there."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from framework.config import Config
from framework.plan.auto import allow
from framework.terminal.exit_codes import ExitCode
from launch import cli
from launch.plan_parts import choices_of, give


class Series(NamedTuple):
    """What one frontier is of.

    Attributes:
        name: as tables and the picture call it.
        command: with the compared settings.
        allowed: names of what may be changed of the training.
    """

    name: str
    command: cli.Command
    allowed: tuple[str, ...]


def check_largest(command: cli.Command) -> None:
    """Raises UsageError: flags that do not go with --largest, or with nothing else."""
    args = command.args
    if not args.largest:
        if args.picture is not None:
            raise cli.UsageError("--picture goes with --largest")
        return
    if args.auto or args.smallest or args.html or "," in (args.target or "").strip(" ,"):
        raise cli.UsageError("--largest is for one target, without --auto, --smallest and --html (see --picture)")
    if args.picture is not None and not args.picture.absolute().parent.is_dir():
        raise cli.UsageError(f"no directory {args.picture.absolute().parent} to write {args.picture.name} into")
    if args.allow is not None:
        allow.names_of(args.allow)
    cli.gib("host_memory_gib", args.host_memory_gib)
    list(choices_of(args.compare))


def plan_largest(command: cli.Command, name: str) -> int:
    """Looks for the frontier of each series, prints the tables, and writes the files."""
    from framework.plan import targets
    from framework.plan.largest import shown
    from framework.plan.largest.family import Family
    from framework.plan.largest.frontier import Search

    args = command.args
    target = targets.resolve(name)
    series = list(_series(command))
    # Every config is read before the first search begins.
    families = [Family.of(one.command.resolve(target.name)[0]) for one in series]
    frontiers = []
    for one, family in zip(series, families, strict=True):
        ask = _Asking(one, target)
        search = Search(family, ask, compiles=not args.estimate)
        frontiers.append(search.run(one.name, _tell))
    title = f"{command.spec} made larger on {target.name}"
    content = [
        {"name": frontier.name, "failure": frontier.failure, "points": [point.to_json() for point in frontier.points]}
        for frontier in frontiers
    ]
    give(args, shown.sections(frontiers), content, str)
    if args.picture is not None:
        _draw(shown.draw, frontiers, args.picture, title)
    fits = any(frontier.points for frontier in frontiers)
    return ExitCode.DONE if fits else ExitCode.TOO_BIG


def _draw(draw: Any, frontiers: Any, picture: Path, title: str) -> None:
    from framework.files.workdir import writing

    with writing(picture):
        draw(frontiers, picture, title)
    print(f"picture: {picture}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _series(command: cli.Command) -> Iterator[Series]:
    """One for each combination of compared values; each without, and then with, what is allowed to change."""
    names = () if command.args.allow is None else allow.names_of(command.args.allow)
    for choice in choices_of(command.args.compare):
        variant = dataclasses.replace(command, overrides=[*command.overrides, *choice])
        name = " ".join(f"{path}={value}" for path, value in choice) or "as it is"
        yield Series(name, variant, ())
        if names:
            yield Series(f"{name}, may change {', '.join(names)}", variant, names)


class _Asking:
    """Asks for the fastest settings of a size that fit.

    Args:
        series: whose frontier.
        target: the machine.
    """

    def __init__(self, series: Series, target: Any):
        args = series.command.args
        self._series = series
        self._target = target
        self._device_bytes = cli.gib("device_memory_gib", args.device_memory_gib) or target.limit_bytes
        self._host_bytes = cli.gib("host_memory_gib", args.host_memory_gib)

    def __call__(self, config: Config, estimate: bool) -> Any:
        """See `frontier.Ask`."""
        from framework.plan.auto.answer import answer
        from framework.plan.auto.choice import Machine
        from framework.plan.auto.settings import fixed_paths
        from framework.plan.auto.stored import Question

        fixed = fixed_paths(config, self._series.command.chosen)
        machine = Machine.of(self._target, self._device_bytes, self._host_bytes)
        question = Question(config, machine, "memory", sorted(fixed), self._series.allowed, estimate)
        return answer(question, self._target, host_bytes=self._host_bytes, fresh=self._series.command.args.fresh)
