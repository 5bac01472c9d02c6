"""Predict the memory and step time of a run on any machine: compile its exact step with that machine's compiler.

    plimsoll plan --config=llama2-7b --target=v5e-16 --config.memory.remat=full
    plimsoll plan --config=gpt2-124m --target=rtx4090 --compare memory.remat=none,dots,full --html=plan.html
    plimsoll plan --config=hf:meta-llama/Llama-3.1-8B --target=4090,a100-80,h100,v5e-8
    plimsoll plan --config=qlora:Qwen/Qwen2.5-7B --smallest --estimate
    plimsoll plan --config=lora:meta-llama/Llama-3.1-8B --data=pairs.jsonl --target=h100
    plimsoll plan --config=llama2-7b --target=v5e-8 --auto
    plimsoll plan --config=llama3-8b --target=h100 --largest --host_memory_gib=128 --picture=largest.png
    plimsoll plan --config=qlora:meta-llama/Llama-3.1-8B --target=rtx4090 --longest --config.data.global_batch_size=1
    plimsoll plan --function=step.py:abstract_step --target=h100
    plimsoll plan --check=plans.toml --baseline=base.json --markdown=comment.md
    plimsoll plan --from pretrain.sh --target=h100x8      # Megatron-LM, torchtitan, TRL, DeepSpeed, axolotl, MaxText
    plimsoll plan --targets

You do not need access to the machine.

Exit codes: 0: it fits (with several plans, at least one fits; with several targets, at least one fits with the printed
settings); 2: the command or the config is invalid; 4: it does not fit.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plimsoll.extras.autotune import ALLOWED
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli
from plimsoll.launch.plan_auto import check_auto, get_auto_mode, plan_auto
from plimsoll.launch.plan_check import check_plans
from plimsoll.launch.plan_common import (
    TablePrinter,
    check_files,
    choose_largest_stages,
    collect_garbage_rarely,
    describe_shape,
    iter_comparisons,
    make_report,
    resolve_target,
    split_stages,
    write_outputs,
)
from plimsoll.launch.plan_foreign import plan_foreign
from plimsoll.launch.plan_function import plan_functions
from plimsoll.launch.plan_largest import check_largest, plan_largest
from plimsoll.launch.plan_page import build_target_page
from plimsoll.launch.plan_targets import list_targets, plan_several_targets


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb."""
    add = parser.add_argument
    add(
        "--target",
        help="v5e-16, v5p-1024 (cores), 2xv5e-256, h200x8, 4090, cpu:8, local ...; separate several by commas",
    )
    parser.add_data()
    add(
        "--smallest",
        action="store_true",
        help="pick the target with the least device memory that fits the config, from --target or from all",
    )
    add(
        "--function",
        metavar="FILE.py:NAME",
        help="plan any JAX function instead of a config: NAME() returns (function, arguments), optionally followed "
        "by a dict of options of pl.plan_function",
    )
    add(
        "--from",
        nargs="+",
        dest="source",
        metavar="FILE",
        help="plan a run of another framework: a script or config of Megatron-LM, torchtitan, TRL, DeepSpeed, axolotl "
        "or MaxText, followed by arguments in its own syntax",
    )
    add("--compiled", action="store_true", help="with --from: compile the step instead of estimating it")
    add("--targets", action="store_true", help="list all targets; takes no other flags")
    add("--estimate", action="store_true", help="only the analytical estimate: takes seconds, less exact")
    add("--compare", action="append", default=[], metavar="PATH=A,B", help="plan each value; repeatable")
    _add_search_flags(parser)
    add("--device_memory_gib", type=float, metavar="GIB", help="memory of one device, instead of the target's")
    add("--step_only", action="store_true", help="leave out initialization and evaluation")
    add(
        "--verdict_only",
        action="store_true",
        help="skip the search for settings that fit when the config does not (seconds, or minutes of compiling)",
    )
    add("--json", type=Path, metavar="FILE", help="write the report as JSON (with --compare: a list of reports)")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a self-contained page: charts, sliders over batch size and sequence length, commands",
    )
    add(
        "--check",
        type=Path,
        metavar="FILE.toml",
        help="plan the runs that a file lists; exit code 4 if one does not fit (docs/plan.md)",
    )
    add("--baseline", type=Path, metavar="FILE", help="with --check: compare with what an earlier --json wrote")
    add("--markdown", type=Path, metavar="FILE", help="with --check: write a comment for a pull request")
    add("--json-schema", action="store_true", help="print the JSON Schema of --json; takes no other flags")
    add("--fresh", action="store_true", help="compile again even if nothing has changed")


