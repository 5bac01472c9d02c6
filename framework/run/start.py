"""Starts a run: joins the other processes, claims the workdir, trains in it, and exits with a code."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from functools import partial

import jax

from plimsoll.framework.devices.environment import prepare_jax, set_memory_fraction, start_devices
from plimsoll.framework.devices.executables import use_compilation_cache
from plimsoll.framework.files.workdir import Workdir
from plimsoll.framework.processes import distributed
from plimsoll.framework.processes.health import UNLIMITED, Pulse
from plimsoll.framework.run import resuming, user_errors
from plimsoll.framework.run.last_checkpoint import LastCheckpoint, find_last_checkpoint, get_run_length
from plimsoll.framework.run.request import RunError, RunRequest
from plimsoll.framework.terminal import interrupts, phases
from plimsoll.framework.terminal.exit_codes import REFUSED, ExitCode

# Seconds that the other processes get to exit after a signal, before process 0 exits.
_OTHERS_SECONDS = 0.5
# Patterns in JAX's errors when a peer has left: gloo on CPU, NCCL on GPU, the coordinator.
_PEER = re.compile("(?i)gloo|nccl|connection (closed|reset|refused)|coordinat|heartbeat|barrier|unavailable|deadline")


def execute(request: RunRequest, cluster: distributed.Cluster | None) -> int:
    """Run a request, from inspecting the workdir to writing the last picture.

    Args:
        request: what the run is asked to do.
        cluster: the processes of the run; None for a single process.

    Returns:
        The exit code.

    Raises:
        ProcessesMissingError: the processes of the run did not find each other.
        RunError: the run ended early, or does not fit; it has printed the reason.
        ValueError, OSError: the workdir is in use, cannot be used, or holds checkpoints that must not be resumed.
    """
    last = None if request.dry_run else find_last_checkpoint(request.folder)
    if last is not None and request.resume == "never":
        # A new run would overwrite the existing checkpoints.
        raise ValueError(
            f"--resume=never, but {last.directory} holds checkpoints up to step {last.step}; choose another --workdir, "
            "or remove them"
        )
    # Check this before JAX starts, so that a finished run reports it immediately.
    end = None if last is None else get_run_length(request.config)
    # A finished run of another model or of other data is an error. `train` compares them before it compiles.
    may_belong_to_another_run = last is not None and last.may_belong_to_another_run(request.config)
    if last is not None and end is not None and last.ends(end) and not may_belong_to_another_run:
        if cluster is None or cluster.process_id == 0:
            print("\n".join(last.lines(end, request.config, request.override_paths)))
        return ExitCode.DONE
    if last is not None and last.has_stopped(request.config) and not may_belong_to_another_run:
        if cluster is None or cluster.process_id == 0:
            print("\n".join(last.stop_lines()))
        return ExitCode.STOPPED_EARLY
    workdir = Workdir(request.folder)
    prepare_jax()
    _set_memory_fraction(request, cluster)
    health = request.experiment.health
    distributed.initialize(cluster, connect_seconds=health.connect_seconds, heartbeat_seconds=health.heartbeat_seconds)
    start_devices()
    if not distributed.is_primary():
        # Only process 0 prints. If JAX found the processes itself, we did not know earlier which one that is.
        phases.mute()
    elif cluster is not None:
        # JAX kills the other processes as soon as process 0 exits. Give them time to print and to exit with their own
        # code.
        interrupts.register_cleanup(lambda number, line: time.sleep(_OTHERS_SECONDS))
    use_compilation_cache(request.config.trainer.compilation_cache)
    # A refused start leaves the workdir unchanged. This code applies to errors raised before training. A run that is
    # already over changes nothing either.
    code = ExitCode.USAGE
    try:
        if distributed.is_primary():
            message = workdir.claim()
            if message:
                print(message, file=sys.stderr)
        _check_workdir_is_shared(workdir)
        if last is not None and not may_belong_to_another_run and _epochs_are_over(last, request, workdir):
            return ExitCode.DONE
        # Seen by `finally` if `_train_and_record` raises.
        code = ExitCode.FAILED
        code, error = _train_and_record(request, workdir, last)
    finally:
        workdir.release(undo=request.dry_run or code in REFUSED)
    if error is not None:
        raise error
    return code


def _set_memory_fraction(request: RunRequest, cluster: distributed.Cluster | None) -> None:
    """Set the share of a GPU's memory that JAX takes, for the run's mesh."""

    def choose_mesh(accelerator: str, num_devices: int) -> dict[str, int] | None:
        config, _ = request.resolve(accelerator)
        # Autotuning chooses the mesh only after JAX has started.
        if config.memory.auto:
            return None
        # A mesh that does not fit the devices is refused later.
        with suppress(ValueError):
            return config.mesh.instantiate().resolve(num_devices)
        return None

    if cluster is None:
        set_memory_fraction(choose_mesh=choose_mesh)
        return
    local_devices = None if cluster.local_device_ids is None else len(cluster.local_device_ids)
    set_memory_fraction(cluster.num_processes, local_devices, choose_mesh)


def _check_workdir_is_shared(workdir: Workdir) -> None:
    """Raise FileNotFoundError in every process if any of them does not see the files that process 0 wrote."""
    owner = distributed.broadcast_from_primary(workdir.owner())
    seen = workdir.has_same_lock(owner)
    # Collective: otherwise a process that sees the folder would later hang waiting for one that does not.
    if not distributed.is_true_on_all(seen):
        who = "another process of this run"
        if not seen:
            who = f"process {jax.process_index()} on host {socket.gethostname()}"
        raise FileNotFoundError(
            f"--workdir: {who} does not see the files that process 0 of this run wrote to {workdir.path}; all "
            "hosts need the same folder (NFS, Lustre, ...), or an object store (gs://..., s3://...)"
        )


def _epochs_are_over(last: LastCheckpoint, request: RunRequest, workdir: Workdir) -> bool:
    """Return whether the run has read its data `trainer.max_epochs` times and has nothing left to do, and report it.

    Sets up the data only if the last run came to its end, so the tokenized files of that run already exist.
    """
    options = request.experiment.trainer
    data = request.experiment.data
    if options.max_epochs is None or not last.ends(last.config["trainer"]["max_steps"]):
        return False
    primary = distributed.is_primary()
    barrier = partial(distributed.barrier, "finished")
    sync_processes = partial(workdir.sync_processes, barrier, is_primary=primary)
    data.allows_small_data = True
    data.setup(workdir.path, is_primary=primary, barrier=sync_processes)
    if data.num_rows < data.global_batch_size:
        # The run has reduced the batch, see `fit_batch_to_data`.
        data.global_batch_size = last.config["data"]["global_batch_size"]
    order = resuming.order_after({"config": last.config, "data": last.data}, last.step, data)
    epoch_steps = data.epoch_steps(options.max_epochs, order.origin)
    end = min(options.known_steps or epoch_steps, epoch_steps)
    ends = last.ends(end)
    if ends and primary:
        print("\n".join(last.lines(end, request.config, request.override_paths)))
    return ends


def _train_and_record(
    request: RunRequest, workdir: Workdir, last: LastCheckpoint | None
) -> tuple[int, BaseException | None]:
    """Train, and record how it ended. With several processes, a failing one exits without waiting for the others.

    Args:
        request: what the run is asked to do.
        workdir: the output folder, claimed by the caller.
        last: the newest checkpoint in the workdir; None if there is none.

    Returns:
        (the exit code, the error that ended the run if there was one).
    """
    # Import everything that the run needs until its end now: the source files may change in the hours until then.
    from plimsoll.framework.run.train import train

    goodput = request.goodput
    process = jax.process_index()
    count = jax.process_count()
    pulse = Pulse(workdir.path / "health", process, count, request.experiment.health, goodput, workdir.release)
    failure: BaseException | None = None
    with nullcontext() if request.dry_run else pulse:
        reason = ""
        try:
            code = train(request, workdir, pulse, last)
        except BaseException as error:
            failure = error
            if isinstance(error, OSError):
                error.add_note(user_errors.OF_RUN)
            known_code = error.code if isinstance(error, RunError) else user_errors.exit_code(error)
            code = ExitCode.FAILED if known_code is None else known_code
            if known_code is None:
                reason = f"{type(error).__name__}: {error}"[:500]
            has_lost_peer = isinstance(error, jax.errors.JaxRuntimeError) and _PEER.search(str(error))
            if count == 1:
                if known_code is None and goodput.phase not in UNLIMITED:
                    error.add_note(user_errors.DURING_TRAINING)
            elif known_code is None and has_lost_peer and not os.environ.get("PLIMSOLL_TRACEBACK"):
                code = ExitCode.PEER
                # The traceback shows whatever was waiting for the peer, which does not help the user.
                first_line = str(error).strip().partition("\n")[0][:300]
                print(f"error: process {process}: another process of the run has exited: {first_line}", file=sys.stderr)
            elif known_code is None:
                code = ExitCode.PEER if has_lost_peer else ExitCode.FAILED
                traceback.print_exc()
            elif not isinstance(error, RunError):
                # A signal that is ending this process may have caused the error.
                interrupts.wait_if_exiting()
                user_errors.report_error(error, is_command=False)
        if not request.dry_run:
            # A run that stopped early has noted its own reason.
            pulse.write(exit=code, **({"reason": reason} if reason or code != ExitCode.STOPPED_EARLY else {}))
    if count > 1 and code in (ExitCode.FAILED, ExitCode.PEER, *REFUSED):
        # JAX kills the other processes as soon as process 0 exits, and they may still have to print their error.
        time.sleep(0 if process else 1)
        workdir.release(undo=request.dry_run or code in REFUSED)
        # os._exit does not wait for processes that wait for this one, and does not flush.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if count > 1:
        # Wait for the other processes, whose saves may need this one.
        jax.distributed.shutdown()
    return code, failure
