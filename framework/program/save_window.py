"""Host memory of a save: a copy of the state, or a window through which the state is written.

A copy is written in the background, but needs as much host memory again as the state that this process saves. If the
host has no room for it, or the config sets a smaller window, training waits while the state is written a few rows at a
time.
"""

from __future__ import annotations

from plimsoll.framework.devices.accelerators import GIB
from plimsoll.framework.devices.host import get_free_memory_bytes
from plimsoll.framework.layout import StateLayout
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules.stack_layout import StackParts

# Memory to leave free besides the copy of the state: for the next batches, and for programs that are compiled later.
_RESERVE_BYTES = 1 << 30
MAX_WINDOW_BYTES = 1 << 30


def agree_on_window(program: Program) -> int | None:
    """Return the bytes of the window for a save now; None if every process can copy its state. Collective."""
    window_gib = program.experiment.checkpoint.window_gib
    backend = program.backend
    copied = count_copied_bytes(program.layout, backend.parts, len(program.mesh.local_devices), backend.platform)
    # The processes on this machine save at the same time.
    free_bytes = get_free_memory_bytes() // distributed.count_processes_here()
    window = choose_window(copied, window_gib, free_bytes)
    if distributed.is_true_on_all(window is None):
        return None
    if window_gib is not None:
        return int(window_gib * GIB)
    # All processes write the same chunks, so they need the same window.
    return -distributed.reduce_max(-(MAX_WINDOW_BYTES if window is None else window))


def choose_window(copied_bytes: int, window_gib: float | None, free_bytes: int | None) -> int | None:
    """Return the bytes of the window that a save needs; None if the state can be copied.

    Args:
        copied_bytes: bytes of a copy, see `count_copied_bytes`.
        window_gib: the window that the config sets; None to choose one.
        free_bytes: host memory that is free while the training state exists; None if unknown.
    """
    if window_gib is not None:
        window = int(window_gib * GIB)
        return None if copied_bytes <= window else window
    if free_bytes is None or copied_bytes + _RESERVE_BYTES <= free_bytes:
        return None
    return min(MAX_WINDOW_BYTES, max(0, free_bytes) // 4)


def count_copied_bytes(layout: StateLayout, parts: StackParts, num_local_devices: int, platform: str) -> int:
    """Return the bytes of host memory that each process needs to save the state without a window.

    Args:
        layout: layout of the running state.
        parts: split of the stacks in that state.
        num_local_devices: number of devices of each process.
        platform: tpu, gpu or cpu.
    """
    split_stages = {part.stage for part in parts.parts}
    total = 0
    for leaf in layout:
        # Buffers of gradients are not saved.
        if leaf.group == "gradient":
            continue
        held = leaf.bytes_per_device * num_local_devices
        # Replicas on the devices of one process are written only once.
        copied = min(leaf.spec.num_bytes, held)
        # While it writes, orbax holds up to a second copy; half to three quarters of one were measured. It does not
        # write the checkpoints of a GPU.
        total += copied if platform == "gpu" else 2 * copied
        # Parts of a stack are joined in host memory first, the replicas too; but not for a GPU, see `Run.save`.
        if leaf.path.split("/")[1] in split_stages and platform != "gpu":
            total += held
    return total
