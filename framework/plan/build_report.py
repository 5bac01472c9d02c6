"""Plans a run: compiles every phase for a target, or estimates it, and puts the results into one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from plimsoll.framework.config import Config
from plimsoll.framework.families import describe_approximation, is_approximate
from plimsoll.framework.layers.base import batch_shards
from plimsoll.framework.layout import Nested, TrainState, merge
from plimsoll.framework.plan import cache, dry_run
from plimsoll.framework.plan.buffer_names import REPORT_GROUPS, NamedBuffer
from plimsoll.framework.plan.compilation import CompiledProgram
from plimsoll.framework.plan.device_trace import TraceCache
from plimsoll.framework.plan.dry_run import compile_programs, compile_step, dry_run_batch_transform
from plimsoll.framework.plan.estimate import Estimate
from plimsoll.framework.plan.grouped_products import note_exchange, note_ragged_products
from plimsoll.framework.plan.hlo import Array
from plimsoll.framework.plan.hlo.transfers import slice_transfers
from plimsoll.framework.plan.host_memory import HostMemoryModel, build_host_model
from plimsoll.framework.plan.jaxpr_analysis import FlopCount, find_zero_gradients, sum_flops
from plimsoll.framework.plan.key_exchange import note_key_exchange
from plimsoll.framework.plan.plan_report import (
    BREAKDOWN_KEYS,
    BatchReport,
    EstimateReport,
    LargestBuffer,
    PhaseReport,
    PlanReport,
    TimeReport,
    ZeroGradient,
)
from plimsoll.framework.plan.step_time.compiled_time import estimate_compiled_time
from plimsoll.framework.plan.step_time.estimated_time import estimate_time
from plimsoll.framework.plan.step_time.time_breakdown import StepTime
from plimsoll.framework.plan.suggest import SettingsSearch, estimate_for_target, state_bytes
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.stack_layout import PLACED_FIELDS
from plimsoll.framework.schedules.step import training_context
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.tables import human_bytes, human_duration

# Packages of the compilers, by platform; jaxlib itself has the CPU compiler.
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt"), "cpu": ()}
# Number of largest buffers in a report.
_LARGEST = 30
# Bytes per second that a process writes to storage, to give an idea of a save's duration: a local SSD's. Assumed.
_DISK_RATE = 1e9


@dataclass(frozen=True)
class CompiledTrainStep:
    """A compiled step and its program."""

    program: Program
    step: CompiledProgram


def get_report(
    spec: str,
    config: Config,
    target: Target,
    limit: int | None,
    *,
    name: str,
    estimate: bool,
    phases: bool,
    fresh: bool,
    suggests: bool = True,
    compiled_step: CompiledTrainStep | None = None,
    on_verdict: Callable[[PlanReport], object] | None = None,
) -> PlanReport:
    """Return one report from the fastest source: the analytical estimate, the plan cache, or the compiler.

    Args:
        spec: name of the config.
        config: config resolved for the target.
        target: the machine to plan for.
        limit: device memory in bytes; None means unknown.
        name: name by which the user requested the target; "" for the devices of this machine, for which no cached
            report is used because their name does not identify them.
        estimate: only compute the analytical estimate.
        phases: compile initialization and evaluation too.
        fresh: compile again even if nothing has changed.
        suggests: look for settings that fit if the config does not.
        compiled_step: the compiled step of the config, if there is one already.
        on_verdict: called with the report before the search for settings that fit, if there is one.
    """

    def show_named(report: PlanReport) -> None:
        if on_verdict is not None:
            on_verdict(replace(report, target=name or report.target))

    if estimate:
        report = estimate_report(spec, config, target, limit, suggests=suggests, on_verdict=show_named)
        return replace(report, target=name or report.target)
    limits = (limit, target.host_limit_bytes)
    path = cache.cache_path(config, name=spec, target=name or "local", limit=limits, phases=phases, suggests=suggests)
    content = None
    # The name "local" does not identify the devices of this machine, so its reports are not read back.
    if not fresh and name and compiled_step is None:
        content = cache.load(path)
    if content is not None:
        report = PlanReport.from_json(content)
    else:
        report = compile_report(
            spec,
            config,
            target,
            limit,
            phases=phases,
            suggests=suggests,
            compiled_step=compiled_step,
            on_verdict=show_named,
        )
        content = report.to_json()
        # The settings of a command line are not cached: other command lines may lead to the same config.
        del content["settings"]
        cache.store(path, content)
    return replace(report, target=name or report.target)


def estimate_report(
    name: str,
    config: Config,
    target: Target,
    limit: int | None,
    *,
    suggests: bool = True,
    on_verdict: Callable[[PlanReport], object] = lambda report: None,
) -> PlanReport:
    """Return a report based only on the analytical estimate: it needs no compiler and no devices.

    Args:
        name: name of the config.
        config: config resolved for the target.
        target: the machine to plan for.
        limit: device memory in bytes; None means unknown.
        suggests: look for settings that fit if the config does not, which takes a second or two.
        on_verdict: called with the report before that search.
    """
    experiment: Experiment = config.instantiate()
    traces = TraceCache()
    need = estimate_for_target(experiment, target, traces)
    state = state_bytes(need)
    peak = need.peak_bytes
    arguments = state + need.breakdown["batch"]
    fits = limit is None or peak <= limit
    report = replace(
        _describe(name, experiment, target, limit, need.flops),
        estimated=True,
        compilable=not is_approximate(config),
        fits=fits,
        device_peak_bytes=peak,
        device_allocated_bytes=peak,
        device_argument_bytes=arguments,
        # The results of a step are the new state, which overwrites the old one.
        device_output_bytes=state,
        device_alias_bytes=state,
        device_temp_bytes=peak - arguments,
        breakdown=need.breakdown,
        host_breakdown=need.host_breakdown,
        estimate=EstimateReport(peak, need.breakdown, error=None),
        time=report_time(estimate_step_time(experiment, need, target), experiment, target),
    )
    report.notes.extend(describe_approximation(config))
    report.notes.extend(note_ragged_products(experiment.model, target.platform))
    report.notes.extend(note_key_exchange(experiment, need, target))
    report = _add_offloaded(report, need.host_bytes, 0, target)
    host = build_host_model(experiment, need.layout, target)
    report = _add_host(report, host, {"train": PhaseReport(peak, need.host_bytes)})
    if suggests and not fits:
        on_verdict(report)
        search = SettingsSearch(config, target, limit or 0, peak, present=need, traces=traces)
        report = _add_suggestions(report, search, seconds=0.0)
    return report


def _add_suggestions(report: PlanReport, search: SettingsSearch, seconds: float = 300.0) -> PlanReport:
    """Return a report with settings that fit, or else with a smaller batch that fits.

    Args:
        report: report of a config that does not fit.
        search: search for settings of this config.
        seconds: time limit for compiling candidates.
    """
    with phase("looking for settings that fit", patience=SHORT):
        fitting = search.find_settings(seconds)
        smaller_batch = None if fitting else search.find_batch()
    return replace(report, suggestions=fitting, smaller_batch=smaller_batch)


def compile_report(
    name: str,
    config: Config,
    target: Target,
    limit: int | None,
    *,
    phases: bool = True,
    suggests: bool = True,
    compiled_step: CompiledTrainStep | None = None,
    on_verdict: Callable[[PlanReport], object] = lambda report: None,
) -> PlanReport:
    """Return a report based on the compiled programs.

    Args:
        name: name of the config.
        config: config resolved for the target.
        target: the machine to compile for.
        limit: device memory in bytes; None means unknown.
        phases: compile initialization and evaluation too, not only the training step.
        suggests: look for settings that fit if the config does not, which may take minutes.
        compiled_step: the compiled step of the config, if there is one already.
        on_verdict: called with the report before the search for settings that fit.

    Raises:
        ValueError: the config is not valid for the target, or the target's compiler is not installed.
    """
    program = compiled_step.program if compiled_step else Program(config.instantiate(), target.devices())
    layout = program.layout
    state_bytes_on_device = layout.bytes_per_device(memory_kind="device")
    state_bytes_on_host = layout.bytes_per_device(memory_kind="pinned_host")
    with phase("tracing the training step"):
        zero_gradients = list_zero_gradients(program)
    step = compiled_step.step if compiled_step else compile_step(program, target, limit)
    transform = dry_run_batch_transform(program, target)
    with phase("analyzing the compiled program", patience=SHORT):
        flops = sum_flops(program.backend.step_jaxprs(step.tracker))
        report = replace(_describe(name, program.experiment, target, limit, flops), zero_gradients=zero_gradients)
        report.notes.extend(target.compiler_notes)
        report.notes.extend(target.note_recomputation(step.temp, step.argument + step.output - step.alias, limit))
        report = _add_step(report, program, step)
        report = _add_offloaded(report, state_bytes_on_host, step.host_temp, target)
        report = _add_batch_transform(report, transform, target)
        need = estimate_for_target(program.experiment, target)
        report.notes.extend(note_key_exchange(program.experiment, need, target))
        error = None if step.message else need.peak_bytes / step.peak - 1.0
        time = report_time(_step_time(program, need, target, step, transform), program.experiment, target)
        report = replace(report, estimate=EstimateReport(need.peak_bytes, need.breakdown, error), time=time)

    # The phases are listed in the order of a run. An auxiliary model's phases come before the training step that they
    # prepare.
    host = build_host_model(program.experiment, layout, target)
    checkpoint_peaks = host.checkpoint_peaks()
    compile_seconds = report.compile_seconds
    message = report.message
    peaks = {}
    evaluation_peak = {}
    if phases:
        init = compile_programs(target, None, program.backend.dry_run_init, "the initialization")
        evaluation = compile_programs(target, None, program.backend.dry_run_evaluation, "the evaluation")
        # Evaluation does not take the rest of the state as arguments, but it stays on the device too.
        groups = ("parameter", "frozen", "buffer")
        argument_bytes = sum(layout.bytes_per_device(group, "device") for group in groups)
        evaluation_bytes = evaluation.allocated - argument_bytes + state_bytes_on_device
        peaks["init"] = PhaseReport(init.allocated, state_bytes_on_host)
        evaluation_peak["evaluation"] = PhaseReport(evaluation_bytes, state_bytes_on_host)
        compile_seconds = round(compile_seconds + init.seconds + evaluation.seconds, 1)
        message = message or init.message or evaluation.message
    peaks["restore"] = checkpoint_peaks["restore"]
    peaks |= _batch_transform_peaks(transform, state_bytes_on_host)
    peaks["train"] = PhaseReport(step.allocated, report.host_peak_bytes)
    peaks |= evaluation_peak
    peaks["save"] = checkpoint_peaks["save"]
    most = max(peak.device_peak_bytes for peak in peaks.values())
    fits = not step.message and (limit is None or most <= limit)
    report = replace(report, phases=peaks, compile_seconds=compile_seconds, message=message, fits=fits)
    report = _add_host(report, host, peaks)
    if suggests and not fits:
        on_verdict(report)
        report = _add_suggestions(report, SettingsSearch(config, target, limit or 0, most, present=need))
    return report


def estimate_step_time(experiment: Experiment, need: Estimate, target: Target) -> StepTime | None:
    """Return the analytical estimate of a step's time, including the auxiliary model's passes before it.

    The result is None if the rates of the target are not known.

    Args:
        experiment: the experiment to train.
        need: its analytical estimate for the target.
        target: the machine to plan for.
    """
    dtype = str(experiment.model.compute_dtype)
    step = estimate_time(need.work, target.spec, target.num_devices, dtype)
    completion = estimate_time(need.completion, target.spec, target.num_devices, dtype)
    return None if step is None or completion is None else step.after(completion)


def list_zero_gradients(program: Program) -> list[ZeroGradient]:
    """Return the parameters whose gradient is always zero, which follows from the traced loss."""
    layout = program.checkpoint_layout
    model = program.experiment.model
    # Remat does not change which gradients are zero.
    remat = "none"

    def loss(params: Nested, state: TrainState, batch: Nested) -> jax.Array:
        ctx = training_context(batch, state.counter, model, layout, remat)
        fetched = layout.fetch("parameter", params)
        frozen = layout.fetch("frozen", state.frozen)
        split_params = model.unstack_layers(fetched, remat)
        split_frozen = model.unstack_layers(frozen, remat)
        return model.loss(merge(split_params, split_frozen), ctx, state.buffer)[0]

    state = layout.abstract()
    batch = layout.abstract(program.batch_specs)
    leaves = [leaf for leaf in layout if leaf.group == "parameter"]
    are_zero = find_zero_gradients(loss, state.parameter, state, batch)
    zero_gradients = []
    for leaf, is_zero in zip(leaves, are_zero, strict=True):
        if is_zero:
            zero_gradients.append(ZeroGradient(leaf.path.removeprefix("parameter/"), leaf.bytes_per_device))
    return zero_gradients


def list_largest(named_buffers: list[NamedBuffer]) -> list[LargestBuffer]:
    """Return the largest buffers; buffers with the same name, group and shape are merged into one row."""
    sizes_by_buffer: dict[tuple[str, str, str], list[int]] = {}
    for buffer in named_buffers:
        identity = (buffer.name, buffer.group, buffer.shape)
        sizes_by_buffer.setdefault(identity, []).append(buffer.bytes)
    largest_first = sorted(sizes_by_buffer.items(), key=lambda item: -sum(item[1]))
    return [
        LargestBuffer(name, group, shape, len(sizes), sum(sizes))
        for (name, group, shape), sizes in largest_first[:_LARGEST]
    ]


# --- the parts of a report -------------------------------------------------------------------------------------------


def _describe(name: str, experiment: Experiment, target: Target, limit: int | None, flops: FlopCount) -> PlanReport:
    """Return a report with only the values that follow from the config, the target and the FLOPs of the step."""
    data = experiment.data
    memory = experiment.memory
    tokens = data.global_batch_size * data.seq_len
    sizes = experiment.mesh.resolve(target.num_devices)
    in_effect: dict[str, Any] = {"memory.update": memory.update, "memory.remat": memory.remat}
    for placed_field in PLACED_FIELDS:
        in_effect[f"memory.{placed_field}"] = getattr(memory, placed_field).text
    in_effect["learner.accumulate"] = experiment.learner.accumulate
    in_effect["data.global_batch_size"] = data.global_batch_size
    # Only token sequences have a length that can be set; images do not.
    if data.item == "token":
        in_effect["data.seq_len"] = data.seq_len
    loops = f"{flops.uncounted_loops} loops have a data-dependent trip count; their FLOPs count as one iteration"
    tokens_per_device = tokens // (experiment.learner.accumulate * batch_shards(sizes) * sizes["seq"])
    batch = BatchReport.make(
        data.global_batch_size,
        data.seq_len,
        experiment.learner.accumulate,
        row_shards=batch_shards(sizes),
        token_shards=sizes["seq"],
    )
    notes = note_exchange(experiment.model, sizes, tokens_per_device)
    if flops.uncounted_loops:
        notes.append(loops)
    return PlanReport(
        config=name,
        target=target.name,
        accelerator=target.spec.name,
        platform=target.platform,
        devices=target.num_devices,
        processes=target.num_processes,
        mesh=sizes,
        mesh_across=experiment.mesh.split(sizes, target.num_slices),
        device_limit_bytes=limit,
        device_reserved=target.list_reserved_bytes(sizes),
        device_memory_fraction=target.get_memory_fraction(limit),
        host_limit_bytes=target.host_limit_bytes,
        versions=cache.versions("jax", "jaxlib", *COMPILERS[target.platform]),
        item=data.item,
        tokens_per_step=tokens,
        batch=batch,
        in_effect=in_effect,
        flops_per_step=flops.flops,
        flops_per_token=flops.flops / tokens,
        model_flops_per_token=experiment.model.flops_per_token(data.seq_len),
        notes=notes,
    )


def _add_step(report: PlanReport, program: Program, step: CompiledProgram) -> PlanReport:
    """Add the values that come from the training step's buffers."""
    layout = program.layout
    breakdown = dict.fromkeys(BREAKDOWN_KEYS, 0)
    host_breakdown = dict.fromkeys(BREAKDOWN_KEYS, 0)
    for leaf in layout:
        if leaf.spec.is_offloaded:
            host_breakdown[REPORT_GROUPS[leaf.group]] += leaf.bytes_per_device
    host_breakdown["activations"] += step.host_temp
    named_buffers: list[NamedBuffer] = []
    if step.tracker is not None:
        named_buffers = dry_run.name_peak_buffers(program, step.tracker)
    unnamed_group = "other"
    if not named_buffers:
        # The compiler refused the program, or it came from a cache without its buffers. Then only the state and the
        # total are known.
        unnamed_group = "activations"
        for leaf in layout:
            if not leaf.spec.is_offloaded:
                shape = f"{Array(str(leaf.spec.dtype), leaf.spec.shape)}, all shards"
                buffer = NamedBuffer(leaf.path, REPORT_GROUPS[leaf.group], leaf.bytes_per_device, shape)
                named_buffers.append(buffer)
    for buffer in named_buffers:
        breakdown[buffer.group] += buffer.bytes
    breakdown[unnamed_group] += step.peak - sum(breakdown.values())
    collective_bytes: Counter[str] = Counter()
    # A program that is called several times counts each time.
    for call in step.tracker.calls if step.tracker is not None else ():
        if call.about.buffers is not None:
            module = call.about.buffers.module
            collective_bytes.update(module.collective_bytes())
            for transfer in slice_transfers(module):
                collective_bytes["from other slices"] += transfer.runs * transfer.num_bytes
    return replace(
        report,
        device_peak_bytes=step.peak,
        device_allocated_bytes=step.allocated,
        device_argument_bytes=layout.bytes_per_device(memory_kind="device") if step.message else step.argument,
        device_output_bytes=step.output,
        device_alias_bytes=step.alias,
        device_temp_bytes=step.temp,
        breakdown=breakdown,
        host_breakdown=host_breakdown,
        largest=list_largest(named_buffers),
        collective_bytes=dict(collective_bytes),
        host_transfer_bytes=0 if step.tracker is None else step.tracker.moved,
        compile_seconds=round(step.seconds, 1),
        message=step.message,
    )


