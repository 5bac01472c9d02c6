"""Code shared by all modes of `plimsoll plan`: devices, reports, and their output."""

import contextlib
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plimsoll.framework.files.workdir import writing
from plimsoll.framework.terminal.tables import TableSection, render
from plimsoll.launch import cli

if TYPE_CHECKING:
    from plimsoll.framework.plan.build_report import CompiledTrainStep
    from plimsoll.framework.plan.plan_report import PlanReport


@contextlib.contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Let Python's garbage collector run rarely: imports and traces create few cycles, and visiting them takes time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(500_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def check_files(args: Any) -> None:
    """Raise UsageError if an output file cannot be written."""
    for flag in ("json", "html", "markdown", "picture"):
        path = getattr(args, flag)
        if path is not None:
            cli.check_output(flag, path)


def iter_comparisons(compare: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the combinations of the values in --compare, each as overrides; one empty combination if there are none.

    Values that contain a comma are separated by ";".

    Raises:
        UsageError: one of the texts is not PATH=A,B.
    """
    values_by_path = []
    for text in compare:
        path, _, values = text.partition("=")
        if not values:
            raise cli.UsageError(f"--compare {text}: expected PATH=A,B, such as memory.remat=none,full")
        path = path.removeprefix("config.").removeprefix("--config.")
        separator = ";" if ";" in values else ","
        values_by_path.append([(path, value) for value in values.split(separator)])
    return itertools.product(*values_by_path)


def split_stages(command: cli.Command, target_name: str) -> list[cli.Command]:
    """Return the command for each shape of a batch that the stages of the data have; without stages, itself.

    Args:
        command: the command line.
        target_name: name of the target, whose rules may change the data.
    """
    from plimsoll.framework.program.stages import list_shapes

    data = command.resolve(target_name)[0].data
    if not data.takes("stages") or not data.stages:
        return [command]
    commands = []
    for stage in list_shapes(data.instantiate().stages):
        shape = [
            ("data.stages", "{}"),
            ("data.seq_len", str(stage.seq_len)),
            ("data.global_batch_size", str(stage.batch_size)),
        ]
        # The fields of a stage cannot be set where there are no stages.
        others = [(path, text) for path, text in command.overrides if not path.startswith("data.stages")]
        commands.append(replace(command, overrides=[*others, *shape]))
    return commands


def get_largest_stage(stage_commands: Sequence[cli.Command]) -> cli.Command:
    """Return the command of the stage with the most tokens per step, and of these with the longest sequences."""
    if len(stage_commands) == 1:
        return stage_commands[0]

    def count(command: cli.Command) -> tuple[int, int]:
        data = command.config.data
        return data.seq_len * data.global_batch_size, data.seq_len

    return max(stage_commands, key=count)


def choose_largest_stages(command: cli.Command, target_names: Iterable[str]) -> dict[str, cli.Command]:
    """Return the command for each target, with the largest stage of the data; print its shape if there are several.

    A search compares settings, and settings that fit the largest stage fit all. The rules of a target may change the
    data. A target whose rules do not suit the config keeps the command, and its plan reports the error.

    Args:
        command: the command line.
        target_names: names of the targets.
    """
    commands = {}
    shapes = []
    for name in target_names:
        commands[name] = command
        with contextlib.suppress(ValueError):
            stage_commands = split_stages(command, name)
            commands[name] = get_largest_stage(stage_commands)
            if len(stage_commands) > 1:
                shapes.append(describe_shape(commands[name]))
    if shapes:
        print(f"planning the largest stage: {' or '.join(dict.fromkeys(shapes))}", file=sys.stderr)
    return commands


def describe_shape(command: cli.Command) -> str:
    """Return the shape of the batches of one stage as text."""
    data = command.config.data
    return f"{data.global_batch_size:,} sequences of {data.seq_len:,} tokens"


def resolve_target(args: Any, name: str) -> Any:
    """Return the target of a name, with the host memory that the command line sets.

    Args:
        args: parsed flags.
        name: name of the target.
    """
    from plimsoll.framework.plan import targets

    target = targets.resolve(name)
    host_bytes = cli.gib("host_memory_gib", args.host_memory_gib)
    return target if host_bytes is None else replace(target, host_bytes=host_bytes)


def start_cpus(machines: Iterable[Any]) -> None:
    """Start JAX with as many CPU devices as the largest CPU target needs, because it can start only once."""
    cpus = [machine for machine in machines if machine.platform == "cpu"]
    for machine in sorted(cpus, key=lambda machine: machine.num_devices)[-1:]:
        machine.devices()


def make_report(
    command: cli.Command,
    name: str,
    target: Any,
    limit: int | None,
    estimate: bool,
    compiled_step: "CompiledTrainStep | None" = None,
    on_verdict: "Callable[[PlanReport], object] | None" = None,
    suggests: bool | None = None,
) -> "PlanReport":
    """Produce one report: from the cache, the analytical estimate or the compiler.

    Args:
        command: command whose config is planned.
        name: name of the target, as the user wrote it.
        target: the target.
        limit: bytes that one device may use; None takes what the target leaves to a program with the config's mesh.
        estimate: whether to use only the analytical estimate.
        compiled_step: the compiled step of the config, if there is one already.
        on_verdict: called with the report before the search for settings that fit, which may take long.
        suggests: whether to search for settings that fit; None for the command line's choice.
    """
    from plimsoll.framework.plan.build_report import get_report

    args = command.args
    config, rule_lines = command.resolve(target.name)
    if limit is None:
        limit = target.get_config_limit_bytes(config)
    # The settings of this command line are not cached: other command lines may lead to the same config.
    settings = [*format_overrides(command), *rule_lines]

    def show_verdict(plan_report: "PlanReport") -> None:
        if on_verdict is not None:
            on_verdict(replace(plan_report, settings=settings))

    plan_report = get_report(
        command.spec,
        config,
        target,
        limit,
        name="" if name == "local" else name,
        estimate=estimate,
        phases=not args.step_only,
        fresh=args.fresh,
        suggests=not args.verdict_only if suggests is None else suggests,
        compiled_step=compiled_step,
        on_verdict=show_verdict,
    )
    return replace(plan_report, settings=settings)


def format_overrides(command: cli.Command) -> list[str]:
    """Return the overrides of a command line in the form of a report."""
    return ["=".join(override) for override in command.overrides]


class TablePrinter:
    """Prints the tables of a plan as soon as they are known, each of them once."""

    def __init__(self) -> None:
        self._shown: list[TableSection] = []

    def show(self, sections: Sequence[TableSection]) -> None:
        """Print the tables that are not printed yet."""
        new = [section for section in sections if section not in self._shown]
        if new:
            print(render(new), flush=True)
        self._shown += new


def write_outputs(
    args: Any, sections: list[Any], content: Any, draw_page: Callable[[], str], printer: TablePrinter | None = None
) -> None:
    """Print the tables, and write the requested files.

    Args:
        args: parsed flags, with the paths of the files.
        sections: tables to print.
        content: content of the JSON file.
        draw_page: builds the HTML page; called only if the page is requested.
        printer: printer of the tables, which may have printed some of them; None if it has printed none.
    """
    (printer or TablePrinter()).show(sections)
    if args.json:
        with writing(args.json):
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.html:
        document = draw_page()
        with writing(args.html):
            args.html.write_text(document, "utf-8")
        print(f"page: {args.html}")
