"""Plans a run: compiles every phase for a target and puts the results into one report.

A report is a JSON-serializable dict; docs/plan.md explains its keys. Bytes are per device unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax

from plimsoll.framework.checkpoint.storage import read_bytes
from plimsoll.framework.config import Config
from plimsoll.framework.layout import StateLayout, TrainState, merge
from plimsoll.framework.plan import dry_run
from plimsoll.framework.plan.buffer_names import REPORT_GROUPS, NamedBuffer
from plimsoll.framework.plan.cache import versions
from plimsoll.framework.plan.compilation import CompiledProgram
from plimsoll.framework.plan.dry_run import compile_programs, compile_step, dry_run_batch_transform
from plimsoll.framework.plan.estimate import Estimate
from plimsoll.framework.plan.grouped_products import note_ragged_products
from plimsoll.framework.plan.hlo import Array
from plimsoll.framework.plan.jaxpr_analysis import FlopCount, find_zero_gradients, sum_flops
from plimsoll.framework.plan.report_tables import BREAKDOWN_KEYS
from plimsoll.framework.plan.step_time.compiled_time import estimate_compiled_time
from plimsoll.framework.plan.step_time.estimated_time import estimate_time
from plimsoll.framework.plan.step_time.time_breakdown import StepTime
from plimsoll.framework.plan.suggest import estimate_for_target, state_bytes, suggestions
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.layer_ranges import PLACED_FIELDS
from plimsoll.framework.schedules.step import training_context
from plimsoll.framework.terminal.phases import SHORT, phase
from plimsoll.framework.terminal.tables import human_bytes

Report = dict[str, Any]
# Packages of the compilers, by platform; jaxlib itself has the CPU compiler.
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt"), "cpu": ()}
# Number of largest buffers in a report.
_LARGEST = 30


def estimate_report(name: str, config: Config, target: Target, limit: int | None, *, suggests: bool = True) -> Report:
    """Return a report based only on the analytical estimate: it needs no compiler and no devices.

    Args:
        name: name of the config.
        config: config resolved for the target.
        target: the machine to plan for.
        limit: device memory in bytes; None means unknown.
        suggests: look for settings that fit if the config does not, which takes a second or two.
    """
    experiment: Experiment = config.instantiate()
    need = estimate_for_target(experiment, target)
    state = state_bytes(need)
    peak = need.peak_bytes
    arguments = state + need.breakdown["batch"]
    # The results of a step are the new state, which overwrites the old one.
    step = CompiledProgram(0.0, peak, peak, argument=arguments, output=state, alias=state, temp=peak - arguments)
    report = _report_header(name, experiment, target, limit)
    report |= device_bytes(step)
    report |= {
        "estimated": True,
        "fits": limit is None or peak <= limit,
        "breakdown": need.breakdown,
        "host_breakdown": need.host_breakdown,
        "estimate": {"device_peak_bytes": peak, "breakdown": need.breakdown, "error": None},
        **_report_flops(need.flops, report["tokens_per_step"]),
    }
    report["notes"] += note_ragged_products(experiment.model, target.platform)
    report["time"] = _time_report(estimate_step_time(experiment, need, target), experiment, target)
    _add_host(report, need.host_bytes, 0, target)
    if suggests and not report["fits"]:
        with phase("looking for settings that fit", patience=SHORT):
            report["suggestions"] = suggestions(config, target, limit or 0, peak, present=need, seconds=0.0)
    return report


def compile_report(
    name: str,
    config: Config,
    target: Target,
    limit: int | None,
    *,
    phases: bool = True,
    suggests: bool = True,
    compiled_step: CompiledTrainStep | None = None,
) -> Report:
    """Return a report based on the compiled programs.

    Args:
        name: name of the config.
        config: config resolved for the target.
        target: the machine to compile for.
        limit: device memory in bytes; None means unknown.
        phases: compile initialization and evaluation too, not only the training step.
        suggests: look for settings that fit if the config does not, which may take minutes.
        compiled_step: the compiled step of the config, if there is one already.

    Raises:
        ValueError: the config is not valid for the target, or the target's compiler is not installed.
    """
    program = compiled_step.program if compiled_step else Program(config.instantiate(), target.devices())
    report: Report = _report_header(name, program.experiment, target, limit) | {"estimated": False}
    with phase("tracing the training step"):
        report |= report_zero_gradients(program)
    step = compiled_step.step if compiled_step else compile_step(program, target, limit)
    transform = dry_run_batch_transform(program, target)
    with phase("analyzing the compiled program", patience=SHORT):
        report |= _report_flops(sum_flops(program.backend.step_jaxprs(step.tracker)), report["tokens_per_step"])
        report["notes"] += target.compiler_notes
        report |= _report_step(program, step)
        _add_host(report, _state_bytes(program).host, step.host_temp, target)
        _add_batch_transform(report, transform, target)
        need = estimate_for_target(program.experiment, target)
        report["estimate"] = _compare_estimate(need, step)
        report["time"] = _time_report(_step_time(program, need, target, step, transform), program.experiment, target)

    peaks = {"train": _Peak(step.allocated, report["host_peak_bytes"])}
    peaks |= _batch_transform_peaks(transform, _state_bytes(program).host)
    peaks |= _save_and_restore(program, target)
    if phases:
        _add_phases(report, peaks, program, target, step)
    report["phases"] = _report_phases(peaks)
    most = max(peak.device for peak in peaks.values())
    report["fits"] = not step.message and (limit is None or most <= limit)
    if suggests and not report["fits"]:
        with phase("looking for settings that fit", patience=SHORT):
            report["suggestions"] = suggestions(config, target, limit or 0, most, present=need)
    return report


class CompiledTrainStep(NamedTuple):
    """A compiled step and its program."""

    program: Program
    step: CompiledProgram


class _Peak(NamedTuple):
    """Peak bytes per device, in device memory and in host memory."""

    device: int
    host: int


def _state_bytes(program: Program) -> _Peak:
    """Return the bytes of the state."""
    device = program.layout.bytes_per_device(memory_kind="device")
    host = program.layout.bytes_per_device(memory_kind="pinned_host")
    return _Peak(device, host)


def _report_phases(peaks: dict[str, _Peak]) -> Report:
    """Return the peaks in a report's format, in the order of a run."""
    phases = {}
    order = ("init", "restore", "train", "evaluation", "save")
    # An auxiliary model's phases come before the training step that they prepare.
    batch_phases = [name for name in peaks if name not in order]
    for name in (*order[:2], *batch_phases, *order[2:]):
        if name in peaks:
            device, host = peaks[name]
            phases[name] = {"device_peak_bytes": device, "host_peak_bytes": host}
    return phases


