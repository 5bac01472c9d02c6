"""Train a model from a named config, resume a run, or only check it (--dry_run). Ctrl-C and SIGTERM save first.

    plimsoll train --config=stdlib-tiny --workdir=runs/stdlib-tiny
    plimsoll train --config=stdlib-tiny --data=my_folder/ --workdir=runs/mine
    plimsoll train --config=gpt2-124m --config.data.source.path=data/train.bin --workdir=runs/gpt2

Exit codes: 0 the run completed; 1 it failed; 2 the command, the config or the data was wrong; 3 the loss was not
finite and learner.nonfinite ended the run; 4 it does not fit into the memory of the devices or of the host, and
training did not start; 5 another process of the run died, or the processes did not find each other; 6 it hung, and its
stacks are in WORKDIR/health; 7 replicas disagree; 8 trainer.stop or a hook ended the run early; 130 and 143 it was
stopped by SIGINT and SIGTERM, and the trained state is saved. docs/operations.md explains what to do.
"""

import dataclasses
import os
import sys
import time
from typing import Any

from plimsoll.framework.program import stored_config
from plimsoll.framework.run.request import RunError, RunRequest
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, reports


def add_flags(parser: cli.Parser) -> None:
    """Add the flags of this verb, which the launchers also accept and pass on."""
    workdir = parser.add_mutually_exclusive_group(required=True)
    workdir.add_argument("--workdir", metavar="DIR", help="folder for the config, metrics, checkpoints and logs")
    workdir.add_argument("--run_name", metavar="NAME", help="short for --workdir=runs/NAME")
    parser.add_data()
    parser.add_argument(
        "--resume",
        choices=["auto", "never", "must"],
        default="auto",
        help="resume from a checkpoint; auto: if there is one",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="print the start table and compile the step, but do not train"
    )
    reports.add_flags(parser)
    parser.add_argument(
        "--force", action="store_true", help="resume on different data, and train even if it does not fit into memory"
    )
    parser.add_argument(
        "--device_memory_gib",
        type=float,
        metavar="GIB",
        help="memory limit per device; default: the memory of the devices",
    )
    parser.add_argument(
        "--host_memory_gib",
        type=float,
        metavar="GIB",
        help="host memory limit of the run, on each machine; default: what is free",
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="with several processes: address where process 0 listens"
    )
    parser.add_argument("--num_processes", type=int, metavar="N", help="with several processes: their number")
    parser.add_argument(
        "--process_id", type=int, metavar="I", help="with several processes: index of this process, from 0"
    )


@cli.main
def main(argv: list[str]) -> int:
    """Parse, check everything that needs no device, then start JAX and train."""
    # The run's time starts before the imports, but excludes imports of the server process that this one was forked
    # from.
    began = time.monotonic() - time.process_time()
    parser = cli.Parser("train", __doc__)
    add_flags(parser)
    parser.add_argument(
        "--target", help="with --dry_run: check for another machine, named as for `plimsoll plan`, such as v5p-2048"
    )
    command = parser.parse(argv)
    stored_config.check(command.config)
    # Building the experiment reports every mistake in the config before JAX starts.
    experiment = command.config.instantiate()

    # Imported late, so that a typo on the command line shows immediately.
    from plimsoll.extras.autotune.run_tuning import tune_memory
    from plimsoll.framework.files.workdir import safe_child
    from plimsoll.framework.metrics.goodput import Goodput
    from plimsoll.framework.processes import distributed
    from plimsoll.framework.processes.rendezvous import ProcessesMissingError
    from plimsoll.framework.run import start
    from plimsoll.launch import teacher_first

    args = command.args
    request = RunRequest(
        spec=command.spec,
        notes=command.notes,
        config=command.config,
        override_paths=command.override_paths,
        resolve=command.resolve,
        experiment=experiment,
        folder=args.workdir or safe_child("runs", args.run_name, "--run_name"),
        goodput=Goodput(since=began),
        tune_memory=tune_memory,
        limit=cli.gib("device_memory_gib", args.device_memory_gib),
        host_limit=cli.gib("host_memory_gib", args.host_memory_gib),
        resume=args.resume,
        force=args.force,
        dry_run=args.dry_run,
    )
    if args.target is not None:
        return _dry_run(request, command)
    cluster = distributed.detect(os.environ, (args.coordinator, args.num_processes, args.process_id))
    # With several processes, each would train the teacher, so they need an existing one.
    code = 0 if cluster is not None else teacher_first.prepare(request, command)
    if code:
        return code
    try:
        return start.execute(request, cluster)
    except ProcessesMissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.PEER
    except RunError as error:
        return error.code


def _dry_run(request: RunRequest, command: cli.Command) -> int:
    """Dry-run the start of a run on another machine's devices: all steps that need no arrays."""
    from plimsoll.framework.files.workdir import Workdir
    from plimsoll.framework.plan import startup, targets

    workdir = Workdir(request.folder)
    if not request.dry_run:
        raise cli.UsageError("--target requires --dry_run: training is only possible on the devices of this machine")
    # The target's compiler reads its environment when JAX starts it.
    targets.set_environment(command.args.target)
    cli.prepare_jax()
    target = targets.resolve(command.args.target)
    if request.host_limit is not None:
        target = dataclasses.replace(target, host_bytes=request.host_limit)
    config, rules = command.resolve(target.name)
    print("".join(f"{line}\n" for line in rules), end="")
    if config.memory.auto:
        config, lines = _choose_memory(request, command, config, target)
        rules = [*rules, *lines]
    experiment = config.instantiate() if rules else request.experiment
    workdir.claim()
    try:
        fits = startup.dry_run(command.spec, config, experiment, target, workdir.path, request.limit)
        return 0 if fits else ExitCode.TOO_BIG
    finally:
        workdir.release(undo=True)


def _choose_memory(request: RunRequest, command: cli.Command, config: Any, target: Any) -> tuple[Any, list[str]]:
    """Choose the settings of memory.auto for the target, and print them.

    Returns:
        (the config with the chosen settings, a list with the line about them).

    Raises:
        DoesNotFitError: no settings fit.
    """
    from plimsoll.extras.autotune.autotune import autotune
    from plimsoll.extras.autotune.settings import with_settings
    from plimsoll.framework.terminal.exit_codes import DoesNotFitError
    from plimsoll.framework.terminal.tables import render
    from plimsoll.launch.plan_auto import build_request

    result = autotune(build_request(command, config, target, request.limit or target.limit_bytes, None), target)
    if result.choice is None:
        raise DoesNotFitError(result.failure)
    print(render(result.choice.sections()))
    return with_settings(config, result.choice.settings), [result.choice.line()]


if __name__ == "__main__":
    sys.exit(main())
