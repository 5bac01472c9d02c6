"""Trace a few training steps with JAX's profiler, and list the slowest operations; or summarize an existing trace.

    plimsoll profile --config=gpt2-124m --config.data.global_batch_size=8 --out=profile
    plimsoll profile --trace=runs/a/profile

The trace opens in XProf (TensorBoard) and Perfetto. Nothing is saved, and no workdir is needed. To trace steps of a
run, set --config.trainer.profile=[first,last].
"""

import json
import sys
from pathlib import Path
from typing import Any

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli


@cli.main
def main(argv: list[str]) -> int:
    """Check the flags, trace the steps, and print the tables."""
    parser = cli.Parser("profile", __doc__)
    parser.add_data()
    add = parser.add_argument
    add("--out", default=None, metavar="DIR", help="folder for the trace; default: profile")
    add("--steps", type=int, default=None, metavar="N", help="number of steps to trace; default 3")
    add("--warmup", type=int, default=None, metavar="N", help="number of steps before that; default 2")
    add("--top", type=int, default=15, metavar="N", help="number of operations and layers to list; default 15")
    add("--trace", metavar="PATH", help="summarize this trace, a folder or an .xplane.pb file, instead of taking one")
    add("--device_memory_gib", type=float, metavar="GIB", help="memory limit per device; default: its memory")
    add("--json", action="store_true", help="print JSON instead of tables, for programs")
    if any(token.partition("=")[0] == "--trace" for token in argv):
        args = parser.parse_flags(argv)
        _check_positive(args, "top")
        for name in ("config", "out", "steps", "warmup", *cli.DATA_FLAGS, "device_memory_gib"):
            if getattr(args, name) is not None:
                raise cli.UsageError(f"--{name} does not go with --trace, which takes no trace")
        return _summarize(args)
    command = parser.parse(argv)
    args = command.args
    args.out = args.out or "profile"
    args.steps = 3 if args.steps is None else args.steps
    args.warmup = 2 if args.warmup is None else args.warmup
    _check_positive(args, "steps", "warmup", "top")
    cli.check_output("out", args.out, is_folder=True)
    limit = cli.gib("device_memory_gib", args.device_memory_gib)
    # Building the experiment reports every mistake in the config before JAX starts.
    command.config.instantiate()

    # Imported late, so that a typo on the command line shows immediately.
    import jax

    from plimsoll.framework.devices.accelerators import accelerator_name
    from plimsoll.framework.devices.environment import start_devices
    from plimsoll.framework.devices.executables import use_compilation_cache
    from plimsoll.framework.run.profile_steps import profile_steps
    from plimsoll.framework.terminal.tables import TableSection, human_count, human_duration, render

    for note in command.notes:
        print(note, file=sys.stderr)
    cli.prepare_jax()
    start_devices()
    config, rule_lines = command.resolve(accelerator_name(jax.devices()))
    for line in rule_lines:
        print(line, file=sys.stderr)
    if config.memory.auto:
        raise cli.UsageError("memory.auto is set: expected the settings to profile, such as those in WORKDIR/auto.json")
    use_compilation_cache(config.trainer.compilation_cache)
    experiment = config.instantiate()
    folder = Path(args.out).expanduser()
    found = profile_steps(config, experiment, folder, steps=args.steps, warmup=args.warmup, limit=limit)
    figures = {
        "trace": str(found.trace),
        "steps": args.steps,
        "step_seconds": found.step_seconds,
        "input_seconds": found.input_seconds,
        f"{experiment.data.item}s_per_second": found.tokens_per_second,
    }
    if args.json:
        print(json.dumps({**figures, **found.summary.to_json()}, indent=1))
        return ExitCode.DONE
    rows = [
        ("config", command.spec),
        ("accelerator", accelerator_name(jax.devices())),
        ("a step", f"{human_duration(found.step_seconds)}, mean of {args.steps}"),
        ("waiting for input", f"{human_duration(found.input_seconds)} per step"),
        (f"{experiment.data.item}s per second", human_count(found.tokens_per_second)),
    ]
    print(render([TableSection("profile", rows), *found.summary.sections(args.steps, args.top)]).rstrip())
    print(f"trace: {found.trace}")
    return ExitCode.DONE


def _check_positive(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise cli.UsageError(f"--{name}={getattr(args, name)}: expected at least 1")


def _summarize(args: Any) -> int:
    """Print the summary of an existing trace, the newest one in a folder."""
    path = Path(args.trace).expanduser()
    from plimsoll.framework.plan.trace_summary import find_traces, summarize_trace
    from plimsoll.framework.terminal.tables import render

    if not path.exists():
        raise FileNotFoundError(f"--trace: {path} does not exist")
    if path.is_dir():
        traces = find_traces(path)
        if not traces:
            raise FileNotFoundError(f"--trace: {path} holds no trace (*.xplane.pb)")
        path = traces[-1]
    from jax.profiler import ProfileData

    try:
        profile = ProfileData.from_file(str(path))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"--trace: {path} is not a trace of jax.profiler: {error}") from None
    summary = summarize_trace(profile)
    if args.json:
        print(json.dumps({"trace": str(path), **summary.to_json()}, indent=1))
        return ExitCode.DONE
    # How many steps it has is not known, so times are those of the whole trace.
    print(render(summary.sections(1, args.top)).rstrip())
    print(f"trace: {path}; times are sums over all of its steps, divided by the number of devices")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
