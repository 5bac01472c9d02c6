"""`plimsoll plan --auto`: the fastest settings that fit, as overrides to paste, together with their plan."""

from typing import Any

from plimsoll.framework.plan.auto import allow
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli
from plimsoll.launch.plan_page import page_of_one_machine
from plimsoll.launch.plan_parts import give, settings_of


def asked_mode(command: cli.Command) -> str | None:
    """Return the search mode that --auto requests, or a config with memory.auto; None for no search."""
    return command.args.auto or ("memory" if command.config.memory.auto else None)


def check_auto(command: cli.Command) -> None:
    """Raise UsageError or ConfigError for flags that do not go with a search, or that require one."""
    args = command.args
    if args.largest:
        return
    if asked_mode(command) is None:
        for flag, value in (("--allow", args.allow), ("--host_memory_gib", args.host_memory_gib)):
            if value is not None:
                raise cli.UsageError(f"{flag} goes with --auto and --largest")
        return
    if args.allow is not None:
        allow.names_of(args.allow)
    cli.gib("host_memory_gib", args.host_memory_gib)
    if args.compare or args.smallest or "," in (args.target or "").strip(" ,"):
        raise cli.UsageError("--auto is for one target, without --compare and --smallest")


def plan_auto(command: cli.Command, name: str) -> int:
    """Choose settings for a target, and print the overrides, their plan, and the rejected alternatives."""
    from plimsoll.framework.plan import targets
    from plimsoll.framework.plan.auto.answer import answer
    from plimsoll.framework.plan.auto.settings import with_settings
    from plimsoll.framework.plan.planned import planned
    from plimsoll.framework.plan.report import sections

    args = command.args
    target = targets.resolve(name)
    limit = cli.gib("device_memory_gib", args.device_memory_gib) or target.limit_bytes
    host_bytes = cli.gib("host_memory_gib", args.host_memory_gib)
    config, rule_lines = command.resolve(target.name)
    question = question_of(command, config, target, limit, host_bytes)
    found = answer(question, target, host_bytes=host_bytes, fresh=args.fresh)
    if found.choice is None:
        print(found.failure)
        return ExitCode.TOO_BIG
    choice = found.choice
    report = planned(
        command.spec,
        with_settings(config, choice.settings),
        target,
        limit,
        name="" if name == "local" else name,
        estimate=args.estimate,
        phases=not args.step_only,
        fresh=args.fresh and found.made is None,
        suggests=False,
        made=found.made,
    )
    settings = [f"{path}={text}" for path, text in choice.settings]
    report |= {"settings": [*settings_of(command), *rule_lines, *settings], "auto": choice.to_json()}
    print(choice.flags)
    chosen = cli.Command(args, command.spec, command.named, [*command.overrides, *choice.settings])

    def draw_page() -> str:
        return page_of_one_machine(command, [chosen], target, [report])

    give(args, [*choice.sections(), *sections(report)], report, draw_page)
    return ExitCode.DONE if report["fits"] else ExitCode.TOO_BIG


def question_of(command: cli.Command, config: Any, target: Any, limit: int | None, host_bytes: int | None) -> Any:
    """Build the question that the command line of `plan`, or of `train --dry_run`, asks."""
    from plimsoll.framework.plan.auto.choice import Machine
    from plimsoll.framework.plan.auto.settings import fixed_paths
    from plimsoll.framework.plan.auto.stored import Question

    args = command.args
    fixed = fixed_paths(config, command.chosen)
    named = getattr(args, "allow", None)
    allowed = () if named is None else allow.names_of(named)
    machine = Machine.of(target, limit, host_bytes)
    mode = getattr(args, "auto", None) or "memory"
    return Question(config, machine, mode, sorted(fixed), allowed, getattr(args, "estimate", False))
