"""`plimsoll plan --auto`: the fastest settings that fit, as overrides to paste, together with their plan."""

from dataclasses import replace
from typing import Any

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli
from plimsoll.launch.plan_common import format_overrides, resolve_target, write_outputs
from plimsoll.launch.plan_page import build_target_page


def get_auto_mode(command: cli.Command) -> str | None:
    """Return the search mode that --auto requests, or a config with memory.auto; None for no search."""
    return command.args.auto or ("memory" if command.config.memory.auto else None)


def check_auto(command: cli.Command) -> None:
    """Raise UsageError or ConfigError for flags that cannot be combined with a search, or that require one."""
    args = command.args
    if args.largest or args.longest:
        return
    if get_auto_mode(command) is None:
        if args.allow is not None:
            raise cli.UsageError("--allow requires --auto, --largest or --longest")
        return
    if args.allow is not None:
        # Imported here, because it imports JAX, and a typo on the command line should show immediately.
        from plimsoll.extras.autotune.settings import parse_allowed

        parse_allowed(args.allow)
    if args.compare or args.smallest or "," in (args.target or "").strip(" ,"):
        raise cli.UsageError("--auto takes one target, and cannot be combined with --compare or --smallest")


def plan_auto(command: cli.Command, name: str) -> int:
    """Choose settings for a target, and print the overrides, their plan, and the rejected alternatives.

    Args:
        command: command with --auto, or with a config that sets memory.auto.
        name: name of the target.
    """
    from plimsoll.extras.autotune.autotune import autotune
    from plimsoll.extras.autotune.batch_curve import estimate_curve
    from plimsoll.extras.autotune.settings import with_settings
    from plimsoll.framework.plan.build_report import get_report
    from plimsoll.framework.plan.report_tables import sections

    args = command.args
    target = resolve_target(args, name)
    limit = cli.gib("device_memory_gib", args.device_memory_gib) or target.limit_bytes
    host_bytes = cli.gib("host_memory_gib", args.host_memory_gib)
    config, rule_lines = command.resolve(target.name)
    request = build_request(command, config, target, limit, host_bytes)
    found = autotune(request, target, host_bytes=host_bytes, fresh=args.fresh)
    if found.choice is None:
        print(found.failure)
        return ExitCode.TOO_BIG
    choice = found.choice
    report = get_report(
        command.spec,
        with_settings(config, choice.settings),
        target,
        limit,
        name="" if name == "local" else name,
        estimate=args.estimate,
        phases=not args.step_only,
        # A step that the search has just compiled is fresh already.
        fresh=args.fresh and found.compiled_step is None,
        # The search has already found the best settings, so the report needs no suggestions.
        suggests=False,
        compiled_step=found.compiled_step,
    )
    settings = [f"{path}={text}" for path, text in choice.settings]
    report = replace(report, settings=[*format_overrides(command), *rule_lines, *settings])
    curve = estimate_curve(request, target, choice, host_bytes)
    print(choice.flags)
    chosen = cli.Command(args, command.spec, command.named, [*command.overrides, *choice.settings])

    def draw_page() -> str:
        return build_target_page(chosen, [chosen], target, [report], {} if curve is None else {"": curve})

    content = report.to_json() | {"auto": choice.to_json(), "throughput_curve": None}
    tables = choice.sections()
    if curve is not None:
        content["throughput_curve"] = curve.to_json()
        tables += curve.sections()
    write_outputs(args, [*tables, *sections(report)], content, draw_page)
    return ExitCode.DONE if report.fits else ExitCode.TOO_BIG


def build_request(command: cli.Command, config: Any, target: Any, limit: int | None, host_bytes: int | None) -> Any:
    """Build the tuning request of a command line of `plan`, or of `train --dry_run`.

    Args:
        command: the command line.
        config: config, resolved for the target.
        target: the machine to tune for.
        limit: bytes that one device may use; None if unknown.
        host_bytes: memory of one process's host, in bytes; None takes the target's known value.
    """
    from plimsoll.extras.autotune.autotune import TuningRequest
    from plimsoll.extras.autotune.settings import Machine, find_fixed_paths, parse_allowed

    args = command.args
    fixed = find_fixed_paths(config, command.override_paths)
    # `train --dry_run` lacks the flags --allow, --auto and --estimate.
    named = getattr(args, "allow", None)
    allowed = () if named is None else parse_allowed(named)
    machine = Machine.derive(target, limit, host_bytes)
    mode = getattr(args, "auto", None) or "memory"
    return TuningRequest(config, machine, mode, sorted(fixed), allowed, getattr(args, "estimate", False))
