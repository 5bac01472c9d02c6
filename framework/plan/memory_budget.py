"""Checks that a run fits on this machine: its compiled step on the devices, and all of its phases in host memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from plimsoll.framework.config import Config
from plimsoll.framework.devices.accelerators import GIB, HOST_LIMIT, Device, accelerator_name
from plimsoll.framework.devices.host import get_free_memory_bytes, rss_bytes
from plimsoll.framework.layers.base import batch_specs
from plimsoll.framework.layout import GROUPS
from plimsoll.framework.metrics.memory import MemoryInUse
from plimsoll.framework.plan import cache
from plimsoll.framework.plan.compilation import parse_refusal
from plimsoll.framework.plan.host_memory import Host, HostMemoryModel
from plimsoll.framework.plan.plan_report import HostReport, PhaseReport
from plimsoll.framework.plan.report_tables import needs_text
from plimsoll.framework.plan.suggest import estimate_for_target, suggestions
from plimsoll.framework.plan.targets import Target, resolve
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.program import Program
from plimsoll.framework.program.stages import StageProgram
from plimsoll.framework.terminal.tables import TableSection, human_bytes


def check_pinned_memory(program: Program, platform: str | None = None) -> None:
    """Check that the offloaded arrays are within the limit on the host memory that XLA pins, on a GPU.

    Args:
        program: the program, resolved for its devices.
        platform: platform to check for; None means the platform of the mesh.

    Raises:
        ValueError: they need more.
    """
    platform = platform or program.mesh.devices.flat[0].platform
    if platform != "gpu":
        return
    offloaded_bytes = count_offloaded_bytes(program)
    count = len(program.mesh.local_devices)
    need = count * sum(offloaded_bytes.values())
    # XLA pins at most 64 GiB unless the environment variable raises the limit.
    pinned = int(os.environ.get(HOST_LIMIT, 64)) * GIB
    if need > pinned:
        parts = ", ".join(f"{name} {human_bytes(count * size)}" for name, size in offloaded_bytes.items() if size)
        raise ValueError(
            f"config.memory offloads {human_bytes(need)} to host memory ({parts}), but {HOST_LIMIT}={pinned // GIB} "
            f"lets XLA pin {human_bytes(pinned)}; set it to {-(-need // GIB)} or unset it"
        )


def predict_host_memory(program: Program, process_bytes: int, limit: int | None, step_peak: int | None) -> HostReport:
    """Predict the host memory of a run on this machine, by phase. Collective.

    Args:
        program: the program, on the devices of this machine.
        process_bytes: resident memory of this process before it compiled anything.
        limit: bytes of host memory that the run may use; None for what is free, without the run itself.
        step_peak: peak of device memory in a step, in bytes per device; None if unknown, which counts the state only.
    """
    num_here = distributed.count_processes_here()
    layout = program.layout
    platform = program.backend.platform
    if limit is None:
        # The run's other processes on this machine are about as large as this one.
        limit = get_free_memory_bytes() + num_here * rss_bytes()
    host = Host(limit, num_here, process_bytes)
    num_local_devices = len(program.mesh.local_devices)
    model = HostMemoryModel(program.experiment, layout, platform, num_local_devices, jax.process_count(), host)
    device_bytes = layout.bytes_per_device(memory_kind="device") if step_peak is None else step_peak
    peaks = model.checkpoint_peaks()
    offloaded_bytes = sum(count_offloaded_bytes(program).values())
    # The programs of initialization and evaluation are not compiled yet. The first needs less than the step. The second
    # has no gradients, but XLA for CPU copies the layers' weights out of their stacks. Where each layer has its own
    # arrays, there are copies of two layers or tables at a time.
    state = PhaseReport(
        layout.bytes_per_device(memory_kind="device"), layout.bytes_per_device(memory_kind="pinned_host")
    )
    unit_bytes: Counter[str] = Counter()
    for leaf in layout:
        if leaf.group in ("parameter", "frozen"):
            # Stage, and index of the layer or name of the table.
            unit = "/".join(leaf.path.split("/")[1:3])
            unit_bytes[unit] += leaf.bytes_per_device
    is_many_programs = program.experiment.memory.traits.is_many_programs
    copied_bytes = 2 * max(unit_bytes.values()) if is_many_programs else unit_bytes.total()
    evaluation = PhaseReport(state.device_peak_bytes + copied_bytes, offloaded_bytes)
    peaks |= {"init": state, "train": PhaseReport(device_bytes, offloaded_bytes), "evaluation": evaluation}
    return model.report(peaks)


def count_offloaded_bytes(program: Program, target: Target | None = None) -> dict[str, int]:
    """Return the bytes per device that a run keeps in host memory, by group of the state and by other purpose.

    Args:
        program: the program to train with.
        target: machine that the program was built for; None means the devices of this machine.
    """
    memory = program.experiment.memory
    offloaded_bytes: dict[str, int] = {}
    for group in GROUPS:
        offloaded_bytes[group] = program.layout.bytes_per_device(group, "pinned_host")
    if memory.activations.uses_host or "offload" in memory.remat:
        # Activations are not part of the layout.
        estimate = estimate_for_target(program.experiment, target or resolve("local"))
        offloaded_bytes["activations"] = estimate.host_breakdown["activations"]
    batch_transform = program.experiment.batch_transform
    if batch_transform is not None:
        offloaded_bytes["batch transform"] = batch_transform.host_bytes(program)
    return offloaded_bytes


def recall_step_peak(config: Config, devices: Sequence[Device]) -> int | None:
    """Return the peak of the config's compiled step, if this machine has compiled it before; see `record_step_peak`."""
    content = cache.load(_step_peak_path(config, devices))
    return None if content is None else content["peak"]


