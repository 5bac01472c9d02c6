"""Host memory of a save: a copy of the state, or a window through which the state is written.

A copy is written in the background, but needs as much host memory again as the state that this process saves. If the
host has no room for it, or the config sets a smaller window, training waits while the state is written a few rows at a
time.
"""

from __future__ import annotations

from plimsoll.framework.devices.accelerators import GIB
from plimsoll.framework.devices.host import get_free_memory_bytes
from plimsoll.framework.layout import UNSAVED_GROUPS, StateLayout
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
    window = choose_window(copied, window_gib, _free_bytes_here())
    if distributed.is_true_on_all(window is None):
        return None
    if window_gib is not None:
        return int(window_gib * GIB)
    return _agree_on_least(MAX_WINDOW_BYTES if window is None else window)


def agree_on_default_window() -> int:
    """Return the bytes of the window for a save that the caller waits for anyway. Collective."""
    return _agree_on_least(_default_window(_free_bytes_here()))


def _free_bytes_here() -> int:
    # The processes on this machine save at the same time.
    return get_free_memory_bytes() // distributed.count_processes_here()


def _agree_on_least(window_bytes: int) -> int:
    # All processes write the same chunks, so they need the same window.
    return -distributed.reduce_max(-window_bytes)


def _default_window(free_bytes: int) -> int:
    return min(MAX_WINDOW_BYTES, max(0, free_bytes) // 4)


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
    return _default_window(free_bytes)


def count_copied_bytes(layout: StateLayout, parts: StackParts, num_local_devices: int, platform: str) -> int:
    """Return the bytes of host memory that each process needs to save the state without a window.

    Args:
        layout: layout of the running state.
        parts: split of the stacks in that state.
        num_local_devices: number of devices of each process.
        platform: tpu, gpu or cpu.
    """
    split_stages = {part.stage for part in parts.parts}
    total = count_written_bytes(layout, num_local_devices)
    # A GPU's checkpoints are not written by orbax, and parts of its stacks are not joined; see `Run.save`.
    if platform == "gpu":
        return total
    # While it writes, orbax holds up to a second copy; half to three quarters of one were measured.
    total *= 2
    for leaf in layout:
        # Parts of a stack are joined in host memory first, the replicas too.
        if leaf.group not in UNSAVED_GROUPS and leaf.path.split("/")[1] in split_stages:
            total += leaf.bytes_per_device * num_local_devices
    return total


def count_written_bytes(layout: StateLayout, num_local_devices: int) -> int:
    """Return the bytes that each process writes at most, see `count_copied_bytes`.

    Buffers of gradients are not saved. Replicas on the devices of one process are written only once.
    """
    leaves = (leaf for leaf in layout if leaf.group not in UNSAVED_GROUPS)
    return sum(min(leaf.spec.num_bytes, leaf.bytes_per_device * num_local_devices) for leaf in leaves)
