"""Checks that a run fits: its offloaded arrays in host memory, and its compiled step on the devices."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax

from plimsoll.framework.config import Config
from plimsoll.framework.devices.accelerators import GIB, HOST_LIMIT, get_machine_memory_bytes
from plimsoll.framework.layers.base import batch_specs
from plimsoll.framework.layout import GROUPS
from plimsoll.framework.metrics.memory import MemoryInUse
from plimsoll.framework.plan.compilation import parse_refusal
from plimsoll.framework.plan.report_tables import needs_text
from plimsoll.framework.plan.suggest import estimate_for_target, suggestions
from plimsoll.framework.plan.targets import Target, resolve
from plimsoll.framework.program.program import Program
from plimsoll.framework.terminal.exit_codes import DoesNotFitError
from plimsoll.framework.terminal.tables import human_bytes


def check_host(program: Program, platform: str | None = None) -> None:
    """Check that the offloaded arrays fit in host memory, before anything is compiled.

    Args:
        program: the program, resolved for its devices.
        platform: platform to check for; None means the platform of the mesh.

    Raises:
        DoesNotFitError: this process's devices need more host memory than the machine has. Other processes on the
            machine are not counted.
        ValueError: they need more host memory than XLA may pin (GPU).
    """
    platform = platform or program.mesh.devices.flat[0].platform
    # On CPU, host memory is device memory, which `explain_refusal` checks.
    if platform == "cpu":
        return
    memory = program.experiment.memory
    layout = program.layout
    offloaded_bytes = {group: layout.bytes_per_device(group, "pinned_host") for group in GROUPS}
    if memory.activations.uses_host or "offload" in memory.remat:
        # Activations are not part of the layout.
        estimate = estimate_for_target(program.experiment, resolve("local"))
        offloaded_bytes["activations"] = estimate.host_breakdown["activations"]
    batch_transform = program.experiment.batch_transform
    if batch_transform is not None:
        offloaded_bytes["batch transform"] = batch_transform.host_bytes(program)
    count = len(program.mesh.local_devices)
    need = count * sum(offloaded_bytes.values())
    machine = get_machine_memory_bytes()
    # On GPU, XLA pins at most 64 GiB unless the environment variable raises the limit.
    pinned = int(os.environ.get(HOST_LIMIT, 64)) * GIB if platform == "gpu" else machine
    error: type[ValueError] = ValueError
    if need > machine:
        error = DoesNotFitError
        why = (
            f"this machine has {human_bytes(machine)}; increase mesh.fsdp, set learner.moment_dtype=bfloat16, or "
            "offload fewer layers (memory.FIELD=pinned_host:8) or none (memory.FIELD=device)"
        )
    elif need > pinned:
        why = (
            f"{HOST_LIMIT}={pinned // GIB} lets XLA pin {human_bytes(pinned)}; set it to {-(-need // GIB)} or unset it"
        )
    else:
        return
    parts = ", ".join(f"{name} {human_bytes(count * size)}" for name, size in offloaded_bytes.items() if size)
    raise error(f"config.memory offloads {human_bytes(need)} to host memory ({parts}), but {why}")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of device memory, per device, that a step needs at its peak and between steps.

    Attributes:
        peak: bytes at the memory peak.
        resident: bytes of state and batch, which stay in memory between steps.
        groups: bytes of the state by group, and "activations and temporaries".
        message: the compiler's error message, if it refused the program.
    """

    peak: int
    resident: int
    groups: dict[str, int]
    message: str = ""


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
