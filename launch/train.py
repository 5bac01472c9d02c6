"""Train a model from a named config: start, resume, or only look (--dry_run). Ctrl-C and SIGTERM save first.

    python -m launch.train --config=stdlib-tiny --workdir=runs/stdlib-tiny
    python -m launch.train --config=gpt2-124m --config.data.source.path=data/train.bin --workdir=runs/gpt2

Exit codes: 0 the run came to its end; 1 it failed; 2 the command, the config or the data was wrong; 3 the loss was not
finite and learner.nonfinite ended the run; 4 it does not fit into the devices' memory, and nothing was started; 5
another process of the run is gone, or they did not find each other; 6 it hung, and its stacks are in WORKDIR/health; 7
replicas disagree; 130 and 143 it was stopped by SIGINT and SIGTERM, and what was trained is saved. docs/operations.md
says what to do.
"""

import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from framework.terminal import interrupts
from launch import cli, mistakes, stored

EXIT_FAILED, EXIT_USAGE, EXIT_NONFINITE = 1, 2, 3
EXIT_TOO_BIG = 4
_OTHERS_SECONDS = 0.5  # which all processes of a run have to end after a signal, before the first does
# What JAX says when the others have left: gloo on CPU, NCCL on GPU, the coordinator.
_PEER = re.compile("(?i)gloo|nccl|connection (closed|reset|refused)|coordinat|heartbeat|barrier|unavailable|deadline")


def add_flags(parser: cli.Parser) -> None:
    """The flags of this verb, which the launchers take too and pass on."""
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--workdir", metavar="DIR", help="config, metrics, checkpoints and logs go there")
    place.add_argument("--run_name", metavar="NAME", help="short for --workdir=runs/NAME")
    parser.add_argument("--resume", choices=["auto", "never", "must"], default="auto", help="if there are checkpoints")
    parser.add_argument("--dry_run", action="store_true", help="show the start table, compile the step, train nothing")
    parser.add_argument("--force", action="store_true", help="resume on other data; train although it does not fit")
    parser.add_argument("--device_memory_gib", type=float, metavar="GIB", help="instead of what the devices have")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="several processes: where process 0 listens")
    parser.add_argument("--num_processes", type=int, metavar="N", help="several processes: how many")
    parser.add_argument("--process_id", type=int, metavar="I", help="several processes: which one this is, from 0")


@cli.main
def main(argv: list[str]) -> int:
    """Parses, checks everything that needs no device, then starts JAX and trains."""
    began = time.monotonic() - time.process_time()  # imports count; those of the process that this is a fork of do not
    parser = cli.Parser("train", __doc__)
    add_flags(parser)
    parser.add_argument("--target", help="with --dry_run: a machine that is not here, as for launch.plan: v5p-2048")
    command = parser.parse(argv)
    stored.check(command.config)
    experiment = command.config.instantiate()  # every mistake in the config shows before JAX starts
    health = experiment.health

    # Imported late: a typo on the command line should not wait for these.
    from framework.devices.executables import use_compilation_cache
    from framework.files.workdir import Workdir, safe_child
    from framework.metrics.goodput import Goodput
    from framework.processes import distributed
    from framework.processes.health import EXIT_PEER
    from framework.processes.rendezvous import ProcessesMissingError
    from launch import finished

    args, goodput = command.args, Goodput(since=began)
    limit = cli.gib("device_memory_gib", args.device_memory_gib)
    folder = args.workdir or safe_child("runs", args.run_name, "--run_name")
    if args.target is not None:
        return _dry_run(command, Workdir(folder), limit)
    cluster = distributed.detect(os.environ, (args.coordinator, args.num_processes, args.process_id))
    last = None if args.dry_run else finished.last_checkpoint(folder)
    if last is not None and args.resume == "never":
        last.refuse()
    end = finished.known_length(command.config)
    if last is not None and end is not None and last.ends(end):
        if cluster is None or cluster.process_id == 0:
            print("\n".join(last.lines(end, command.config)))
        return 0
    workdir = Workdir(folder)
    cli.prepare_jax()
    try:
        seconds = {"connect_seconds": health.connect_seconds, "heartbeat_seconds": health.heartbeat_seconds}
        distributed.initialize(cluster, **seconds)
    except ProcessesMissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PEER
    if cluster is not None and distributed.is_primary():
        # JAX ends the others as soon as the first is gone; they have a line to say, and their own exit code.
        interrupts.at_end(lambda number, line: time.sleep(_OTHERS_SECONDS))
    use_compilation_cache(command.config.trainer.compilation_cache)
    code = EXIT_USAGE  # of what is raised before the run is guarded; a run that is over changes nothing either
    try:
        if distributed.is_primary() and (message := workdir.claim()):
            print(message, file=sys.stderr)
        _check_shared(workdir)
        if last is not None and _epochs_are_over(last, command, experiment, workdir):
            return 0
        code = EXIT_FAILED
        code = _guarded(command, workdir, limit, goodput, health)
        return code
    finally:
        workdir.release(undo=args.dry_run or code in (EXIT_USAGE, EXIT_TOO_BIG))


