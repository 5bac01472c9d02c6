"""Train a model from a named config: start, resume, or only look (--dry_run). Ctrl-C and SIGTERM save first.

    python -m launch.train --config=stdlib-tiny --workdir=runs/stdlib-tiny
    python -m launch.train --config=stdlib-tiny --data=my_folder/ --workdir=runs/mine
    python -m launch.train --config=gpt2-124m --config.data.source.path=data/train.bin --workdir=runs/gpt2

Exit codes: 0 the run came to its end; 1 it failed; 2 the command, the config or the data was wrong; 3 the loss was not
finite and learner.nonfinite ended the run; 4 it does not fit into the devices' memory, and nothing was started; 5
another process of the run is gone, or they did not find each other; 6 it hung, and its stacks are in WORKDIR/health; 7
replicas disagree; 130 and 143 it was stopped by SIGINT and SIGTERM, and what was trained is saved. docs/operations.md
says what to do.
"""

import os
import re
import socket
import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial
from typing import Any

from framework.program import stored
from framework.terminal import interrupts
from launch import cli, mistakes
from launch.job import EXIT_FAILED, EXIT_TOO_BIG, EXIT_USAGE, Job

# The time that all processes of a run have to end after a signal, before the first does.
_OTHERS_SECONDS = 0.5
# What JAX says when the others have left: gloo on CPU, NCCL on GPU, the coordinator.
_PEER = re.compile("(?i)gloo|nccl|connection (closed|reset|refused)|coordinat|heartbeat|barrier|unavailable|deadline")


def add_flags(parser: cli.Parser) -> None:
    """The flags of this verb, which the launchers take too and pass on."""
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--workdir", metavar="DIR", help="config, metrics, checkpoints and logs go there")
    place.add_argument("--run_name", metavar="NAME", help="short for --workdir=runs/NAME")
    parser.add_data()
    parser.add_argument(
        "--resume",
        choices=["auto", "never", "must"],
        default="auto",
        help="if there are checkpoints",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="show the start table, compile the step, train nothing",
    )
    parser.add_argument("--force", action="store_true", help="resume on other data; train although it does not fit")
    parser.add_argument("--device_memory_gib", type=float, metavar="GIB", help="instead of what the devices have")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="several processes: where process 0 listens")
    parser.add_argument("--num_processes", type=int, metavar="N", help="several processes: how many")
    parser.add_argument("--process_id", type=int, metavar="I", help="several processes: which one this is, from 0")


@cli.main
def main(argv: list[str]) -> int:
    """Parses, checks everything that needs no device, then starts JAX and trains."""
    # The run's time begins before the imports. Imports of the process that this one is a fork of do
    # not count.
    began = time.monotonic() - time.process_time()
    parser = cli.Parser("train", __doc__)
    add_flags(parser)
    parser.add_argument("--target", help="with --dry_run: a machine that is not here, as for launch.plan: v5p-2048")
    command = parser.parse(argv)
    stored.check(command.config)
    # Building the experiment shows every mistake in the config before JAX starts.
    experiment = command.config.instantiate()

    # Imported late: a typo on the command line should not wait for these.
    from framework.devices.executables import use_compilation_cache
    from framework.files.workdir import Workdir, safe_child
    from framework.metrics.goodput import Goodput
    from framework.processes import distributed
    from framework.processes.health import EXIT_PEER
    from framework.processes.rendezvous import ProcessesMissingError
    from launch import finished

    args = command.args
    goodput = Goodput(since=began)
    limit = cli.gib("device_memory_gib", args.device_memory_gib)
    folder = args.workdir or safe_child("runs", args.run_name, "--run_name")
    if args.target is not None:
        return _dry_run(Job(command, experiment, Workdir(folder), limit, goodput))
    cluster = distributed.detect(os.environ, (args.coordinator, args.num_processes, args.process_id))
    last = None if args.dry_run else finished.last_checkpoint(folder)
    if last is not None and args.resume == "never":
        last.refuse()
    # Looked at before JAX starts, so that a command which has nothing to do says so at once.
    if last is not None and _is_over(last, command, cluster):
        return 0
    workdir = Workdir(folder)
    cli.prepare_jax()
    try:
        _connect(cluster, experiment.health)
    except ProcessesMissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PEER
    use_compilation_cache(command.config.trainer.compilation_cache)
    return _in_workdir(Job(command, experiment, workdir, limit, goodput), last)


def _is_over(last: Any, command: cli.Command, cluster: Any) -> bool:
    """Whether the config alone says that the run has nothing left to do; the first process prints so."""
    from launch import finished

    end = finished.known_length(command.config)
    if end is None or not last.ends(end):
        return False
    if cluster is None or cluster.process_id == 0:
        print("\n".join(last.lines(end, command.config)))
    return True


def _connect(cluster: Any, health: Any) -> None:
    """Joins the other processes of the run, if there are any. Raises ProcessesMissingError."""
    from framework.processes import distributed

    distributed.initialize(
        cluster,
        connect_seconds=health.connect_seconds,
        heartbeat_seconds=health.heartbeat_seconds,
    )
    if cluster is not None and distributed.is_primary():
        # JAX ends the others as soon as the first is gone; they have a line to say, and their own
        # exit code.
        interrupts.at_end(lambda number, line: time.sleep(_OTHERS_SECONDS))


