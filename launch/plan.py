"""Tell what a run will need on any machine, without having it: compile its very step with that machine's compiler.

    plimsoll plan --config=llama2-7b --target=v5e-16 --config.memory.remat=full
    plimsoll plan --config=gpt2-124m --target=rtx4090 --compare memory.remat=none,dots,full --html=plan.html
    plimsoll plan --targets

Exit codes: 0 it fits (of several, one does); 2 the command or the config was wrong; 4 it does not fit.
"""

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framework.files.workdir import writing
from framework.terminal.exit_codes import ExitCode
from launch import cli


def add_flags(parser: cli.Parser) -> None:
    """The flags of this verb."""
    add = parser.add_argument
    add(
        "--target",
        help="v5e-16, v5p-1024 (cores), 2xv5e-256, h200x8, 4090, cpu:8, local ...",
    )
    add("--targets", action="store_true", help="list all targets; stands alone")
    add("--estimate", action="store_true", help="the closed form alone: seconds, and less exact")
    add(
        "--compare",
        action="append",
        default=[],
        metavar="PATH=A,B",
        help="plan each value; repeatable",
    )
    add("--device_memory_gib", type=float, metavar="GIB", help="instead of what the target has")
    add("--step_only", action="store_true", help="leave out initialization and evaluation")
    add("--json", type=Path, metavar="FILE", help="write the report (of --compare: a list of them)")
    add("--html", type=Path, metavar="FILE", help="write one page with pictures")
    add("--fresh", action="store_true", help="compile again although nothing has changed")


@cli.main
def main(argv: list[str]) -> int:
    """Plans each setting, prints the tables and writes the files."""
    parser = cli.Parser("plan", __doc__)
    add_flags(parser)
    if "--targets" in argv:
        return _list_targets(argv)
    command = parser.parse(argv)
    args = command.args
    if args.target is None:
        raise cli.UsageError("--target=NAME is required; plimsoll plan --targets lists them all")
    for path in filter(None, (args.json, args.html)):
        if not path.absolute().parent.is_dir():
            raise cli.UsageError(f"no directory {path.absolute().parent} to write {path.name} into")

    # Imported late: a typo on the command line should not wait for these.
    import jax

    from framework.plan import html, report, targets
    from framework.terminal.tables import render

    targets.environment(args.target)
    cli.prepare_jax()
    # A program from the cache comes without its buffers, which the report lists.
    jax.config.update("jax_enable_compilation_cache", False)
    target = targets.resolve(args.target)
    limit = cli.gib("device_memory_gib", args.device_memory_gib) or target.limit_bytes
    commands = list(_variants(command, args.compare, target))
    if not commands:
        raise cli.UsageError("none of the combinations of --compare can be")
    for note in command.notes:
        print(note, file=sys.stderr)
    reports = [_plan(variant, target, limit) for variant in commands]
    if len(reports) == 1:
        sections = report.sections(reports[0])
    else:
        sections = [report.comparison(reports)]
    print(render(sections))
    if args.json:
        # With --compare the file holds a list, even if only one combination is left.
        content = reports if args.compare else reports[0]
        with writing(args.json):
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.html:
        with writing(args.html):
            args.html.write_text(html.page(reports))
        print(f"page: {args.html}")
    fits = any(plan_report["fits"] for plan_report in reports)
    return ExitCode.DONE if fits else ExitCode.TOO_BIG


def _list_targets(argv: list[str]) -> int:
    """Prints the table of targets; neither JAX nor a config is needed."""
    if len(argv) > 1:
        raise cli.UsageError("--targets stands alone: it lists what --target takes")
    from framework.plan import target_table
    from framework.terminal.tables import render

    print(render(target_table.sections()))
    return ExitCode.DONE


def _variants(command: cli.Command, compare: list[str], target: Any) -> Iterator[cli.Command]:
    """The command, once for each combination of compared values. Values that hold a comma are separated by ";".

    All are checked before the first one is compiled. Among several choices, combinations that cannot be are told and
    left out.
    """
    from framework.plan.suggest import check

    choices = []
    for text in compare:
        path, _, values = text.partition("=")
        if not values:
            raise cli.UsageError(f"--compare {text}: expected PATH=A,B, such as memory.remat=none,full")
        path = path.removeprefix("config.").removeprefix("--config.")
        separator = ";" if ";" in values else ","
        choices.append([(path, value) for value in values.split(separator)])
    for choice in itertools.product(*choices):
        variant = dataclasses.replace(command, overrides=[*command.overrides, *choice])
        try:
            config, _ = variant.resolve(target.name)
            check(config.instantiate(), target)
        except ValueError as error:
            # The values of a single choice were all meant; of several choices, some combinations
            # cannot be.
            if len(choices) < 2:
                raise
            settings = " ".join(map("=".join, choice))
            print(f"left out: {settings}: {error}", file=sys.stderr)
        else:
            yield variant


def _plan(command: cli.Command, target: Any, limit: int | None) -> dict[str, Any]:
    """One report: from the cache, the closed form or the compiler."""
    from framework.plan.planned import planned

    args = command.args
    config, rule_lines = command.resolve(target.name)
    settings = ["=".join(override) for override in command.overrides]
    plan_report = planned(
        command.spec,
        config,
        target,
        limit,
        name="" if args.target == "local" else args.target,
        estimate=args.estimate,
        phases=not args.step_only,
        fresh=args.fresh,
    )
    # The settings of this command line are no part of what is cached: another may lead to the same
    # config.
    return plan_report | {"settings": [*settings, *rule_lines]}


if __name__ == "__main__":
    sys.exit(main())
