"""Train a model from a named config: start, resume, or only look (--dry_run). Ctrl-C and SIGTERM save first.

    python -m launch.train --config=stdlib-tiny --workdir=runs/stdlib-tiny
    python -m launch.train --config=gpt2-124m --config.data.source.path=data/train.bin --workdir=runs/gpt2

Exit codes: 0 the run came to its end; 1 it failed; 2 the command, the config or the data was wrong; 3 the loss was not
finite and learner.nonfinite ended the run; 4 it does not fit into the devices' memory, and nothing was started; 5
another process of the run is gone, or they did not find each other; 6 it hung, and its stacks are in WORKDIR/health; 7
replicas disagree; 130 and 143 it was stopped by SIGINT and SIGTERM, and what was trained is saved. docs/operations.md
says what to do.
"""

import importlib
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from framework.config import Config
from framework.terminal import interrupts
from launch import cli, mistakes, stored

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NONFINITE = 3
EXIT_TOO_BIG = 4
# The time that all processes of a run have to end after a signal, before the first does.
_OTHERS_SECONDS = 0.5
# What JAX says when the others have left: gloo on CPU, NCCL on GPU, the coordinator.
_PEER = re.compile("(?i)gloo|nccl|connection (closed|reset|refused)|coordinat|heartbeat|barrier|unavailable|deadline")
# Modules that a run needs hours after its start. They are imported at its start: by then, the files
# may have changed.
_LATER_MODULES = (
    "framework.checkpoint.remains",
    "framework.checkpoint.replicas",
    "framework.inference.images",
    "framework.metrics.plot",
    "framework.plan.guard",
    "framework.plan.host_room",
    "framework.plan.start_table",
    "framework.program.run_length",
    "framework.run.canary",
    "framework.run.compile_ahead",
    "framework.run.report",
    "framework.run.run",
    "framework.run.trainer",
    "framework.terminal.tables",
)


@dataclass
class _Job:
    """What the command line asks for, with what `main` has checked and opened for it."""

    command: cli.Command
    experiment: Any  # built from the config without its rules by accelerator
    workdir: Any
    limit: int | None  # bytes of device memory that --device_memory_gib allows
    goodput: Any

    @property
    def args(self) -> Any:
        """The verb's own flags."""
        return self.command.args


def add_flags(parser: cli.Parser) -> None:
    """The flags of this verb, which the launchers take too and pass on."""
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--workdir", metavar="DIR", help="config, metrics, checkpoints and logs go there")
    place.add_argument("--run_name", metavar="NAME", help="short for --workdir=runs/NAME")
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
        return _dry_run(command, Workdir(folder), limit)
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
    return _in_workdir(_Job(command, experiment, workdir, limit, goodput), last)


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


def _in_workdir(job: _Job, last: Any) -> int:
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


def _epochs_are_over(last: Any, job: _Job) -> bool:
    """Whether the run has read its data as often as trainer.max_epochs says and has nothing left to do, and says so.

    Asks the data only where the last run came to its end, so what that run made of the data (tokens) is there.
    """
    from framework.processes import distributed

    options = job.experiment.trainer
    data = job.experiment.data
    if options.max_epochs is None or not last.ends(last.config["trainer"]["max_steps"]):
        return False
    primary = distributed.is_primary()
    barrier = partial(distributed.barrier, "finished")
    meet = partial(job.workdir.meet, barrier, is_primary=primary)
    data.setup(job.workdir.path, is_primary=primary, barrier=meet)
    epoch_steps = data.epoch_steps(options.max_epochs)
    end = min(options.known_steps or epoch_steps, epoch_steps)
    is_over = last.ends(end)
    if is_over and primary:
        print("\n".join(last.lines(end, job.command.config)))
    return is_over


def _guarded(job: _Job) -> int:
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


def _dry_run(command: cli.Command, workdir: Any, limit: int | None) -> int:
    """The start of a run on another machine's devices: everything that takes no array."""
    from framework.plan import startup, targets

    if not command.args.dry_run:
        raise cli.UsageError("--target goes with --dry_run: nothing can be trained on devices that are not here")
    # The target's compiler reads its environment when JAX starts it.
    targets.environment(command.args.target)
    cli.prepare_jax()
    target = targets.resolve(command.args.target)
    config, rules = command.resolve(target.name)
    print("".join(f"{line}\n" for line in rules), end="")
    workdir.claim()
    try:
        fits = startup.dry_run(command.spec, config, target, workdir.path, limit)
        return 0 if fits else EXIT_TOO_BIG
    finally:
        workdir.release(undo=True)