def _add_search_flags(parser: cli.Parser) -> None:
    """Add the flags of the search for settings, for the largest model or for the longest row."""
    add = parser.add_argument
    add(
        "--auto",
        nargs="?",
        const="memory",
        choices=("memory", "batch"),
        help="find the fastest settings that fit; =batch: the largest microbatch under the config's own settings",
    )
    add(
        "--largest",
        action="store_true",
        help="scale up the model by its family's rule until nothing fits; with --compare, for each value",
    )
    add("--longest", action="store_true", help="lengthen the rows until nothing fits; with --compare, for each value")
    add(
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="with --largest or --longest: plot tokens/s over parameters or row lengths",
    )
    add(
        "--allow",
        metavar="NAME,NAME",
        help=f"with --auto, --largest or --longest: allowed changes to the training: {', '.join(ALLOWED)}",
    )
    add("--host_memory_gib", type=float, metavar="GIB", help="memory of each host, instead of the target's")


def _build_parser() -> cli.Parser:
    parser = cli.Parser("plan", __doc__, shape_only=True)
    add_flags(parser)
    return parser


@cli.main
def main(argv: list[str]) -> int:
    """Plan each setting, print the tables and write the files."""
    with collect_garbage_rarely():
        return _run(argv)


def _run(argv: list[str]) -> int:
    parser = _build_parser()
    if "--json-schema" in argv:
        return _print_schema(argv)
    if "--targets" in argv:
        return list_targets(argv)
    if any(word.partition("=")[0] == "--function" for word in argv):
        return plan_functions(parser.parse_flags(argv))
    if any(word.partition("=")[0] == "--check" for word in argv):
        return check_plans(parser.parse_flags(argv), _build_parser)
    if any(word.partition("=")[0] == "--from" for word in argv):
        return plan_foreign(parser, argv)
    command = parser.parse(argv)
    args = command.args
    for name in ("baseline", "markdown"):
        if getattr(args, name) is not None:
            raise cli.UsageError(f"--{name} requires --check")
    if args.compiled:
        raise cli.UsageError("--compiled is for --from; without it, plans are compiled unless --estimate is given")
    if not (args.target or "").strip(" ,") and not args.smallest:
        raise cli.UsageError("--target=NAME is required; run plimsoll plan --targets to list all targets")
    check_files(args)
    check_auto(command)
    check_largest(command)

    # Imported late, so that a typo on the command line shows immediately.
    import jax

    from plimsoll.framework.families import is_approximate
    from plimsoll.framework.plan import compare_targets, targets

    # Without our layers there is no program to compile.
    args.estimate = args.estimate or is_approximate(command.named)
    names = compare_targets.parse_target_names(args.target or "")
    targets.set_environment(args.target or "")
    cli.prepare_jax()
    # Programs loaded from the cache lack buffer information, which the report lists.
    jax.config.update("jax_enable_compilation_cache", False)
    for note in command.notes:
        print(note, file=sys.stderr)
    if args.largest or args.longest:
        return plan_largest(command, names)
    if args.smallest or len(names) > 1:
        return plan_several_targets(command, names)
    (name,) = names
    target_name = resolve_target(args, name).name
    if get_auto_mode(command) or args.compare:
        command = choose_largest_stages(command, [target_name])[target_name]
        stage_commands = [command]
    else:
        stage_commands = split_stages(command, target_name)
    if get_auto_mode(command):
        return plan_auto(command, name)
    return _plan_one_target(command, name, stage_commands)