def _batch_transform_peaks(transform: dict[str, CompiledProgram], state_host: int) -> dict[str, _Peak]:
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
        peaks[name] = _Peak(compiled.allocated, resident + host)
    return peaks


def _add_batch_transform(report: Report, transform: dict[str, CompiledProgram], target: Target) -> None:
    """Add the arrays that a batch transform keeps in host memory between steps, such as a reference model's weights."""
    persistent = 0
    for compiled in transform.values():
        report["compile_seconds"] = round(report["compile_seconds"] + compiled.seconds, 1)
        report["message"] = report["message"] or compiled.message
        if compiled.tracker is not None and not compiled.tracker.once:
            persistent += compiled.tracker.host_peak
            report["host_transfer_bytes"] += compiled.tracker.moved
    if persistent:
        report["host_breakdown"]["other"] += persistent
        temporary = report["host_peak_bytes"] - report["host_argument_bytes"]
        _add_host(report, report["host_argument_bytes"] + persistent, temporary, target)


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


def _time_report(time: StepTime | None, experiment: Experiment, target: Target) -> Report | None:
    """Return the report entry for the time of a step; None if the time is not known."""
    if time is None:
        return None
    tokens = experiment.data.global_batch_size * experiment.data.seq_len
    model_flops = experiment.model.flops_per_token(experiment.data.seq_len) * tokens
    peak = target.spec.peak_flops(str(experiment.model.compute_dtype))
    peak_of_all = None if peak is None else peak * target.num_devices
    return time.report(tokens=tokens, model_flops=model_flops, peak_flops=peak_of_all)


def _compare_estimate(need: Estimate, step: CompiledProgram) -> Report:
    """Return the analytical estimate and its error relative to the compiled step; None if that was refused."""
    error = None if step.message else need.peak_bytes / step.peak - 1.0
    return {"device_peak_bytes": need.peak_bytes, "breakdown": need.breakdown, "error": error}