def _in_workdir(job: Job, last: Any) -> int:
    """Claims the workdir and trains there; the exit code. A start that was refused leaves the workdir as it was."""
    from framework.processes import distributed

    workdir = job.workdir
    # The code of what is raised before the run is guarded; a run that is over changes nothing
    # either.
    code = EXIT_USAGE
    try:
        if distributed.is_primary():
            message = workdir.claim()
            if message:
                print(message, file=sys.stderr)
        _check_shared(workdir)
        if last is not None and _epochs_are_over(last, job):
            return 0
        # The code that `finally` sees if `_guarded` raises.
        code = EXIT_FAILED
        code = _guarded(job)
        return code
    finally:
        refused = code in (EXIT_USAGE, EXIT_TOO_BIG)
        workdir.release(undo=job.args.dry_run or refused)


def _check_shared(workdir: Any) -> None:
    """Raises FileNotFoundError, in every process of the run: one of them does not see what the first wrote."""
    import jax

    from framework.processes import distributed

    owner = distributed.from_primary(workdir.owner())
    seen = workdir.sees(owner)
    # Collective: a process that sees the folder has to hear of one that does not, or it would wait
    # for it later.
    if not distributed.everywhere(seen):
        who = "another process of it"
        if not seen:
            who = f"process {jax.process_index()} on host {socket.gethostname()}"
        raise FileNotFoundError(
            f"--workdir: {who} does not see what process 0 of this run wrote to {workdir.path}: all hosts need the "
            "same folder (NFS, Lustre, ...), or an object store (gs://..., s3://...)"
        )


def _epochs_are_over(last: Any, job: Job) -> bool:
    """Whether the run has read its data as often as trainer.max_epochs says and has nothing left to do, and says so.

    Asks the data only where the last run came to its end, so what that run made of the data (tokens) is there.
    """
    from framework.processes import distributed
    from framework.run import resuming

    options = job.experiment.trainer
    data = job.experiment.data
    if options.max_epochs is None or not last.ends(last.config["trainer"]["max_steps"]):
        return False
    primary = distributed.is_primary()
    barrier = partial(distributed.barrier, "finished")
    meet = partial(job.workdir.meet, barrier, is_primary=primary)
    data.setup(job.workdir.path, is_primary=primary, barrier=meet)
    order = resuming.order_after({"config": last.config, "data": last.data}, last.step, data)
    epoch_steps = data.epoch_steps(options.max_epochs, order.origin)
    end = min(options.known_steps or epoch_steps, epoch_steps)
    is_over = last.ends(end)
    if is_over and primary:
        print("\n".join(last.lines(end, job.command.config)))
    return is_over


def _guarded(job: Job) -> int:
    """Trains, and says how it ended. Of several processes one that fails does not wait for those that wait for it."""
    import jax

    from framework.processes.health import EXIT_PEER, UNLIMITED, Pulse

    workdir = job.workdir
    goodput = job.goodput
    dry_run = job.args.dry_run
    process = jax.process_index()
    count = jax.process_count()
    health = job.experiment.health
    pulse = Pulse(workdir.path / "health", process, count, health, goodput, workdir.release)
    with nullcontext() if dry_run else pulse:
        code = EXIT_FAILED
        reason = ""
        try:
            # `cli.main` tells the user's mistakes and turns them into exit codes, which the pulse
            # then writes down.
            code = cli.main(lambda _: _train(job, pulse))([])
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"[:500]
            if count == 1:
                if goodput.phase not in UNLIMITED:
                    error.add_note(mistakes.IN_THE_LOOP)
                raise
            traceback.print_exc()
            peer_is_gone = isinstance(error, jax.errors.JaxRuntimeError) and _PEER.search(str(error))
            code = EXIT_PEER if peer_is_gone else EXIT_FAILED
        finally:
            if not dry_run:
                pulse.write(exit=code, reason=reason)
    if count > 1 and code in (EXIT_FAILED, EXIT_USAGE, EXIT_PEER):
        # JAX ends all others as soon as the first is gone; they may be about to speak.
        time.sleep(0 if process else 1)
        workdir.release(undo=dry_run or code == EXIT_USAGE)
        # os._exit waits for no process that waits for this one, and flushes nothing.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if count > 1:
        # Waits for the others, whose saves may need this process.
        jax.distributed.shutdown()
    return code


def _dry_run(job: Job) -> int:
    """The start of a run on another machine's devices: everything that takes no array."""
    from framework.plan import startup, targets

    command = job.command
    workdir = job.workdir
    if not command.args.dry_run:
        raise cli.UsageError("--target goes with --dry_run: nothing can be trained on devices that are not here")
    # The target's compiler reads its environment when JAX starts it.
    targets.environment(command.args.target)
    cli.prepare_jax()
    target = targets.resolve(command.args.target)
    config, rules = command.resolve(target.name)
    print("".join(f"{line}\n" for line in rules), end="")
    experiment = job.experiment_of(config, rules)
    workdir.claim()
    try:
        fits = startup.dry_run(command.spec, config, experiment, target, workdir.path, job.limit)
        return 0 if fits else EXIT_TOO_BIG
    finally:
        workdir.release(undo=True)


def _train(job: Job, pulse: Any) -> int:
    """Trains on this process's devices; the exit code."""
    # All that a run needs until its end is imported here: hours later, the files may have changed.
    from launch.training import Training

    return Training(job, pulse).execute()


if __name__ == "__main__":
    sys.exit(main())