def record_step_peak(config: Config, devices: Sequence[Device], peak: int) -> None:
    """Store the peak of the config's compiled step, in bytes per device.

    The next start on the same kind of devices can then be refused before it compiles.
    """
    cache.store(_step_peak_path(config, devices), {"peak": peak})


def _step_peak_path(config: Config, devices: Sequence[Device]) -> Path:
    return cache.cache_path(config, step_peak=accelerator_name(devices))


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of device memory, per device, that a step needs at its peak and between steps.

    Attributes:
        peak: bytes at the memory peak.
        resident: bytes of state and batch, which stay in memory between steps.
        groups: bytes of the state by group, and "activations and temporaries".
        message: the compiler's error message, if it refused the program.
        host: host memory of the run, by phase; None if it was not predicted.
    """

    peak: int
    resident: int
    groups: dict[str, int]
    message: str = ""
    host: HostReport | None = None


def measure_need(program: Program) -> MemoryNeed:
    """Compile the step, or take it from the compilation cache, and return the memory it needs."""
    layout = program.layout
    message = ""
    state = layout.bytes_per_device(memory_kind="device")
    # Only the arrays from the data pipeline: those that an auxiliary model adds are freed after their step.
    delivered = batch_specs(program.experiment.data.arrays())
    batch = sum(spec.num_bytes for spec in delivered.values()) // program.mesh.size
    try:
        peak = program.backend.peak_bytes()
        batch_transform = program.experiment.batch_transform
        if batch_transform is not None:
            # An auxiliary model completes the batch before the step.
            trackers = batch_transform.dry_run(program, program.backend.compile_here)
            peak = max([peak, *(tracker.peak for tracker in trackers.values())])
    except jax.errors.JaxRuntimeError as error:
        peak, message = parse_refusal(error)
    groups = {group: layout.bytes_per_device(group, "device") for group in ("parameter", "frozen", "optimizer", "ema")}
    groups["activations and temporaries"] = max(0, peak - state - batch)
    return MemoryNeed(peak, state + batch, groups, message)


def measure_largest_need(programs: Sequence[StageProgram]) -> tuple[MemoryNeed, StageProgram]:
    """Compile the steps of all stages; return the need of the largest one, and its program."""
    needs = {}
    for one in programs:
        if id(one.program) not in needs:
            needs[id(one.program)] = (measure_need(one.program), one)
    # A program that the compiler refuses needs more than any other.
    return max(needs.values(), key=lambda pair: (bool(pair[0].message), pair[0].peak))


def explain_refusal(
    config: Config, program: Program, found: MemoryNeed, limit: int | None, target: Target | None = None
) -> str | None:
    """Return the reason why the run should not start; None if it fits, or if the device's memory is not known.

    Args:
        config: config resolved for these devices.
        program: the program of that config.
        found: memory that the step needs.
        limit: device memory in bytes; None uses what the devices report.
        target: machine that the program was built for; None means the devices of this machine.
    """
    target = target or resolve("local")
    limit = target.limit_bytes if limit is None else limit
    if not found.message and (limit is None or found.peak <= limit):
        return None
    largest = sorted(found.groups.items(), key=lambda item: -item[1])[:3]
    lines = [f"the training step needs {human_bytes(found.peak)} per device, but {human_bytes(limit)} are available"]
    if found.message:
        lines.append(f"compiler error: {found.message}")
    parts = [f"{name} {human_bytes(size)}" for name, size in largest if size]
    lines.append(f"largest groups: {', '.join(parts)}")
    fitting = suggestions(config, target, limit or 0, found.peak)
    for suggestion in fitting:
        lines.append(f"would fit: {suggestion.setting} ({needs_text(suggestion)})")
    if not fitting:
        lines.append("no setting of remat, accumulation, offloading and sharding fits: use more devices")
    # If the compiler refused the program, --force has nothing to run.
    force = "" if found.message else "--force starts the run anyway, and "
    lines.append(f"nothing was started; {force}`plimsoll plan` shows every buffer")
    return "\n".join(lines)


def compare_with_measured(found: MemoryNeed, measured: MemoryInUse) -> str:
    """Return a log line that compares predicted with measured memory after the first steps.

    Args:
        found: predicted memory of the step.
        measured: memory in use after the first steps.
    """
    text = ""
    predicted = found.peak
    measured_bytes = measured.device_peak_bytes
    if measured_bytes is None:
        # CPUs do not report peak memory, so only the memory between steps can be compared.
        predicted = found.resident
        measured_bytes = measured.device_bytes
        text = f"; between steps, predicted {human_bytes(predicted)}"
    error = f"({100 * (measured_bytes / predicted - 1):+.1f}%)"
    peak = human_bytes(found.peak)
    return f"memory per device: predicted peak {peak}{text}, measured {human_bytes(measured_bytes)} {error}"


# The phases of a plan in which a run spends the time of a phase of `Goodput`.
_PLANNED_PHASES = {
    "start": ("start",),
    "data": ("start",),
    "compile": ("compile",),
    "restore": ("init", "restore"),
    "input": ("train",),
    "step": ("train",),
    "evaluate": ("evaluation",),
    "save": ("save",),
    "end": ("end",),
}


def compare_phases(need: MemoryNeed, resident: Mapping[str, int], device_peak: int | None) -> TableSection:
    """Return a table of predicted and measured memory, by phase, for the end of a run.

    Args:
        need: predicted memory of the run.
        resident: highest resident memory of this process, in bytes by phase of `Goodput` and "end".
        device_peak: highest memory in use on a device, in bytes; None if the platform does not report it.
    """
    rows = [["", "predicted", "measured"]]
    host = need.host
    if host is not None:
        measured: dict[str, int] = {}
        for phase, size in resident.items():
            names = [name for name in _PLANNED_PHASES.get(phase, ()) if name in host.phases]
            if names:
                # Of initializing and restoring, a run does the one that it needs; the larger one bounds both.
                name = max(names, key=lambda name: sum(host.phases[name].values()))
                measured[name] = max(size, measured.get(name, 0))
        for name, parts in host.phases.items():
            if name in measured:
                rows.append([f"host, {name}", human_bytes(sum(parts.values())), human_bytes(measured[name])])
        rows.append(["host, highest", human_bytes(host.process_peak_bytes), human_bytes(max(resident.values()))])
    if device_peak is not None:
        rows.append(["device, highest", human_bytes(need.peak), human_bytes(device_peak)])
    return TableSection("memory, per process and per device", rows, True)