def _add_phases(
    report: Report, peaks: dict[str, _Peak], program: Program, target: Target, step: CompiledProgram
) -> None:
    """Compile initialization and evaluation, and add their peaks."""
    layout = program.layout
    state = _state_bytes(program)
    init = compile_programs(target, None, program.backend.dry_run_init, "the initialization")
    evaluation = compile_programs(target, None, program.backend.dry_run_evaluation, "the evaluation")
    # Evaluation does not take the rest of the state as arguments, but it stays on the device too.
    argument_bytes = sum(layout.bytes_per_device(group, "device") for group in ("parameter", "frozen", "buffer"))
    peaks["init"] = _Peak(init.allocated, state.host)
    peaks["evaluation"] = _Peak(evaluation.allocated - argument_bytes + state.device, state.host)
    report["compile_seconds"] = round(report["compile_seconds"] + init.seconds + evaluation.seconds, 1)
    report["message"] = report["message"] or init.message or evaluation.message


# --- the parts of a report -------------------------------------------------------------------------------------------


def _report_header(name: str, experiment: Experiment, target: Target, limit: int | None) -> Report:
    """Return the report keys that follow from config and target, and empty defaults for all other keys."""
    tokens = experiment.data.global_batch_size * experiment.data.seq_len
    sizes = experiment.mesh.resolve(target.num_devices)
    flops_per_token = experiment.model.flops_per_token(experiment.data.seq_len)
    empty: Report = {key: [] for key in ("largest", "zero_gradients", "suggestions", "notes")}
    empty |= {"collective_bytes": {}, "phases": {}, "host_transfer_bytes": 0, "compile_seconds": 0.0, "message": ""}
    return empty | {
        "config": name,
        "target": target.name,
        "accelerator": target.spec.name,
        "platform": target.platform,
        "devices": target.num_devices,
        "processes": target.num_processes,
        "mesh": sizes,
        "mesh_across": experiment.mesh.split(sizes, target.num_slices),
        "device_limit_bytes": limit,
        "host_limit_bytes": target.host_limit_bytes,
        "item": experiment.data.item,
        "tokens_per_step": tokens,
        "in_effect": _in_effect(experiment),
        "model_flops_per_token": flops_per_token,
        "versions": versions("jax", "jaxlib", *COMPILERS[target.platform]),
    }


def _in_effect(experiment: Experiment) -> dict[str, Any]:
    """Return {path: value} of the settings that memory depends on most, including those left at their defaults."""
    memory = experiment.memory
    in_effect: dict[str, Any] = {"memory.update": memory.update, "memory.remat": memory.remat}
    for field in PLACED_FIELDS:
        in_effect[f"memory.{field}"] = getattr(memory, field).text
    in_effect["learner.accumulate"] = experiment.learner.accumulate
    in_effect["data.global_batch_size"] = experiment.data.global_batch_size
    # Only token sequences have a length that can be set; images do not.
    if experiment.data.item == "token":
        in_effect["data.seq_len"] = experiment.data.seq_len
    return in_effect


def device_bytes(step: CompiledProgram) -> Report:
    """Return the report keys for the bytes of a program on each device."""
    names = ("peak", "allocated", "argument", "output", "alias", "temp")
    return {f"device_{name}_bytes": getattr(step, name) for name in names}


def _add_host(report: Report, state: int, temporary: int, target: Target) -> None:
    """Add the bytes in host memory, per device and per process.

    They do not affect the verdict, because users choose the machine that holds the devices.
    """
    peak = state + temporary
    # A process holds the shards of all of its devices.
    process_bytes = peak * target.num_devices // target.num_processes
    report |= {"host_argument_bytes": state, "host_peak_bytes": peak, "host_process_bytes": process_bytes}
    limit = target.host_limit_bytes
    if limit is not None and process_bytes > limit:
        report["notes"].append(
            f"a process needs {human_bytes(process_bytes)} of host memory, but a host of this kind has "
            f"{human_bytes(limit)}: offload less, or use a host with more memory"
        )


def report_zero_gradients(program: Program) -> Report:
    """Return the report keys that follow from the traced loss: parameters whose gradient is always zero."""
    layout = program.checkpoint_layout
    model = program.experiment.model
    # Remat does not change which gradients are zero.
    remat = "none"

    def loss(params: Any, state: TrainState, batch: Any) -> jax.Array:
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
            zero_gradients.append({"path": leaf.path.removeprefix("parameter/"), "bytes": leaf.bytes_per_device})
    return {"zero_gradients": zero_gradients}