def _check_shared(workdir: Any) -> None:
    """Raises FileNotFoundError, in every process of the run: one of them does not see what the first wrote."""
    import jax

    from framework.processes import distributed

    seen = workdir.sees(distributed.from_primary(workdir.owner()))
    if not distributed.everywhere(seen):
        who = f"process {jax.process_index()} on host {socket.gethostname()}" if not seen else "another process of it"
        raise FileNotFoundError(
            f"--workdir: {who} does not see what process 0 of this run wrote to {workdir.path}: all hosts need the "
            "same folder (NFS, Lustre, ...), or an object store (gs://..., s3://...)"
        )


def _epochs_are_over(last: Any, command: cli.Command, experiment: Any, workdir: Any) -> bool:
    """Whether the run has read its data as often as trainer.max_epochs says and has nothing left to do, and says so.

    Asks the data only where the last run came to its end, so what that run made of the data (tokens) is there.
    """
    from framework.processes import distributed

    options, data = experiment.trainer, experiment.data
    if options.max_epochs is None or not last.ends(last.config["trainer"]["max_steps"]):
        return False
    meet = partial(workdir.meet, partial(distributed.barrier, "finished"), is_primary=distributed.is_primary())
    data.setup(workdir.path, is_primary=distributed.is_primary(), barrier=meet)
    epoch_steps = data.epoch_steps(options.max_epochs)
    end = min(options.known_steps or epoch_steps, epoch_steps)
    is_over = last.ends(end)
    if is_over and distributed.is_primary():
        print("\n".join(last.lines(end, command.config)))
    return is_over


def _guarded(command: cli.Command, workdir: Any, limit: int | None, goodput: Any, health: Any) -> int:
    """Trains, and says how it ended. Of several processes one that fails does not wait for those that wait for it."""
    import jax

    from framework.processes.health import EXIT_PEER, UNLIMITED, Pulse

    process, count = jax.process_index(), jax.process_count()
    pulse = Pulse(workdir.path / "health", process, count, health, goodput, workdir.release)
    with nullcontext() if command.args.dry_run else pulse:
        code, reason = 1, ""
        try:
            code = cli.main(lambda _: _train(command, workdir, limit, goodput, pulse))([])
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"[:500]
            if count == 1:
                if goodput.phase not in UNLIMITED:
                    error.add_note(mistakes.IN_THE_LOOP)
                raise
            traceback.print_exc()
            code = EXIT_PEER if isinstance(error, jax.errors.JaxRuntimeError) and _PEER.search(str(error)) else 1
        finally:
            if not command.args.dry_run:
                pulse.write(exit=code, reason=reason)
    if count > 1 and code in (1, 2, EXIT_PEER):
        time.sleep(0 if process else 1)  # JAX ends all others as soon as the first is gone; they may be about to speak
        workdir.release(undo=command.args.dry_run or code == EXIT_USAGE)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if count > 1:
        jax.distributed.shutdown()  # waits for the others, whose saves may need this one
    return code


def _dry_run(command: cli.Command, workdir: Any, limit: int | None) -> int:
    """The start of a run on another machine's devices: everything that takes no array."""
    from framework.plan import startup, targets

    if not command.args.dry_run:
        raise cli.UsageError("--target goes with --dry_run: nothing can be trained on devices that are not here")
    targets.environment(command.args.target)
    cli.prepare_jax()
    target = targets.resolve(command.args.target)
    config, rules = command.resolve(target.name)
    print("".join(f"{line}\n" for line in rules), end="")
    workdir.claim()
    try:
        return 0 if startup.dry_run(command.spec, config, target, workdir.path, limit) else EXIT_TOO_BIG
    finally:
        workdir.release(undo=True)


