"""Tell what a run will need on any machine, without having it: compile its very step with that machine's compiler.

    plimsoll plan --config=llama2-7b --target=v5e-16 --config.memory.remat=full
    plimsoll plan --config=gpt2-124m --target=rtx4090 --compare memory.remat=none,dots,full --html=plan.html
    plimsoll plan --config=hf:meta-llama/Llama-3.1-8B --target=4090,a100-80,h100,v5e-8
    plimsoll plan --config=qlora:Qwen/Qwen2.5-7B --smallest --estimate
    plimsoll plan --function=step.py:abstract_step --target=h100
    plimsoll plan --targets

Exit codes: 0 it fits (of several plans, one does; of several targets, one carries it with the settings that are
printed); 2 the command or the config was wrong; 4 it does not fit.
"""

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
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
        help="v5e-16, v5p-1024 (cores), 2xv5e-256, h200x8, 4090, cpu:8, local ...; several by commas",
    )
    add(
        "--smallest",
        action="store_true",
        help="of these targets, or of all, the one with least device memory that carries it",
    )
    add(
        "--function",
        metavar="FILE.py:NAME",
        help="plan any JAX function instead of a config: NAME() returns (function, arguments), or these and a dict of "
        "options of framework.plan_function",
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
    parser = cli.Parser("plan", __doc__, shape_is_enough=True)
    add_flags(parser)
    if "--targets" in argv:
        return _list_targets(argv)
    if any(word.partition("=")[0] == "--function" for word in argv):
        return _functions(parser.parse_flags(argv))
    command = parser.parse(argv)
    args = command.args
    if not (args.target or "").strip(" ,") and not args.smallest:
        raise cli.UsageError("--target=NAME is required; plimsoll plan --targets lists them all")
    _check_files(args)

    # Imported late: a typo on the command line should not wait for these.
    import jax

    from framework.plan import machines, targets

    names = machines.names_of(args.target or "")
    targets.environment(args.target or "")
    cli.prepare_jax()
    # A program from the cache comes without its buffers, which the report lists.
    jax.config.update("jax_enable_compilation_cache", False)
    for note in command.notes:
        print(note, file=sys.stderr)
    if args.smallest or len(names) > 1:
        return _which_machine(command, names)
    (name,) = names
    return _one_machine(command, name)


def _check_files(args: Any) -> None:
    """Raises UsageError: a file that is to be written has no folder."""
    for path in filter(None, (args.json, args.html)):
        if not path.absolute().parent.is_dir():
            raise cli.UsageError(f"no directory {path.absolute().parent} to write {path.name} into")


def _functions(args: Any) -> int:
    """Plans somebody's own function, for one target or several."""
    refused = ("config", "smallest", "estimate", "compare", "step_only")
    given = [f"--{name}" for name in refused if getattr(args, name, None)]
    if given:
        raise cli.UsageError(f"--function goes without {', '.join(given)}")
    if not args.target:
        raise cli.UsageError("--target=NAME is required; plimsoll plan --targets lists them all")
    _check_files(args)

    from framework.plan import machines, report, targets
    from framework.plan.function import plan_call

    names = machines.names_of(args.target)
    targets.environment(names[0])
    cli.prepare_jax()
    machine_by_name = {name: targets.resolve(name) for name in names}
    _start_cpus(machine_by_name.values())
    call = _call(args.function)
    reports = []
    for machine in machine_by_name.values():
        limit = cli.gib("device_memory_gib", args.device_memory_gib) or machine.limit_bytes
        reports.append(plan_call(call, machine, limit))
    sections = report.sections(reports[0]) if len(reports) == 1 else machines.table(reports, {})
    _give(args, sections, reports if len(reports) > 1 else reports[0], reports)
    fits = any(plan_report["fits"] for plan_report in reports)
    return ExitCode.DONE if fits else ExitCode.TOO_BIG


def _call(spec: str) -> Any:
    """The function and its arguments, as FILE.py:NAME has them.

    Raises:
        UsageError: there is no such file or name, or it returns something else.
    """
    import configs
    from framework.plan.function import Call

    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name:
        raise cli.UsageError(f"--function={spec}: expected FILE.py:NAME")
    made: Any = configs.find(spec)()
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3):
        raise cli.UsageError(
            f"--function={spec}: {name}() returned {type(made).__name__}; expected (function, arguments), or these and "
            "a dict of options"
        )
    function, arguments, *rest = made
    try:
        return Call(function, arguments, **dict(*rest))
    except (TypeError, ValueError) as error:
        raise cli.UsageError(f"--function={spec}: {error}") from None