def _add_offloaded(report: PlanReport, state: int, temporary: int, target: Target) -> PlanReport:
    """Add the bytes of arrays in host memory, per device and per process."""
    peak = state + temporary
    # A process holds the shards of all of its devices.
    process_bytes = peak * target.num_devices // target.num_processes
    return replace(report, host_argument_bytes=state, host_peak_bytes=peak, host_process_bytes=process_bytes)


def _add_host(report: PlanReport, host: HostMemoryModel, peaks: dict[str, PhaseReport]) -> PlanReport:
    """Add what the machine's memory has to hold, by phase, and let it take part in the verdict."""
    need = host.report(host.checkpoint_peaks() | peaks)
    notes = list(report.notes)
    if host.window_bytes is not None:
        seconds = human_duration(host.written_bytes / _DISK_RATE)
        notes.append(
            f"saves go through a window of {human_bytes(host.window_bytes)} of host memory, and training waits for "
            f"each: {seconds} for {human_bytes(host.written_bytes)}, if each process writes 1 GB/s"
        )
    return replace(report, host=need, notes=notes, fits=report.fits and need.fits)


def _add_batch_transform(report: PlanReport, transform: dict[str, CompiledProgram], target: Target) -> PlanReport:
    """Add the arrays that a batch transform keeps in host memory between steps, such as a reference model's weights."""
    persistent = 0
    compile_seconds = report.compile_seconds
    message = report.message
    moved = report.host_transfer_bytes
    for compiled in transform.values():
        compile_seconds = round(compile_seconds + compiled.seconds, 1)
        message = message or compiled.message
        if compiled.tracker is not None and not compiled.tracker.once:
            persistent += compiled.tracker.host_peak
            moved += compiled.tracker.moved
    report = replace(report, compile_seconds=compile_seconds, message=message, host_transfer_bytes=moved)
    if persistent:
        report.host_breakdown["other"] += persistent
        assert report.host_argument_bytes is not None
        temporary = report.host_peak_bytes - report.host_argument_bytes
        report = _add_offloaded(report, report.host_argument_bytes + persistent, temporary, target)
    return report