def _train(command: cli.Command, workdir: Any, limit: int | None, goodput: Any, pulse: Any) -> int:
    import jax

    from framework.checkpoint import remains
    from framework.checkpoint.checkpointer import Checkpointer
    from framework.checkpoint.replicas import ReplicaMismatchError
    from framework.devices.accelerators import accelerator_name
    from framework.devices.allocator import keep_freed_memory
    from framework.files.workdir import write_json
    from framework.inference.images import save_grid
    from framework.metrics.plot import plot_losses
    from framework.plan import guard
    from framework.plan.host_room import check_host
    from framework.plan.start_table import start_report
    from framework.processes import distributed
    from framework.processes.health import EXIT_REPLICAS
    from framework.program.experiment import Experiment
    from framework.program.program import Program
    from framework.program.run_length import rate_notes, set_length
    from framework.run import canary
    from framework.run.compile_ahead import begin_evaluation, begin_first_values
    from framework.run.hooks import NonFiniteError, own_hooks
    from framework.run.report import compression_lines, sample_images, sample_text
    from framework.run.run import Run
    from framework.run.trainer import LastStepNotSavedError, Trainer
    from framework.terminal.progress import Progress
    from framework.terminal.tables import human_bytes, render

    args = command.args
    config, rules = command.resolve(accelerator_name(jax.devices()))
    experiment: Experiment = config.instantiate()
    hooks = own_hooks(experiment.trainer.hooks)
    program = Program(experiment)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    options, primary = experiment.trainer, distributed.is_primary()
    with Progress(
        options.known_steps or 0,
        log_every=options.log_every,
        stream=None if primary else open("/dev/null", "w"),
        log_path=workdir.log if primary else None,
        log_waits=True,
        item=experiment.data.item,
    ) as progress:
        for line in rules:
            progress.print(line)
        for note in remains.check(workdir, args.resume, config.to_dict()):
            progress.print(note)
        begins = not Checkpointer(directory=workdir.checkpoints, read_only=True).steps()
        if experiment.pretrained is not None and begins:
            # What is wrong with a directory shows before any compile.
            experiment.pretrained.places(experiment.language_model)
        progress.status("preparing data")
        meet = partial(workdir.meet, partial(distributed.barrier, "data"), is_primary=primary)
        with goodput.during("data"):
            experiment.data.setup(workdir.path, is_primary=primary, barrier=meet)
        progress.status("")
        if options.max_epochs is not None:
            for line in set_length(config, experiment.data.epoch_steps(options.max_epochs)):
                progress.print(line)
            data, experiment = experiment.data, config.instantiate()
            experiment.data, options, program = data, experiment.trainer, Program(experiment)
            progress.set_total(options.max_steps)
        for line in rate_notes(config.learner, options.max_steps):
            progress.print(line)
        progress.print(render(start_report(command.spec, program)))
        check_host(program)
        progress.status("compiling")
        goodput.enter("compile")
        if begins and experiment.pretrained is None and not args.dry_run:
            begin_first_values(program)
        if experiment.health.canary and (line := canary.check(config, program)):
            progress.print(line)
        need = guard.need(program)
        progress.status("")
        refusal = guard.refusal(config, program, need, limit)
        distributed.barrier("planned")  # one may have compiled what another found in its cache
        goodput.enter("start")
        if not distributed.everywhere(refusal is None):
            progress.print(refusal or "another process of this run has less memory than the training step needs")
            if not args.force or need.message:
                program.ahead.close()
                return EXIT_TOO_BIG
        if args.dry_run:
            progress.print(
                f"dry run: the step compiles, and its peak is {human_bytes(need.peak)} per device. Nothing was trained."
            )
            return 0
        if experiment.data.validation_names:
            begin_evaluation(program)
        run, waits = Run(config, program, workdir, progress, goodput, pulse), True
        try:
            step = run.start(force=args.force)
            if primary:
                write_json(workdir.config, config.to_dict())
            stopped = Trainer(run, need, hooks).train(step)
        except (NonFiniteError, ReplicaMismatchError, LastStepNotSavedError) as error:
            progress.print(f"error: {error}")
            return {NonFiniteError: EXIT_NONFINITE, ReplicaMismatchError: EXIT_REPLICAS}.get(type(error), 1)
        except jax.errors.JaxRuntimeError:
            waits = jax.process_count() == 1  # for pending saves, and not for one that another process has left
            raise
        finally:
            program.ahead.close()
            if waits:
                run.close()
            progress.print(goodput.line())
        if stopped is not None:
            progress.print(f"stopped by {signal.Signals(stopped).name}; the same command goes on from here")
            return 128 + stopped
        state, run.state = run.state, {}
        state = program.in_one(state)
        text, images = sample_text(program, state), sample_images(program, state)  # every process takes part
        del state  # the memory is free again for whoever runs another in this process
        if primary:
            about = (command.spec, experiment.data.loss_unit)
            curves = partial(plot_losses, workdir.metrics, workdir.path / "loss.png", *about)
            progress.print(_picture("loss curves", curves))
            if images is not None:
                levels = getattr(experiment.data, "levels", 256)
                grid = partial(save_grid, images, workdir.path / "samples.png", levels=levels)
                progress.print(_picture("samples", grid))
        if text is not None:
            progress.print(f"sample, continuing {options.sample_prompt!r}:\n{text}")
        for line in compression_lines(experiment.data, run.evaluation):
            progress.print(line)
        progress.print(f"checkpoint: {workdir.checkpoints} (steps {run.checkpointer.steps()})")
    return 0


def _picture(name: str, draw: Callable[[], object]) -> str:
    """What to say of a picture that is drawn. A full disk costs it, and not the run that it is of."""
    try:
        return f"{name}: {draw()}"
    except OSError as error:
        return f"{name}: not written: {error.strerror or error}"


if __name__ == "__main__":
    sys.exit(main())