def _start_cpus(machines: Iterable[Any]) -> None:
    """Starts JAX with as many CPU devices as any of the targets has: it starts once."""
    cpus = [machine for machine in machines if machine.platform == "cpu"]
    for machine in sorted(cpus, key=lambda machine: machine.num_devices)[-1:]:
        machine.devices()


def _one_machine(command: cli.Command, name: str) -> int:
    """Plans each setting for one target."""
    from framework.plan import report, targets

    args = command.args
    target = targets.resolve(name)
    limit = cli.gib("device_memory_gib", args.device_memory_gib) or target.limit_bytes
    commands = list(_variants(command, args.compare, target))
    if not commands:
        raise cli.UsageError("none of the combinations of --compare can be")
    reports = [_plan(variant, name, target, limit, args.estimate) for variant in commands]
    if len(reports) == 1:
        sections = report.sections(reports[0])
    else:
        sections = [report.comparison(reports)]
    # With --compare the file holds a list, even if only one combination is left.
    _give(args, sections, reports if args.compare else reports[0], reports)
    fits = any(plan_report["fits"] for plan_report in reports)
    return ExitCode.DONE if fits else ExitCode.TOO_BIG


def _which_machine(command: cli.Command, names: list[str]) -> int:
    """Plans for several targets: one table of all, or of those up to the smallest that carries the config."""
    from framework.plan import machines, targets

    args = command.args
    if args.compare or args.device_memory_gib is not None or "local" in names:
        raise cli.UsageError("several targets: without --compare, --device_memory_gib and the target local")
    if args.smallest:
        # A name may be mistyped among the last ones, too: all are read before the first plan.
        names = sorted(names, key=lambda name: machines.total_bytes(targets.resolve(name))) or machines.candidates()
    target_by_name = {name: targets.resolve(name) for name in names}
    _start_cpus(target_by_name.values())
    reports = []
    left_out = {}
    for name, target in target_by_name.items():
        try:
            plan_report = _plan_if_it_may_fit(command, name, target)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        reports.append(plan_report)
        if args.smallest and machines.carries(plan_report):
            break
    is_carried = any(map(machines.carries, reports))
    if args.smallest:
        # Nobody wants a page of machines that are too small.
        reports = [plan_report for plan_report in reports if machines.carries(plan_report)] or reports[-1:]
        left_out = {}
    if not reports:
        raise cli.UsageError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    _give(args, machines.table(reports, left_out), reports, reports)
    return ExitCode.DONE if is_carried else ExitCode.TOO_BIG


def _plan_if_it_may_fit(command: cli.Command, name: str, target: Any) -> dict[str, Any]:
    """A report by the closed form, and by the compiler where it is here, is asked for, and has a chance."""
    from framework.plan import machines, targets
    from framework.terminal.phases import phase

    args = command.args
    with phase(f"looking at {name}"):
        plan_report = _plan(command, name, target, target.limit_bytes, True)
    if args.estimate or not targets.compiler_here(target.platform):
        return plan_report
    # With --smallest there may be a hundred targets, most of them far too small.
    if args.smallest and not machines.carries(plan_report):
        return plan_report
    return _plan(command, name, target, target.limit_bytes, False)


def _give(args: Any, sections: list[Any], content: Any, reports: list[dict[str, Any]]) -> None:
    """Prints the tables, and writes the files that are asked for."""
    from framework.plan import html
    from framework.terminal.tables import render

    print(render(sections))
    if args.json:
        with writing(args.json):
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.html:
        with writing(args.html):
            args.html.write_text(html.page(reports))
        print(f"page: {args.html}")


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


def _plan(command: cli.Command, name: str, target: Any, limit: int | None, estimate: bool) -> dict[str, Any]:
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
        name="" if name == "local" else name,
        estimate=estimate,
        phases=not args.step_only,
        fresh=args.fresh,
    )
    # The settings of this command line are no part of what is cached: another may lead to the same
    # config.
    return plan_report | {"settings": [*settings, *rule_lines]}


if __name__ == "__main__":
    sys.exit(main())
