"""How much host memory a save uses: a copy of the state, or a window through which it is written.

A copy is written in the background, but needs as much host memory again as the state that this process saves. If the
host has no room for it, or if the config says so, training waits while the state is written a few rows at a time.
"""

from __future__ import annotations

import jax

from plimsoll.framework.devices.accelerators import GIB, get_free_memory_bytes
from plimsoll.framework.layout import PyTree
from plimsoll.framework.processes import distributed
from plimsoll.framework.program.program import Program

# Memory to leave free besides the copy of the state: for the next batches, and for programs that are compiled later.
_RESERVE_BYTES = 1 << 30
_MAX_WINDOW_BYTES = 1 << 30


def choose_window(program: Program, state: PyTree) -> int | None:
    """Return the bytes of the window for a save of this state; None if it can be copied. Collective.

    Args:
        program: the run's program.
        state: the training state.
    """
    window_gib = program.experiment.checkpoint.window_gib
    if window_gib is not None:
        return int(window_gib * GIB)
    free = get_free_memory_bytes()
    if distributed.is_true_on_all(count_copied_bytes(program, state) + _RESERVE_BYTES <= free):
        return None
    return min(_MAX_WINDOW_BYTES, free // 4)


def count_copied_bytes(program: Program, state: PyTree) -> int:
    """Return the bytes of host memory that this process needs to save a state without a window."""
    parts = program.backend.parts.parts
    split_stages = {part.stage for part in parts}
    total = 0
    for group, tree in state.items():
        # Buffers of gradients are not saved.
        if group == "gradient":
            continue
        for stage, stage_tree in tree.items():
            for x in jax.tree.leaves(stage_tree):
                written = sum(shard.data.nbytes for shard in x.addressable_shards if shard.replica_id == 0)
                # Parts of a stack are joined in host memory before they are copied, each device's replicas too.
                joined = sum(shard.data.nbytes for shard in x.addressable_shards) if stage in split_stages else 0
                total += written + joined
    return total
