"""What `plimsoll train` asks before it makes any array: does the compiled step fit into these devices?"""

from __future__ import annotations

from typing import NamedTuple

import jax

from framework.config import Config
from framework.layers.base import batch_specs
from framework.metrics.memory import MemoryInUse
from framework.plan.compiled import refused
from framework.plan.report import needs
from framework.plan.suggest import suggestions
from framework.plan.targets import Target, resolve
from framework.program.program import Program
from framework.terminal.tables import human_bytes


class Need(NamedTuple):
    """Bytes of device memory that a step takes at its peak, and those of it that live between steps too.

    Attributes:
      peak: of the fullest moment.
      resident: state and batch.
      groups: of the state by group, and "activations and temporaries".
      message: the compiler's words, when it refused the program.
    """

    peak: int
    resident: int
    groups: dict[str, int]
    message: str = ""


def need(program: Program) -> Need:
    """Compiles the step, or takes it from the compilation cache, and reads what it needs."""
    layout = program.layout
    message = ""
    state = layout.bytes_per_device(memory_kind="device")
    # As the data delivers it: what a companion adds is gone with the step that it was added for.
    delivered = batch_specs(program.experiment.data.arrays())
    batch = sum(spec.num_bytes for spec in delivered.values()) // program.mesh.size
    try:
        peak = max(program.execution.peak_bytes(), _companion_peak(program))
    except jax.errors.JaxRuntimeError as error:
        peak, message = refused(error)
    groups = {group: layout.bytes_per_device(group, "device") for group in ("parameter", "frozen", "optimizer", "ema")}
    groups["activations and temporaries"] = max(0, peak - state - batch)
    return Need(peak, state + batch, groups, message)


def _companion_peak(program: Program) -> int:
    """The bytes of a device while the experiment's companion completes a batch; 0 where it runs nothing."""
    companion = program.experiment.companion
    if companion is None:
        return 0
    ledgers = companion.rehearsed(program, program.execution.compile_here)
    return max((ledger.peak for ledger in ledgers.values()), default=0)


def refusal(
    config: Config, program: Program, found: Need, limit: int | None, target: Target | None = None
) -> str | None:
    """Says why the run should not start: None when it fits, or when nobody knows what the device has.

    Args:
        config, program: resolved for these devices.
        found: what it needs.
        limit: device memory in bytes, instead of what the devices say they have; None asks them.
        target: what the program was built for, if not for the devices at hand.
    """
    target = target or resolve("local")
    limit = target.limit_bytes if limit is None else limit
    if not found.message and (limit is None or found.peak <= limit):
        return None
    largest = sorted(found.groups.items(), key=lambda item: -item[1])[:3]
    lines = [f"the training step needs {human_bytes(found.peak)} on each device, and there are {human_bytes(limit)}"]
    if found.message:
        lines.append(f"the compiler says: {found.message}")
    parts = [f"{name} {human_bytes(size)}" for name, size in largest if size]
    lines.append(f"the largest parts: {', '.join(parts)}")
    fitting = suggestions(config, target, limit or 0, found.peak)
    for suggestion in fitting:
        lines.append(f"would fit: {suggestion['setting']} ({needs(suggestion)})")
    if not fitting:
        lines.append("no other setting of remat, accumulation, placement and sharding fits: it takes more devices")
    # There is nothing to run where the compiler made no program.
    force = "" if found.message else "--force tries all the same, and "
    lines.append(f"nothing was started; {force}`plimsoll plan` shows every buffer")
    return "\n".join(lines)


def compare(found: Need, measured: MemoryInUse) -> str:
    """Predicted memory beside measured, as a line of text, after the first steps."""
    text = ""
    predicted = found.peak
    measured_bytes = measured.device_peak_bytes
    if measured_bytes is None:
        # A CPU has no counters of the peak: only what stays between steps can be compared.
        predicted = found.resident
        measured_bytes = measured.device_bytes
        text = f"; of it, between steps, predicted {human_bytes(predicted)}"
    error = f"({100 * (measured_bytes / predicted - 1):+.1f}%)"
    peak = human_bytes(found.peak)
    return f"memory per device: predicted peak {peak}{text}, measured {human_bytes(measured_bytes)} {error}"
