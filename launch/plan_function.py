"""`plimsoll plan --function`: the plan of a user's own JAX function."""

import functools
import inspect
from typing import Any

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli
from plimsoll.launch.plan_common import check_files, resolve_target, start_cpus, write_outputs
from plimsoll.launch.plan_page import build_comparison_page


def plan_functions(args: Any) -> int:
    """Plan a user's own function for one or several targets."""
    refused = (
        *("config", *cli.DATA_FLAGS, "smallest", "estimate", "compare", "step_only"),
        *("auto", "largest", "longest", "allow", "picture", "compiled", "baseline", "markdown"),
    )
    given = [f"--{name}" for name in refused if getattr(args, name, None)]
    if given:
        raise cli.UsageError(f"--function cannot be combined with {', '.join(given)}")
    if not args.target:
        raise cli.UsageError("--target=NAME is required; run plimsoll plan --targets to list all targets")
    check_files(args)

    # Imported late, so that a typo on the command line shows immediately.
    import jax

    from plimsoll.framework.plan import compare_targets, report_tables, targets
    from plimsoll.framework.plan.function_report import plan_call

    names = compare_targets.parse_target_names(args.target)
    targets.set_environment(names[0])
    cli.prepare_jax()
    # Programs loaded from the cache lack buffer information, which the report lists.
    jax.config.update("jax_enable_compilation_cache", False)
    machine_by_name = {name: resolve_target(args, name) for name in names}
    start_cpus(machine_by_name.values())
    call = _load_call(args.function)
    reports = []
    for machine in machine_by_name.values():
        limit = cli.gib("device_memory_gib", args.device_memory_gib) or machine.limit_bytes
        reports.append(plan_call(call, machine, limit))
    sections = report_tables.sections(reports[0]) if len(reports) == 1 else compare_targets.table(reports, {})
    draw_page = functools.partial(build_comparison_page, args, f"--function={args.function}", [], reports)
    contents = [plan_report.to_json() for plan_report in reports]
    write_outputs(args, sections, contents if len(contents) > 1 else contents[0], draw_page)
    fits = any(plan_report.fits for plan_report in reports)
    return ExitCode.DONE if fits else ExitCode.TOO_BIG


def _load_call(spec: str) -> Any:
    """Load the function and its arguments from FILE.py:NAME.

    Raises:
        UsageError: the file or the name does not exist, or the function returns something else.
    """
    from plimsoll import configs
    from plimsoll.framework.plan.function_call import FunctionCall

    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name:
        raise cli.UsageError(f"--function={spec}: expected FILE.py:NAME")
    maker = configs.find(spec)
    parameters = inspect.signature(maker).parameters.values()
    # *args and **kwargs may stay empty.
    needed = [one.name for one in parameters if one.default is one.empty and one.kind.name[:3] != "VAR"]
    if needed:
        raise cli.UsageError(
            f"--function={spec}: {name} takes {', '.join(needed)}; expected the name of a function without required "
            f"arguments that returns ({name}, arguments)"
        )
    returned: Any = maker()
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise cli.UsageError(
            f"--function={spec}: {name}() returned {type(returned).__name__}; expected (function, arguments), or these "
            "followed by a dict of options"
        )
    function, arguments, *rest = returned
    try:
        return FunctionCall(function, arguments, **dict(*rest))
    except (TypeError, ValueError) as error:
        raise cli.UsageError(f"--function={spec}: {error}") from None
