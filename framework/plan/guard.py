"""What `launch.train` asks before it makes any array: does the compiled step fit into these devices?

May import: everything in framework but trainer and hooks.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from framework.config import Config
from framework.metrics.memory import MemoryInUse
from framework.metrics.tables import human_bytes
from framework.plan.compiled import needed_bytes, peak_bytes
from framework.plan.report import needs
from framework.plan.suggest import suggestions
from framework.plan.targets import resolve
from framework.program import Program

_LARGEST = 3


@dataclass(frozen=True)
class Need:
    """Bytes of device memory that a step takes at its peak, and what of it lives between steps too.

    Attributes:
      peak: of the fullest moment. resident: state and batch.
      groups: of the state by group, and "activations and temporaries", largest first.
      message: the compiler's words, when it refused the program.
    """

    peak: int
    resident: int
    groups: dict[str, int]
    message: str = ""


def need(program: Program) -> Need:
    """Compiles the step, or takes it from the compilation cache, and reads what it needs."""
    layout = program.layout
    batch = sum(spec.num_bytes for spec in program.batch_specs.values()) // program.batch_sharding.num_devices
    device, hosted = (layout.bytes_per_device(memory_kind=kind) for kind in ("device", "pinned_host"))
    message = ""
    try:
        peak = peak_bytes(program.compiled_step.memory_analysis(), program.mesh.devices.flat[0].platform, hosted)
    except jax.errors.JaxRuntimeError as error:
        named = needed_bytes(str(error))
        if named is None:
            raise
        peak, message = named, str(error).splitlines()[0]
    groups = {group: layout.bytes_per_device(group, "device") for group in ("parameter", "frozen", "optimizer", "ema")}
    groups["activations and temporaries"] = max(0, peak - device - batch)
    return Need(peak, device + batch, dict(sorted(groups.items(), key=lambda item: -item[1])), message)


def refusal(config: Config, program: Program, found: Need, limit: int | None) -> str | None:
    """Why the run should not start: None when it fits, or when nobody knows what the device has.

    Args:
        config: resolved for these devices.
        program: on these devices.
        found: what it needs.
        limit: device memory in bytes, instead of what the devices say they have; None asks them.
    """
    target = resolve("local")
    limit = target.limit_bytes if limit is None else limit
    if not found.message and (limit is None or found.peak <= limit):
        return None
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in list(found.groups.items())[:_LARGEST] if size)
    lines = [
        f"the training step needs {human_bytes(found.peak)} on each device, and there are {human_bytes(limit)}",
        *([f"the compiler says: {found.message}"] if found.message else []),
        f"the largest parts: {parts}",
    ]
    closed = suggestions(config, target, limit or 0, found.peak)
    lines += [f"would fit: {one['setting']} ({needs(one)})" for one in closed]
    if not closed:
        lines.append("no other setting of remat, accumulation, placement and sharding fits: it takes more devices")
    lines.append("nothing was started; --force tries all the same, and launch.plan shows every buffer")
    return "\n".join(lines)


def compare(found: Need, measured: MemoryInUse) -> str:
    """Predicted beside measured, after the first steps. The device's counters know temporaries; a CPU has none."""
    if measured.device_peak_bytes is not None:
        error = measured.device_peak_bytes / found.peak - 1.0
        return (
            f"memory per device: predicted peak {human_bytes(found.peak)}, measured "
            f"{human_bytes(measured.device_peak_bytes)} ({100 * error:+.1f}%)"
        )
    error = measured.device_bytes / found.resident - 1.0
    return (
        f"memory per device: predicted peak {human_bytes(found.peak)}; of it, between steps, predicted "
        f"{human_bytes(found.resident)}, measured {human_bytes(measured.device_bytes)} ({100 * error:+.1f}%)"
    )