def _train(job: _Job, pulse: Any) -> int:
    """Trains on this process's devices; the exit code."""
    import jax

    from framework.devices.accelerators import accelerator_name

    for name in _LATER_MODULES:
        importlib.import_module(name)
    accelerator = accelerator_name(jax.devices())
    config, rules = job.command.resolve(accelerator)
    training = _Training(job, config, pulse)
    with training.progress:
        training.tell(rules)
        training.prepare()
        code = training.plan()
        if code is None:
            code = training.train()
        if code is None:
            training.finish()
            code = 0
    return code


class _Training:
    """One process's part of a run, by the methods that `_train` calls one after the other.

    The experiment is built twice if the length of the run is in epochs, as the steps of an epoch are known only when
    the data is ready: `prepare` then replaces `experiment` and `program`.
    """

    def __init__(self, job: _Job, config: Config, pulse: Any):
        import jax

        from framework.devices.allocator import keep_freed_memory
        from framework.processes import distributed
        from framework.program.experiment import Experiment
        from framework.program.program import Program
        from framework.run.hooks import own_hooks
        from framework.terminal.progress import Progress

        self.job = job
        self.workdir = job.workdir
        self.config = config
        self.pulse = pulse
        self.experiment: Experiment = config.instantiate()
        self.hooks = own_hooks(self.options.hooks)
        self.program = Program(self.experiment)
        if jax.default_backend() == "cpu":
            keep_freed_memory()
        self.primary = distributed.is_primary()
        # One process of a run speaks to the terminal and to the log.
        self.progress = Progress(
            self.options.known_steps or 0,
            log_every=self.options.log_every,
            stream=None if self.primary else open("/dev/null", "w"),  # noqa: SIM115
            log_path=self.workdir.log if self.primary else None,
            log_waits=True,
            item=self.experiment.data.item,
        )

    @property
    def options(self) -> Any:
        """The trainer's options, of the experiment as it is now."""
        return self.experiment.trainer

    def tell(self, lines: list[str]) -> None:
        """Prints lines above the progress bar, and into the log."""
        for line in lines:
            self.progress.print(line)

    def prepare(self) -> None:
        """Looks at what the workdir holds, makes the data ready, and settles how long the run is."""
        from framework.checkpoint import remains
        from framework.checkpoint.checkpointer import Checkpointer
        from framework.program.program import Program
        from framework.program.run_length import rate_notes, set_length

        notes = remains.check(self.workdir, self.job.args.resume, self.config.to_dict())
        self.tell(notes)
        saved_steps = Checkpointer(directory=self.workdir.checkpoints, read_only=True).steps()
        self.begins = not saved_steps
        pretrained = self.experiment.pretrained
        if pretrained is not None and self.begins:
            # What is wrong with a directory shows before any compile.
            pretrained.places(self.experiment.language_model)
        self._prepare_data()
        max_epochs = self.options.max_epochs
        if max_epochs is not None:
            epoch_steps = self.experiment.data.epoch_steps(max_epochs)
            self.tell(set_length(self.config, epoch_steps))
            # The data is ready already and does not depend on the length, so the new experiment
            # takes it over.
            data = self.experiment.data
            self.experiment = self.config.instantiate()
            self.experiment.data = data
            self.program = Program(self.experiment)
            self.progress.set_total(self.options.max_steps)
        self.tell(rate_notes(self.config.learner, self.options.max_steps))

    def _prepare_data(self) -> None:
        """Makes the data ready: the first process of a run tokenizes, the others wait for its files."""
        from framework.processes import distributed

        self.progress.status("preparing data")
        barrier = partial(distributed.barrier, "data")
        meet = partial(self.workdir.meet, barrier, is_primary=self.primary)
        with self.job.goodput.during("data"):
            self.experiment.data.setup(self.workdir.path, is_primary=self.primary, barrier=meet)
        self.progress.status("")

    def plan(self) -> int | None:
        """Compiles the step, and compares its memory with that of the devices. The exit code of a run that ends with
        that; None: it goes on."""
        from framework.plan import guard
        from framework.plan.host_room import check_host
        from framework.plan.start_table import start_report
        from framework.processes import distributed
        from framework.run import canary
        from framework.run.compile_ahead import begin_first_values
        from framework.terminal.tables import human_bytes, render

        args = self.job.args
        goodput = self.job.goodput
        report = start_report(self.job.command.spec, self.program)
        self.progress.print(render(report))
        check_host(self.program)
        self.progress.status("compiling")
        goodput.enter("compile")
        # First values that come from a checkpoint or from files are not drawn, and a dry run draws
        # none.
        if self.begins and self.experiment.pretrained is None and not args.dry_run:
            begin_first_values(self.program)
        if self.experiment.health.canary:
            line = canary.check(self.config, self.program)
            if line:
                self.progress.print(line)
        self.need = guard.need(self.program)
        self.progress.status("")
        refusal = guard.refusal(self.config, self.program, self.need, self.job.limit)
        # One process may have compiled what another found in its cache, so they come here minutes
        # apart.
        distributed.barrier("planned")
        goodput.enter("start")
        if not distributed.everywhere(refusal is None):
            self.progress.print(refusal or "another process of this run has less memory than the training step needs")
            if not args.force or self.need.message:
                self.program.ahead.close()
                return EXIT_TOO_BIG
        if args.dry_run:
            peak = human_bytes(self.need.peak)
            self.progress.print(f"dry run: the step compiles, and its peak is {peak} per device. Nothing was trained.")
            return 0
        return None

    def train(self) -> int | None:
        """Trains to the last step. The exit code of a run that ends before it; None: it came to its end."""
        import jax

        from framework.checkpoint.replicas import ReplicaMismatchError
        from framework.files.workdir import write_json
        from framework.processes.health import EXIT_REPLICAS
        from framework.run.compile_ahead import begin_evaluation
        from framework.run.hooks import NonFiniteError
        from framework.run.run import Run
        from framework.run.trainer import LastStepNotSavedError, Trainer

        goodput = self.job.goodput
        force = self.job.args.force
        if self.experiment.data.validation_names:
            begin_evaluation(self.program)
        self.run = Run(
            self.config,
            self.program,
            self.workdir,
            self.progress,
            goodput,
            self.pulse,
        )
        waits = True
        try:
            step = self.run.start(force=force)
            if self.primary:
                write_json(self.workdir.config, self.config.to_dict())
            stopped = Trainer(self.run, self.need, self.hooks).train(step)
        except (NonFiniteError, ReplicaMismatchError, LastStepNotSavedError) as error:
            self.progress.print(f"error: {error}")
            codes = {NonFiniteError: EXIT_NONFINITE, ReplicaMismatchError: EXIT_REPLICAS}
            return codes.get(type(error), EXIT_FAILED)
        except jax.errors.JaxRuntimeError:
            # Pending saves are waited for, but not one that another process has left.
            waits = jax.process_count() == 1
            raise
        finally:
            self.program.ahead.close()
            if waits:
                self.run.close()
            self.progress.print(goodput.line())
        if stopped is None:
            return None
        self.progress.print(f"stopped by {signal.Signals(stopped).name}; the same command goes on from here")
        # The shell's convention: 128 and the number of the signal.
        return 128 + stopped

    def finish(self) -> None:
        """Draws the pictures, and prints the samples and lines that end a run."""
        from framework.run.report import compression_lines

        text, images = self._sample()
        if self.primary:
            self._draw(images)
        if text is not None:
            self.progress.print(f"sample, continuing {self.options.sample_prompt!r}:\n{text}")
        self.tell(compression_lines(self.experiment.data, self.run.evaluation))
        steps = self.run.checkpointer.steps()
        self.progress.print(f"checkpoint: {self.workdir.checkpoints} (steps {steps})")

    def _sample(self) -> tuple[str | None, Any]:
        """(a text, images) from the trained model, None for what it does not make. Every process takes part.

        The state is gone afterwards: its memory is free for whoever runs another training in this process.
        """
        from framework.run.report import sample_images, sample_text

        state = self.run.state
        self.run.state = {}
        state = self.program.in_one(state)
        text = sample_text(self.program, state)
        images = sample_images(self.program, state)
        return text, images

    def _draw(self, images: Any) -> None:
        """Writes the pictures of the losses and of sampled images, and prints where they are."""
        from framework.inference.images import save_grid
        from framework.metrics.plot import plot_losses

        path = self.workdir.path
        data = self.experiment.data
        spec = self.job.command.spec
        curves = partial(plot_losses, self.workdir.metrics, path / "loss.png", spec, data.loss_unit)
        self.progress.print(_picture("loss curves", curves))
        if images is not None:
            levels = getattr(data, "levels", 256)
            grid = partial(save_grid, images, path / "samples.png", levels=levels)
            self.progress.print(_picture("samples", grid))


def _picture(name: str, draw: Callable[[], object]) -> str:
    """What to say of a picture that is drawn. A full disk costs it, and not the run that it is of."""
    try:
        return f"{name}: {draw()}"
    except OSError as error:
        return f"{name}: not written: {error.strerror or error}"


if __name__ == "__main__":
    sys.exit(main())
