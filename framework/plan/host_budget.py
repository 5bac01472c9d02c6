"""Checks that offloaded arrays fit in host memory before `plimsoll train` compiles anything."""

from __future__ import annotations

import os

from plimsoll.framework.devices.accelerators import GIB, HOST_LIMIT, get_machine_memory_bytes
from plimsoll.framework.layout import GROUPS
from plimsoll.framework.plan.suggest import estimate_for_target
from plimsoll.framework.plan.targets import resolve
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
    # On CPU, host memory is device memory, which framework.plan.device_budget checks.
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
