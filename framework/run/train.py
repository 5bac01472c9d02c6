"""A run from top to bottom, in one process: from the config to the last picture.

This module imports everything that a run needs until its end: the source files may change in the hours until then.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import jax

from plimsoll.framework.checkpoint import leftover_files
from plimsoll.framework.checkpoint.checkpointer import Checkpointer
from plimsoll.framework.checkpoint.replicas import ReplicaMismatchError
from plimsoll.framework.config import Config
from plimsoll.framework.devices.accelerators import accelerator_name
from plimsoll.framework.devices.allocator import (
    MAX_KEPT_BYTES,
    keep_freed_memory,
    release_freed_memory,
    return_freed_blocks,
)
from plimsoll.framework.devices.host import get_free_memory_bytes, rss_bytes
from plimsoll.framework.files.workdir import Workdir, write_json
from plimsoll.framework.layers.experts.router import Router
from plimsoll.framework.layout import TrainState
from plimsoll.framework.metrics.image_grid import save_grid
from plimsoll.framework.metrics.memory import ResidentMemory, memory_in_use
from plimsoll.framework.metrics.plot import plot_experts, plot_losses, plot_objective
from plimsoll.framework.metrics.writers import check_installed, import_writers
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.plan.host_memory import count_joined_bytes, explain_host_refusal
from plimsoll.framework.plan.memory_budget import (
    MemoryNeed,
    check_pinned_memory,
    compare_phases,
    explain_refusal,
    measure_largest_need,
    predict_host_memory,
    recall_step_peak,
    record_step_peak,
)
from plimsoll.framework.plan.startup import build_start_table
from plimsoll.framework.processes import distributed
from plimsoll.framework.processes.health import Pulse
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.jit_step import JitStep
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.run_length import rate_notes, set_length
from plimsoll.framework.program.small_data import fit_batch_to_data
from plimsoll.framework.program.stages import StageProgram, build_stage_programs, with_largest_stage, with_stage
from plimsoll.framework.run import held_out_answers, offload_self_test, resuming
from plimsoll.framework.run.best_metric import check_metrics
from plimsoll.framework.run.hooks import Hook, NonFiniteError, build_user_hooks
from plimsoll.framework.run.last_checkpoint import LastCheckpoint
from plimsoll.framework.run.report import compression_lines, sample_images, sample_text
from plimsoll.framework.run.request import TUNING_FILE, RunError, RunRequest, TuneResult
from plimsoll.framework.run.run import Run
from plimsoll.framework.run.trainer import LastStepNotSavedError, Trainer
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.progress import Progress
from plimsoll.framework.terminal.tables import human_bytes, render


def train(request: RunRequest, workdir: Workdir, pulse: Pulse, last: LastCheckpoint | None) -> int:
    """Train on this process's devices, from the config to the last picture.

    Args:
        request: what the run is asked to do.
        workdir: the output folder, claimed by the caller.
        pulse: heartbeat of this process.
        last: the newest checkpoint in the workdir; None if there is none.

    Returns:
        The exit code: 0, 8 if a rule or a hook stopped the run early, or 128 + n if signal n stopped it.

    Raises:
        RunError: the run ended for another reason than a user error; it has printed the reason.
    """
    # The config for these devices.
    config, rule_lines = request.resolve(accelerator_name(jax.devices()))
    tuning: TuneResult | None = None
    lines = [*rule_lines]
    if config.memory.auto:
        config, tuning = _tune_memory(request, config, workdir)
        lines += tuning.lines
    experiment: Experiment = config.instantiate() if lines else request.experiment
    hooks = build_user_hooks(experiment.trainer.hooks)
    program = Program(experiment)
    # Only process 0 writes to the terminal and to the log.
    is_primary = distributed.is_primary()
    progress = Progress(
        experiment.trainer.known_steps or 0,
        log_every=experiment.trainer.log_every,
        stream=None if is_primary else open("/dev/null", "w"),  # noqa: SIM115
        log_path=workdir.log if is_primary else None,
        log_waits=True,
        item=experiment.data.item,
    )
    with progress, ResidentMemory(request.goodput) as resident:
        _print_lines(progress, [*request.notes, *lines])
        check_installed(experiment.trainer.wandb_project, experiment.trainer.mlflow_uri)
        _print_lines(progress, leftover_files.check(workdir, request.resume, config.to_dict()))
        program = _prepare(request, config, program, workdir, progress)
        if last is not None and (code := _report_finished(last, config, pulse, progress)) is not None:
            return code
        programs = build_stage_programs(program)
        need = _check_memory(request, config, programs, workdir, progress)
        if request.dry_run:
            peak = human_bytes(need.peak)
            progress.print(f"dry run: the step compiles, and its peak is {peak} per device. Nothing was trained.")
            return ExitCode.DONE
        if program.experiment.data.validation_names and (backend := _backend_that_compiles_ahead(program)):
            backend.begin_evaluation()
            if not _is_small(program, need):
                # The compiler's memory is then free before the state exists.
                with phase("compiling the evaluation", patience=SHORT):
                    program.ahead.wait()
                release_freed_memory()
        if need.host is not None:
            pulse.note(rss_predicted_bytes=need.host.process_peak_bytes, device_predicted_bytes=need.peak)
        run = Run(config, programs, workdir, progress, request.goodput, pulse)
        try:
            stop_signal = _train_steps(run, need, hooks, tuning, force=request.force)
            if stop_signal is not None:
                name = signal.Signals(stop_signal).name
                progress.print(f"stopped by {name}; run the same command to resume")
                # Shell convention: 128 plus the signal number.
                return 128 + stop_signal
            _finish(run, request.spec)
            stop_reason = run.stop_reason
        except BaseException:
            # A notebook keeps the traceback of the last error, whose frames refer to the state.
            run.delete_state()
            raise
        finally:
            run.state = TrainState()
            release_freed_memory()
        device_peak = memory_in_use(program.mesh.local_devices).device_peak_bytes
        progress.print(render([compare_phases(need, resident.peaks, device_peak)]))
        if stop_reason is None:
            return ExitCode.DONE
        pulse.note(reason=stop_reason)
        return ExitCode.STOPPED_EARLY


def _tune_memory(request: RunRequest, config: Config, workdir: Workdir) -> tuple[Config, TuneResult]:
    """Choose memory settings for the largest stage of the data; returns the config with them and all of its stages.

    They probably fit the other stages too; `_check_memory` compiles all of them.
    """
    largest = with_largest_stage(config)
    tuning = request.tune_memory(request, largest, workdir.path)
    if largest is config:
        return tuning.config, tuning
    tuned = tuning.config.copy()
    tuned.data = config.data
    return tuned, tuning


def _prepare(request: RunRequest, config: Config, program: Program, workdir: Workdir, progress: Progress) -> Program:
    """Prepare the data, and determine the length of the run, before anything is compiled.

    Returns:
        The program, built again if the data or the checkpoint changed the config: the steps per epoch are known only
        when the data is ready.
    """
    experiment = program.experiment
    checkpointer = Checkpointer(directory=workdir.checkpoints, read_only=True)
    is_new_run = not checkpointer.steps()
    pretrained = experiment.pretrained
    if pretrained is not None and is_new_run:
        # Report a bad weights directory before anything is compiled.
        pretrained.places(experiment.language_model)
    # Process 0 tokenizes, and the others wait for its files.
    is_primary = distributed.is_primary()
    barrier = partial(distributed.barrier, "data")
    sync_processes = partial(workdir.sync_processes, barrier, is_primary=is_primary)
    resuming.check_tokenizer(checkpointer, config)
    with request.goodput.during("data"), phase("preparing data", patience=SHORT):
        experiment.data.allows_small_data = True
        experiment.data.setup(workdir.path, is_primary=is_primary, barrier=sync_processes)
    small_data_lines = fit_batch_to_data(config, experiment, program.mesh)
    if small_data_lines:
        _print_lines(progress, small_data_lines)
        experiment = config.instantiate(data=experiment.data)
        program = Program(experiment)
    kept_lines = resuming.keep_counters(checkpointer, config)
    if kept_lines:
        _print_lines(progress, kept_lines)
        experiment = config.instantiate(data=experiment.data)
        program = Program(experiment)
    order = resuming.check(checkpointer, program, config, force=request.force)
    max_epochs = experiment.trainer.max_epochs
    if max_epochs is not None:
        epoch_steps = experiment.data.epoch_steps(max_epochs, order.origin)
        _print_lines(progress, set_length(config, epoch_steps))
        if config.trainer.max_steps != experiment.trainer.known_steps:
            # Pass the prepared data on: it does not depend on the length.
            experiment = config.instantiate(data=experiment.data)
            program = Program(experiment)
        progress.set_total(experiment.trainer.max_steps)
    _print_lines(progress, rate_notes(config.learner, experiment.trainer.max_steps))
    check_metrics(program)
    if experiment.batch_transform is not None:
        experiment.batch_transform.check_files(program, workdir.path, is_new_run=is_new_run)
    return program


def _report_finished(last: LastCheckpoint, config: Config, pulse: Pulse, progress: Progress) -> int | None:
    """Report a run that has nothing left to do, and return its exit code; None if it goes on."""
    if last.ends(config.trainer.max_steps):
        _print_lines(progress, last.lines(config.trainer.max_steps, config))
        return ExitCode.DONE
    if last.has_stopped(config):
        _print_lines(progress, last.stop_lines())
        pulse.note(reason=last.stop_reason)
        return ExitCode.STOPPED_EARLY
    return None


def _check_memory(
    request: RunRequest, config: Config, programs: Sequence[StageProgram], workdir: Workdir, progress: Progress
) -> MemoryNeed:
    """Print the start table, compile the step, and compare the memory that the run needs with what there is.

    Host memory is compared before anything is compiled, and again when the memory of the step is known. If the data has
    stages, the steps of all stages are compiled, and the largest one counts.

    Raises:
        RunError: the run does not fit.
    """
    program = programs[0].program
    experiment = program.experiment
    saved_steps = Checkpointer(directory=workdir.checkpoints, read_only=True).steps()
    if saved_steps:
        starts_at = f"step {max(saved_steps):,}, resumed from {workdir.checkpoints}"
    elif experiment.pretrained is not None:
        starts_at = "step 0 (published weights)"
    else:
        starts_at = "step 0 (fresh initialization)"
    # Import now what a run needs later, because the memory that is in use now counts.
    import_writers()
    # Preparing the data may have left freed memory, which would count although it is used again.
    release_freed_memory()
    process_bytes = rss_bytes()
    devices = list(program.mesh.devices.flat)
    host = predict_host_memory(program, process_bytes, request.host_limit, recall_step_peak(config, devices))
    progress.print(render(build_start_table(request.spec, program, host, starts_at=starts_at)))
    warnings = experiment.data.warnings()
    if experiment.pretrained is not None:
        longest = max(one.program.experiment.data.seq_len for one in programs)
        warnings = [*warnings, *experiment.pretrained.warnings(longest)]
    _print_lines(progress, [f"warning: {warning}" for warning in warnings])
    check_pinned_memory(program)
    _refuse(explain_host_refusal(host), request, progress)
    request.goodput.enter("compile")
    # Weights from a checkpoint or from files are not initialized randomly, and a dry run initializes none.
    is_fresh = not saved_steps and experiment.pretrained is None
    if is_fresh and not request.dry_run and (backend := _backend_that_compiles_ahead(program)):
        backend.begin_init()
    if experiment.health.offload_self_test:
        with phase("checking offloading on a small model", patience=SHORT):
            line = offload_self_test.check(config, program)
        if line:
            progress.print(line)
    need, largest = measure_largest_need(programs)
    release_freed_memory()
    # Each step on a CPU allocates the same temporary buffers; see `framework.devices.allocator`.
    if program.backend.platform == "cpu" and _is_small(program, need):
        keep_freed_memory()
    else:
        return_freed_blocks()
    # One process may compile what another finds in its cache, so the processes can arrive here minutes apart.
    distributed.barrier("planned")
    if not need.message:
        record_step_peak(config, devices, need.peak)
    host = predict_host_memory(program, process_bytes, request.host_limit, need.peak)
    request.goodput.enter("start")
    if largest.stage is not None:
        config = with_stage(config, largest.stage)
    refusal = explain_refusal(config, largest.program, need, request.limit)
    if refusal is not None and largest.stage is not None and len(programs) > 1:
        refusal = f"{largest.label}: {refusal}"
    refusal = refusal or explain_host_refusal(host)
    try:
        _refuse(refusal, request, progress, is_final=bool(need.message))
    except RunError:
        for one in programs:
            one.program.ahead.close()
        raise
    return replace(need, host=host)


def _is_small(program: Program, need: MemoryNeed) -> bool:
    """Return whether all arrays of this process, at the peak of a step, take at most MAX_KEPT_BYTES."""
    bytes_per_device = need.peak + program.layout.bytes_per_device(memory_kind="pinned_host")
    return bytes_per_device * len(program.mesh.local_devices) <= MAX_KEPT_BYTES


def _refuse(refusal: str | None, request: RunRequest, progress: Progress, *, is_final: bool = False) -> None:
    """Refuse the run if any process has a reason. Collective.

    Args:
        refusal: the reason of this process; None if it has none.
        request: what the run is asked to do; with `force`, the reason is only printed.
        progress: the terminal.
        is_final: refuse the run even with `force`.

    Raises:
        RunError: the run is refused.
    """
    if distributed.is_true_on_all(refusal is None):
        return
    message = refusal or "another process of this run has less memory than the run needs"
    progress.print(message)
    if not request.force or is_final:
        raise RunError(message, ExitCode.TOO_BIG)


def _train_steps(
    run: Run, need: MemoryNeed, hooks: Sequence[Hook], tuning: TuneResult | None, *, force: bool
) -> int | None:
    """Train to the last step.

    Returns:
        The signal that stopped the run before that, after a save; None if there was none.

    Raises:
        RunError: the loss was not finite, replicas differ, or the last step was not saved.
    """
    transform = run.experiment.batch_transform
    workdir = run.workdir
    waits_for_saves = True
    try:
        if transform is not None:
            # Open it before the state exists: an auxiliary model may need the memory.
            is_new_run = not run.checkpointer.steps()
            transform.open(run.program, workdir.path, is_new_run=is_new_run, log=run.progress.print)
        with phase("opening the run", patience=SHORT):
            step = run.start(force=force)
        if distributed.is_primary():
            # Written after `start` has accepted the workdir, so that a refused start leaves its files unchanged.
            write_json(workdir.config, run.config.to_dict())
            if tuning is not None:
                write_json(workdir.path / TUNING_FILE, tuning.record)
        return Trainer(run, need, hooks).train(step)
    except (NonFiniteError, ReplicaMismatchError, LastStepNotSavedError) as error:
        run.progress.print(f"error: {error}")
        codes = {NonFiniteError: ExitCode.NONFINITE, ReplicaMismatchError: ExitCode.REPLICAS}
        raise RunError(str(error), codes.get(type(error), ExitCode.FAILED)) from error
    except jax.errors.JaxRuntimeError:
        # Wait for pending saves, but not for a save that another process has abandoned.
        waits_for_saves = jax.process_count() == 1
        raise
    finally:
        for one in run.programs:
            one.program.ahead.close()
        if waits_for_saves:
            run.close()
        run.progress.print(run.goodput.line())


def _has_room_to_sample(program: Program) -> bool:
    """Return whether the hosts of all processes have room to join layers that are stored separately. Collective."""
    joined_bytes = len(program.mesh.local_devices) * count_joined_bytes(program.layout, program.backend.parts)
    free_bytes = get_free_memory_bytes() // distributed.count_processes_here()
    return distributed.is_true_on_all(joined_bytes <= free_bytes)


def _finish(run: Run, spec: str) -> None:
    """Sample from the trained model, draw the pictures, and print the lines that end a run.

    Every process takes part in sampling. The state is deleted afterwards, which frees its memory for another training
    in this process.
    """
    program = run.program
    experiment = program.experiment
    path = run.workdir.path
    # Not one of the phases of training any more; `ResidentMemory` records it as "end".
    run.goodput.enter("start")
    text = None
    images = None
    table: held_out_answers.AnswerTable = []
    if _has_room_to_sample(program):
        with phase("drawing a sample", patience=1.0):
            run.state = program.backend.join_stacks(run.state)
            text = sample_text(program, run.state)
            images = sample_images(program, run.state)
            table = held_out_answers.answer_table(program, run.state)
    else:
        run.progress.print("no sample is drawn: host memory has no room to join the layers; use plimsoll generate")
    run.state = TrainState()
    if distributed.is_primary():
        metrics = run.workdir.metrics
        model = experiment.model
        objective = model.head.objective if isinstance(model, CausalLM) else None
        unit = experiment.data.loss_unit if objective is None else objective.unit
        with phase("plotting the losses", patience=SHORT):
            line = _picture("loss curves", partial(plot_losses, metrics, path / "loss.png", spec, unit))
        run.progress.print(line)
        if objective is not None:
            with phase("plotting the metrics of the objective", patience=SHORT):
                line = _picture("objective", partial(plot_objective, metrics, path / "objective.png", spec))
            run.progress.print(line)
        layers = [layer for stack in model.stacks.values() for layer in stack.pattern.walk()]
        if any(isinstance(layer, Router) and layer.expert_metrics for layer in layers):
            with phase("plotting the load of each expert", patience=SHORT):
                line = _picture("experts", partial(plot_experts, metrics, path / "experts.png", spec))
            run.progress.print(line)
        if images is not None:
            levels = getattr(experiment.data, "levels", 256)
            grid = partial(save_grid, images, path / "samples.png", levels=levels)
            run.progress.print(_picture("samples", grid))
        if table:
            run.progress.print(_picture("answers", partial(held_out_answers.write_table, run.workdir, table)))
    _print_lines(run.progress, held_out_answers.table_lines(table))
    if text is not None:
        run.progress.print(f"sample, continuing {run.options.sample_prompt!r}:\n{text}")
    _print_lines(run.progress, compression_lines(experiment.data, run.evaluation, run.options.eval_batches, path))
    run.progress.print(f"checkpoint: {run.workdir.checkpoints} (steps {run.checkpointer.steps()})")


def _backend_that_compiles_ahead(program: Program) -> JitStep | None:
    """Return the backend if a background thread is to compile programs that are needed later; see `CompileThread`."""
    # A GPU's compiler benchmarks kernels on the device, so two programs would disturb each other's timings. A TPU may
    # lack the memory for evaluation, which must show before there are steps to lose. Several processes must compile
    # in the same order.
    backend = program.backend
    compiles_ahead = backend.platform == "cpu" and jax.process_count() == 1
    return backend if compiles_ahead and isinstance(backend, JitStep) else None


def _print_lines(progress: Progress, lines: Iterable[str]) -> None:
    for line in lines:
        progress.print(line)


def _picture(name: str, draw: Callable[[], object]) -> str:
    """Draw a picture and return the line about it. A full disk only loses the picture; the run continues."""
    try:
        return f"{name}: {draw()}"
    except OSError as error:
        return f"{name}: not written: {error.strerror or error}"