def _print_schema(argv: list[str]) -> int:
    """Print the JSON Schema of --json; needs neither JAX nor a config."""
    from plimsoll.framework.plan.plan_report import SCHEMA_FILE

    if len(argv) > 1:
        raise cli.UsageError("--json-schema takes no other flags")
    print(SCHEMA_FILE.read_text("utf-8"), end="")
    return ExitCode.DONE


def _plan_one_target(command: cli.Command, name: str, stage_commands: list[cli.Command]) -> int:
    """Plan each setting, or each stage of the data, for one target."""
    from plimsoll.framework.plan import report_tables
    from plimsoll.framework.plan.suggest import check_target

    args = command.args
    target = resolve_target(args, name)
    limit = cli.gib("device_memory_gib", args.device_memory_gib)
    has_stages = len(stage_commands) > 1
    if has_stages:
        # All stages are checked before the first one is compiled.
        check_target(command.resolve(target.name)[0].instantiate(), target)
    commands = stage_commands if has_stages else list(_variants(command, args.compare, target))
    if not commands:
        raise cli.UsageError("no combination of the --compare values is valid; see the messages above")
    printer = TablePrinter()
    # The verdict appears before the search for settings that fit, unless several plans share one table.
    on_verdict = (lambda report: printer.show(report_tables.sections(report))) if len(commands) == 1 else None
    reports = [make_report(variant, name, target, limit, args.estimate, on_verdict=on_verdict) for variant in commands]
    if has_stages:
        # The tables name what differs between the stages.
        removal = "data.stages={}"
        reports = [dataclasses.replace(one, settings=[s for s in one.settings if s != removal]) for one in reports]
    if len(reports) == 1:
        sections = report_tables.sections(reports[0])
    else:
        sections = [report_tables.comparison(reports)]
    # With --compare the file contains a list, even if only one combination is left.
    draw_page = functools.partial(build_target_page, command, commands, target, reports)
    contents = [plan_report.to_json() for plan_report in reports]
    write_outputs(args, sections, contents if args.compare or has_stages else contents[0], draw_page, printer)
    if has_stages:
        # A run needs all of its stages.
        fits = all(plan_report.fits for plan_report in reports)
        pairs = zip(reports, commands, strict=True)
        largest, stage_command = max(pairs, key=lambda pair: (not pair[0].fits, pair[0].device_peak_bytes))
        verdict = "fits" if largest.fits else "does not fit"
        print(f"largest stage: {describe_shape(stage_command)}, which {verdict}")
        return ExitCode.DONE if fits else ExitCode.TOO_BIG
    fits = any(plan_report.fits for plan_report in reports)
    found = any(plan_report.suggestions or plan_report.smaller_batch for plan_report in reports)
    if len(reports) == 1 and not (fits or found or args.verdict_only):
        print("no other settings or batch sizes were found that fit")
    return ExitCode.DONE if fits else ExitCode.TOO_BIG


def _variants(command: cli.Command, compare: list[str], target: Any) -> Iterator[cli.Command]:
    """Yield the command for each combination of compared values.

    All combinations are validated before the first one is compiled. With several --compare flags, invalid
    combinations are reported and skipped.
    """
    from plimsoll.framework.plan.suggest import check_target

    for choice in iter_comparisons(compare):
        variant = dataclasses.replace(command, overrides=[*command.overrides, *choice])
        try:
            config, _ = variant.resolve(target.name)
            check_target(config.instantiate(), target)
        except ValueError as error:
            # With a single --compare, every value was intended. With several, some combinations may be invalid.
            if len(compare) < 2:
                raise
            settings = " ".join(map("=".join, choice))
            print(f"skipped {settings}: {error}", file=sys.stderr)
        else:
            yield variant


if __name__ == "__main__":
    sys.exit(main())
