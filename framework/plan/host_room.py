"""What `launch.train` asks before it compiles anything: does the host have room for what is to live there?"""

from __future__ import annotations

import os

from framework.devices.accelerators import GIB, HOST_LIMIT, machine_memory_bytes
from framework.layout import GROUPS
from framework.plan.suggest import closed_form
from framework.plan.targets import resolve
from framework.program.program import Program
from framework.terminal.tables import human_bytes


def check_host(program: Program, platform: str | None = None) -> None:
    """Whether the host has room for what is to live there, before anything is compiled. On a CPU it is device memory.

    Raises:
        ValueError: what of this process's devices is to be in host memory is more than the machine has, or than XLA may
            pin (GPU). Other processes on the machine are not counted.
    """
    platform, count = platform or program.mesh.devices.flat[0].platform, len(program.mesh.local_devices)
    if platform == "cpu":
        return
    memory, layout = program.experiment.memory, program.layout
    found = {group: layout.bytes_per_device(group, "pinned_host") for group in GROUPS}
    if memory.activations != "device" or "offload" in memory.remat:
        found["activations"] = closed_form(program.experiment, resolve("local")).host_breakdown["activations"]
    need, machine = count * sum(found.values()), machine_memory_bytes()
    pinned = int(os.environ.get(HOST_LIMIT, 64)) * GIB if platform == "gpu" else machine
    if need > machine:
        why = (
            f"this machine has {human_bytes(machine)}; a larger mesh.fsdp, learner.moment_dtype=bfloat16, "
            "memory.hosted_layers, or device for one of memory.* needs less"
        )
    elif need > pinned:
        why = (
            f"{HOST_LIMIT}={pinned // GIB} lets XLA pin {human_bytes(pinned)}; set it to {-(-need // GIB)} or unset it"
        )
    else:
        return
    parts = ", ".join(f"{name} {human_bytes(count * size)}" for name, size in found.items() if size)
    raise ValueError(f"config.memory puts {human_bytes(need)} into host memory ({parts}), and {why}")
