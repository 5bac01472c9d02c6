"""The start of a run that was asked for: it joins its other processes, claims its workdir, trains there, and ends."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax

from framework.config import Config
from framework.devices.environment import prepare_jax, start_devices
from framework.devices.executables import use_compilation_cache
from framework.files.workdir import Workdir
from framework.processes import distributed
from framework.processes.health import UNLIMITED, Health, Pulse
from framework.run import mistakes, resuming
from framework.run.finished import LastCheckpoint, known_length, last_checkpoint
from framework.run.job import Job
from framework.terminal import interrupts, phases
from framework.terminal.exit_codes import REFUSED, ExitCode

# The time that all processes of a run have to end after a signal, before the first does.
_OTHERS_SECONDS = 0.5
# What JAX says when the others have left: gloo on CPU, NCCL on GPU, the coordinator.
_PEER = re.compile("(?i)gloo|nccl|connection (closed|reset|refused)|coordinat|heartbeat|barrier|unavailable|deadline")


def execute(job: Job, cluster: distributed.Cluster | None) -> int:
    """Does what is asked for, from the look at the workdir to the last picture.

    Args:
        job: what to train; its workdir is opened here.
        cluster: the processes of the run; None for a single one.

    Returns:
        the exit code.

    Raises:
        ProcessesMissingError: the processes of the run did not find each other.
        ValueError, OSError: the workdir is in use, cannot be used, or holds what is not to be resumed.
    """
    last = None if job.dry_run else last_checkpoint(job.folder)
    if last is not None and job.resume == "never":
        last.refuse()
    # Looked at before JAX starts, so that whoever has nothing to do hears so at once.
    is_primary = cluster is None or cluster.process_id == 0
    if last is not None and _is_over(last, job.request.config, is_primary=is_primary):
        return ExitCode.DONE
    job.workdir = Workdir(job.folder)
    prepare_jax()
    _connect(cluster, job.experiment.health)
    use_compilation_cache(job.request.config.trainer.compilation_cache)
    return _in_workdir(job, last)


def _is_over(last: LastCheckpoint, config: Config, *, is_primary: bool) -> bool:
    """Whether the config alone says that the run has nothing left to do; the first process prints so.

    Args:
        last: the newest checkpoint of the workdir.
        config: without rules by accelerator.
        is_primary: this is the first process of the run.
    """
    end = known_length(config)
    if end is None or not last.ends(end):
        return False
    if is_primary:
        print("\n".join(last.lines(end, config)))
    return True


def _connect(cluster: distributed.Cluster | None, health: Health) -> None:
    """Joins the other processes of the run, if there are any. Raises ProcessesMissingError."""
    distributed.initialize(
        cluster,
        connect_seconds=health.connect_seconds,
        heartbeat_seconds=health.heartbeat_seconds,
    )
    start_devices()
    if not distributed.is_primary():
        # One process of a job speaks. Where JAX has found the others, nobody knew the first one before.
        phases.hush()
    if cluster is not None and distributed.is_primary():
        # JAX ends the others as soon as the first is gone; they have a line to say, and their own
        # exit code.
        interrupts.at_end(lambda number, line: time.sleep(_OTHERS_SECONDS))


def _in_workdir(job: Job, last: LastCheckpoint | None) -> int:
    """Claims the workdir and trains there; the exit code. A start that was refused leaves the workdir as it was.

    Args:
        job: what to train.
        last: the newest checkpoint of the workdir, if there is one that counts.
    """
    workdir = job.workdir
    # The code of what is raised before the run is guarded; a run that is over changes nothing
    # either.
    code = ExitCode.USAGE
    try:
        if distributed.is_primary():
            message = workdir.claim()
            if message:
                print(message, file=sys.stderr)
        _check_shared(workdir)
        if last is not None and _epochs_are_over(last, job):
            return ExitCode.DONE
        # The code that `finally` sees if `_guarded` raises.
        code = ExitCode.FAILED
        code = _guarded(job)
        return code
    finally:
        refused = code in REFUSED
        workdir.release(undo=job.dry_run or refused)


def _check_shared(workdir: Workdir) -> None:
    """Raises FileNotFoundError, in every process of the run: one of them does not see what the first wrote."""
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


def _epochs_are_over(last: LastCheckpoint, job: Job) -> bool:
    """Whether the run has read its data as often as trainer.max_epochs says and has nothing left to do, and says so.

    Asks the data only where the last run came to its end, so what that run made of the data (tokens) is there.
    """
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
    ends = last.ends(end)
    if ends and primary:
        print("\n".join(last.lines(end, job.request.config)))
    return ends


def _guarded(job: Job) -> int:
    """Trains, and says how it ended. Of several processes one that fails does not wait for those that wait for it."""
    workdir = job.workdir
    goodput = job.goodput
    dry_run = job.dry_run
    process = jax.process_index()
    count = jax.process_count()
    health = job.experiment.health
    pulse = Pulse(workdir.path / "health", process, count, health, goodput, workdir.release)
    with nullcontext() if dry_run else pulse:
        code = ExitCode.FAILED
        reason = ""
        try:
            # The user's mistakes become exit codes here, which the pulse then writes down.
            code = job.guarded(lambda: _train(job, pulse))
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"[:500]
            if count == 1:
                if goodput.phase not in UNLIMITED:
                    error.add_note(mistakes.IN_THE_LOOP)
                raise
            peer_is_gone = isinstance(error, jax.errors.JaxRuntimeError) and _PEER.search(str(error))
            code = ExitCode.PEER if peer_is_gone else ExitCode.FAILED
            if peer_is_gone and not os.environ.get("PLIMSOLL_TRACEBACK"):
                # The frames are of whatever was waiting for it, and of no use.
                first_line = str(error).strip().partition("\n")[0][:300]
                print(f"error: process {process}: another process of the run is gone: {first_line}", file=sys.stderr)
            else:
                traceback.print_exc()
        finally:
            if not dry_run:
                pulse.write(exit=code, reason=reason)
    if count > 1 and code in (ExitCode.FAILED, ExitCode.PEER, *REFUSED):
        # JAX ends all others as soon as the first is gone; they may be about to speak.
        time.sleep(0 if process else 1)
        workdir.release(undo=dry_run or code in REFUSED)
        # os._exit waits for no process that waits for this one, and flushes nothing.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if count > 1:
        # Waits for the others, whose saves may need this process.
        jax.distributed.shutdown()
    return code


def _train(job: Job, pulse: Any) -> int:
    """Trains on this process's devices; the exit code."""
    # All that a run needs until its end is imported here: hours later, the files may have changed.
    from framework.run.training import Training

    return Training(job, pulse).execute()