def _report_flops(count: FlopCount, tokens: int) -> Report:
    """Return the report keys for FLOPs."""
    loops = f"{count.uncounted_loops} loops have a data-dependent trip count; their FLOPs count as one iteration"
    return {
        "flops_per_step": count.flops,
        "flops_per_token": count.flops / tokens,
        "notes": [loops] if count.uncounted_loops else [],
    }


def _report_step(program: Program, step: CompiledProgram) -> Report:
    """Return the report keys that come from the training step's buffers."""
    layout = program.layout
    breakdown = dict.fromkeys(BREAKDOWN_KEYS, 0)
    host_breakdown = dict.fromkeys(BREAKDOWN_KEYS, 0)
    state = _state_bytes(program)
    for leaf in layout:
        if leaf.spec.memory_kind != "device":
            host_breakdown[REPORT_GROUPS[leaf.group]] += leaf.bytes_per_device
    host_breakdown["activations"] += step.host_temp
    transfers: Report = {}
    named_buffers: list[NamedBuffer] = []
    unnamed_group = "other"
    if step.tracker is not None:
        transfers = dry_run.sum_transfers(step.tracker)
        named_buffers = dry_run.name_peak_buffers(program, step.tracker)
    if not named_buffers:
        # The compiler refused the program, or it came from a cache without its buffers. Then only the state and the
        # total are known.
        unnamed_group = "activations"
        named_buffers = _state_buffers(layout)
    for buffer in named_buffers:
        breakdown[buffer.group] += buffer.bytes
    breakdown[unnamed_group] += step.peak - sum(breakdown.values())
    return {
        **transfers,
        **device_bytes(replace(step, argument=state.device) if step.message else step),
        "breakdown": breakdown,
        "host_breakdown": host_breakdown,
        "largest": largest(named_buffers),
        "compile_seconds": round(step.seconds, 1),
        "message": step.message,
    }


def _state_buffers(layout: StateLayout) -> list[NamedBuffer]:
    """Return the leaves of the layout that are on the device, as named buffers."""
    state_buffers = []
    for leaf in layout:
        if leaf.spec.memory_kind == "device":
            array = Array(str(leaf.spec.dtype), leaf.spec.shape)
            shape = f"{array}, all shards"
            state_buffers.append(NamedBuffer(leaf.path, REPORT_GROUPS[leaf.group], leaf.bytes_per_device, shape))
    return state_buffers


def largest(named_buffers: list[NamedBuffer]) -> list[Report]:
    """Return the largest buffers; buffers with the same name, group and shape are merged into one row."""
    sizes_by_buffer: dict[tuple[str, str, str], list[int]] = {}
    for buffer in named_buffers:
        identity = (buffer.name, buffer.group, buffer.shape)
        sizes_by_buffer.setdefault(identity, []).append(buffer.bytes)
    largest_first = sorted(sizes_by_buffer.items(), key=lambda item: -sum(item[1]))
    rows = []
    for (name, group, shape), sizes in largest_first[:_LARGEST]:
        rows.append({"name": name, "group": group, "shape": shape, "count": len(sizes), "bytes": sum(sizes)})
    return rows


def _save_and_restore(program: Program, target: Target) -> dict[str, _Peak]:
    """Return the peaks of saving and restoring a checkpoint, which follow from the layout.

    Saving copies the arrays that this process writes to host memory, each once. Restoring fills the layout's leaves
    through host memory, with a bounded number of bytes in flight. Stacks that are split into parts are an exception:
    they are read whole into host memory and split one leaf at a time.
    """
    layout = program.layout
    state = _state_bytes(program)
    local_devices = target.num_devices // target.num_processes
    copied = 0
    for leaf in layout:
        # Replicas on the devices of one process are written only once.
        copied += min(leaf.spec.num_bytes, leaf.bytes_per_device * local_devices)
    passing = read_bytes(max(leaf.spec.num_bytes for leaf in layout))
    passing += local_devices * program.backend.bytes_through_host
    # A process reads only the shards of its own devices.
    passing = min(passing, local_devices * (state.device + state.host))
    return {
        "save": _Peak(state.device, state.host + copied // local_devices),
        "restore": _Peak(state.device, state.host + passing // local_devices),
    }