def _step_time(
    program: Program, need: Estimate, target: Target, step: CompiledProgram, transform: dict[str, CompiledProgram]
) -> StepTime | None:
    """Return the time of the compiled step, including the auxiliary model's programs that run before it.

    If the compiler refused the step, the time is the analytical estimate.
    """
    if step.tracker is None:
        return estimate_step_time(program.experiment, need, target)
    calls = [call.about for call in step.tracker.calls]
    for compiled in transform.values():
        if compiled.tracker is not None and not compiled.tracker.once:
            calls += [call.about for call in compiled.tracker.calls]
    return estimate_compiled_time(calls, target, step.peak)


def report_time(time: StepTime | None, experiment: Experiment, target: Target) -> TimeReport | None:
    """Return the report's value for the time of a step; None if the time is not known."""
    if time is None:
        return None
    tokens = experiment.data.global_batch_size * experiment.data.seq_len
    model_flops = experiment.model.flops_per_token(experiment.data.seq_len) * tokens
    peak = target.spec.peak_flops(str(experiment.model.compute_dtype))
    peak_of_all = None if peak is None else peak * target.num_devices
    return time.report(tokens=tokens, model_flops=model_flops, peak_flops=peak_of_all)


def _batch_transform_peaks(transform: dict[str, CompiledProgram], state_host: int) -> dict[str, PhaseReport]:
    """Return the peaks of the auxiliary model's programs.

    Args:
        transform: compiled programs of the batch transform's auxiliary model, by name.
        state_host: bytes of the training state in host memory.
    """
    peaks = {}
    for name, compiled in transform.items():
        tracker = compiled.tracker
        host = 0 if tracker is None else tracker.host_peak
        # Programs that run only once run before the state exists.
        resident = 0 if tracker is not None and tracker.once else state_host
        peaks[name] = PhaseReport(compiled.allocated, resident + host)
    return peaks
